"""FedBN, two rounds: all but normalisation layers averaged.

These are each client's own, and never on the wire.
"""

import torch

from tests.support import plain
from tests.support.declaration import Declared
from tests.support.harness import run_config, run_federation

DECLARED = Declared(weights=True, stays=("norm.",))
ARCH = "resnet4-imagenet-stem"


def normalising(model: torch.nn.Module) -> set[str]:
    """Return the names of weights and statistics of all layers that have statistics."""
    names = model.state_dict()
    layers = {name.rpartition(".")[0] for name in names if name.endswith("running_mean")}
    return {name for name in names if name.rpartition(".")[0] in layers}


def test_two_rounds_equal_an_independent_script(tmp_path):
    """The averaged weights and the clients' models are the script's; nothing else travels."""
    outcome, clients = plain.side_by_side(
        tmp_path, plain.SharingClient, ARCH, algo="fedbn", **plain.UNEQUAL
    )
    first = clients[0].model
    own = normalising(first)
    assert {name.rpartition(".")[2] for name in own} > {"weight", "bias", "running_var"}

    shared = clients[0].part(first.state_dict().keys() - own)
    shared = plain.after_rounds(clients, shared)

    plain.assert_weights_left(outcome, shared)
    plain.assert_models_left(outcome, clients, shared)
    plain.assert_only_weights_travel(outcome, shared)


def test_a_network_without_normalisation_is_said_to_be_averaged_whole(tmp_path, capsys):
    small = {"models": "htcnn-1", "test_samples": 20, "rounds": 1}
    run_federation(run_config(tmp_path, algo="fedbn", **small), clients=2)
    warning = "warning: htcnn-1 has no normalisation layers, so fedbn is fedavg"
    assert warning in capsys.readouterr().out

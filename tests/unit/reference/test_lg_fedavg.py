"""LG-FedAvg, two rounds: heads averaged over bodies of different architectures, which never leave their clients."""

from pathlib import Path

import pytest
import torch

from protofl_common.models.build import build_model
from protofl_common.wire.payloads import part_of
from protofl_common.wire.schema import Weights
from server_app.network.membership import FederationError
from tests.support import plain
from tests.support.attacks import values_of
from tests.support.declaration import Declared
from tests.support.harness import run_config, run_federation

DECLARED = Declared(weights=True, stays=("body.",))

ARCHS = ("cnn4", "htcnn-3", "htcnn-1")
HEAD = {"head.weight", "head.bias"}


def test_two_rounds_equal_an_independent_script(tmp_path: Path) -> None:
    unequal = {"partition": "dirichlet", "alpha": 0.5, "train_samples": 0, "total_samples": 100, "liars": 0}
    more = {"feature_dim": 16, "test_samples": 20, **unequal}
    outcome, clients = plain.side_by_side(tmp_path, plain.SharingClient, ARCHS, algo="lg-fedavg", **more)
    first = outcome.exchanged()[0][0].content.array_records["weights"]
    head = {name: torch.from_numpy(values_of(array).copy()) for name, array in first.items()}
    for number in (1, 2):
        head = plain.averaged([client.train(number, head) for client in clients], [len(one.y) for one in clients])
    assert len({len(one.y) for one in clients}) > 1
    plain.assert_close(plain.weights_left(outcome), head)
    for client in clients:
        plain.assert_close(plain.model_left(tmp_path, client.name), plain.copied(client.model) | head)
    plain.assert_only_weights_travel(outcome, HEAD)


def test_its_wire_volume_is_the_papers() -> None:
    """FedTGP, Table 5: Σ|w_i| · 2 = 2.05 M numbers of 20 clients, 100 classes and 512 features."""
    sizes = {"input_shape": (3, 32, 32), "num_classes": 100, "feature_dim": 512}
    head = part_of(build_model("htcnn-1", **sizes, seed=1), Weights(parts=("head.",)))
    numbers = 20 * 2 * sum(value.numel() for value in head.values())
    assert numbers == 20 * 2 * (512 * 100 + 100)
    assert f"{numbers / 1e6:.2f}" == "2.05"


def test_heads_of_different_shapes_are_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path, liars=0, algo="lg-fedavg", join_timeout=5.0)
    with pytest.raises(FederationError, match="differ in weights; lg-fedavg needs one shape of") as caught:
        run_federation(config, nodes=plain.on_sites(tmp_path, ("cnn4", "mobilenet-v2+fc256", "htcnn-1")))
    assert "mobilenet-v2+fc256: site-1" in str(caught.value)

"""On a real CUDA device, and skipped elsewhere: ``make test-gpu``.

What can be shown without one is in test_gpu.py.
"""

import json

import pytest
import torch
from flwr.app import MessageType

from protofl_common.experiment.catalog import CATALOG
from protofl_common.runs.folder import RunFolder
from tests.support.accidents import Killed, on_message
from tests.support.acting import SMALL, left_behind
from tests.support.harness import federate, run_config, run_federation
from tests.support.processes import superlink
from tests.support.results import left_by, without_times

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TRAINED = SMALL | {"train_samples": 60, "batch_size": 2, "device": "cuda"}
"""Thirty steps a round."""
SETTINGS = [
    *({"algo": algo} for algo in CATALOG),
    {"optimizer": "adam", "keep_optimizer": True},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"models": "resnet4-imagenet-stem"},
    {"models": "resnet18", "batch_size": 4},
    {"precision": "tf32"},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_on_cuda_the_same_seed_gives_the_same_run(changes, tmp_path):
    first = left_behind(tmp_path / "one", TRAINED | changes)
    second = left_behind(tmp_path / "two", TRAINED | changes)
    assert first == second


@pytest.mark.parametrize("algo", CATALOG)
def test_losses_on_cuda_are_nearly_those_of_the_cpu(algo, tmp_path):
    """Within 2 %, in each round: a GPU adds numbers in another order."""
    losses = []
    for device in ("cuda", "cpu"):
        settings = TRAINED | {"algo": algo, "device": device}
        clients = settings.pop("clients")
        rows = federate(tmp_path / device, clients=clients, **settings).rows
        losses.append([row["losses"]["total"] for row in rows if row["losses"]])

    on_cuda, on_cpu = losses
    assert on_cuda == pytest.approx(on_cpu, rel=0.02)
    assert on_cuda or algo in ("gaussian", "mpft")  # whose clients train nothing


def test_on_cuda_a_resumed_run_is_an_undisturbed_one(tmp_path):
    """The server dies while the clients train in round 2."""
    settings = TRAINED | {"algo": "fedtgp", "rounds": 3, "run_name": "run"}
    clients = settings.pop("clients")
    whole = federate(tmp_path / "whole", clients=clients, **settings)

    config = run_config(tmp_path / "parts", **settings)
    with pytest.raises(Killed):
        run_federation(config, clients=clients, tamper=on_message(MessageType.TRAIN, 2))

    resumed = run_federation(config | {"resume": True}, clients=clients, run_id=4712)

    assert left_by(resumed.folder) == left_by(whole.folder)


def test_fifty_clients_need_no_more_memory_of_a_gpu_than_five(tmp_path):
    """A fifth more at most, for what PyTorch reserves and does not use."""
    needed = {}
    for clients in (5, 50):
        torch.cuda.reset_peak_memory_stats()
        left_behind(tmp_path / str(clients), TRAINED | {"clients": clients})
        needed[clients] = torch.cuda.max_memory_reserved()
    assert needed[50] <= 1.2 * needed[5]


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    with superlink(tmp_path_factory.mktemp("superlink"), "--simulation") as one:
        yield one


def test_two_clients_share_a_gpu(connection, tmp_path):
    """Two clients at a time, each with half the GPU, have the results of one after the other.

    Ray runs each client in a process of its own.
    """
    rows = []
    for part in (1.0, 0.5):
        name = f"part-{part}"
        settings = "rounds=2 train-samples=20 test-samples=20"
        settings += f" out-dir={json.dumps(str(tmp_path))} run-name={json.dumps(name)}"
        federation = "num-supernodes=4 client-resources-num-cpus=1"
        federation += f" client-resources-num-gpus={part}"
        options = ("--federation-config", federation, "--run-config", settings)
        output, status = connection.run(*options, timeout=600)
        assert status == "finished:completed", output
        rows.append(without_times(RunFolder(tmp_path / name).rows()))

    assert "cuda" in output
    one_at_a_time, two_at_a_time = rows
    assert one_at_a_time == two_at_a_time

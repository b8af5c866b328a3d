"""LG-FedAvg, two rounds: heads averaged over bodies of different architectures, which never leave their clients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import MessageType
from safetensors.torch import load_file

from protofl_common.experiment.settings import Settings
from protofl_common.models.build import build_model
from protofl_common.wire.payloads import part_of
from protofl_common.wire.schema import Weights
from server_app.network.membership import FederationError
from tests.support.attacks import values_of
from tests.support.harness import run_config, run_federation
from tests.support.plain import CLIENTS, PlainClient, State, assert_close, averaged, copied, cross_entropy, model_left

ARCHS = ("cnn4", "htcnn-3", "htcnn-1")
HEAD = {"head.weight", "head.bias"}


def on_sites(folder: Path, archs: tuple[str, ...] = ARCHS) -> dict[int, dict[str, Any]]:
    return {
        50 + i: {"partition-id": i, "num-partitions": len(archs), "arch": arch, "state-dir": f"{folder}/site"}
        for i, arch in enumerate(archs)
    }


class LGClient(PlainClient):
    def __init__(self, settings: Settings, index: int) -> None:
        super().__init__(settings, index, ARCHS[index])
        self.model = self.model_of("global")

    def train(self, number: int, head: State) -> State:
        self.model.load_state_dict(copied(self.model) | head)
        velocity = [torch.zeros_like(p) for p in self.model.parameters()]
        for batch in self.batches(number):
            loss = cross_entropy(self.model(self.x[batch]), [self.y[i] for i in batch])
            self.step(loss, self.model, velocity)
        return {name: value for name, value in copied(self.model).items() if name in HEAD}


def test_two_rounds_equal_an_independent_script(tmp_path: Path) -> None:
    unequal = {"partition": "dirichlet", "alpha": 0.5, "train_samples": 0, "total_samples": 100}
    config = run_config(tmp_path, liars=0, algo="lg-fedavg", feature_dim=16, test_samples=20, **unequal)
    outcome = run_federation(config, nodes=on_sites(tmp_path))

    clients = [LGClient(Settings.from_run_config(config), index) for index in range(CLIENTS)]
    sent = next(message for message, _ in outcome.grid.log if message.metadata.message_type == MessageType.TRAIN)
    first = sent.content.array_records["weights"]
    head = {name: torch.from_numpy(values_of(array).copy()) for name, array in first.items()}
    for number in (1, 2):
        head = averaged([client.train(number, head) for client in clients], [len(one.y) for one in clients])
    assert len({len(one.y) for one in clients}) > 1
    assert_close(load_file(outcome.folder / "weights.safetensors"), head)
    for client in clients:
        assert_close(model_left(tmp_path, client.name), copied(client.model) | head)
    for message, reply in outcome.grid.log:
        training = message.metadata.message_type == MessageType.TRAIN
        both = [message] * (message.metadata.message_type != MessageType.QUERY) + [reply] * training
        for content in (one.content for one in both):
            assert list(content.array_records) == ["weights"]
            assert set(content.array_records["weights"]) == HEAD


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
        run_federation(config, nodes=on_sites(tmp_path, ("cnn4", "mobilenet-v2+fc256", "htcnn-1")))
    assert "mobilenet-v2+fc256: site-1" in str(caught.value)

"""FedGH, two rounds: bodies of different architectures; the header's steps by hand, in float64, on every mean alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MessageType
from safetensors.torch import load_file

from protofl_common.basics.seeding import derive_seed
from protofl_common.experiment.settings import Settings
from server_app.network.membership import FederationError
from tests.support.attacks import values_of
from tests.support.harness import Outcome, run_config, run_federation
from tests.support.plain import CLIENTS, PlainClient, State, assert_close, copied, cross_entropy, model_left
from tests.support.results import metrics, models_left

ARCHS = ("cnn4", "htcnn-3", "htcnn-1")
HEADER = {"head.weight", "head.bias"}
Means = dict[int, np.ndarray]


def federation(folder: Path, archs: tuple[str, ...] = ARCHS, **settings: Any) -> tuple[Outcome, dict[str, Any]]:
    small: dict[str, Any] = {"feature_dim": 16, "test_samples": 20, "train_samples": 25, "lr": 0.02}
    config = run_config(folder, liars=0, algo="fedgh", join_timeout=5.0, **small | settings)
    nodes = {
        50 + i: {"partition-id": i, "num-partitions": len(archs), "arch": arch, "state-dir": f"{folder}/site"}
        for i, arch in enumerate(archs)
    }
    return run_federation(config, nodes=nodes), config


class FedGHClient(PlainClient):
    def __init__(self, settings: Settings, index: int) -> None:
        super().__init__(settings, index, ARCHS[index])
        self.model = self.model_of("global")

    def train(self, number: int, header: State) -> Means:
        self.model.load_state_dict(copied(self.model) | header)
        velocity = [torch.zeros_like(p) for p in self.model.parameters()]
        for batch in self.batches(number):
            self.step(cross_entropy(self.model(self.x[batch]), [self.y[i] for i in batch]), self.model, velocity)
        with torch.no_grad():
            features = self.model.body(self.x).double().numpy()
        return {label: np.mean([features[i] for i in rows], axis=0) for label, rows in self.rows_of().items()}

    def rows_of(self) -> dict[int, list[int]]:
        return {label: [i for i, one in enumerate(self.y) if one == label] for label in sorted(set(self.y))}


def trained(header: State, sets: list[Means], order: list[list[int]], lr: float) -> State:
    """θ ← θ − η/B Σ (softmax(W r + b) − onehot(s)) [r, 1] over each minibatch of representations r of class s."""
    w, b = (header[f"head.{name}"].double().numpy().copy() for name in ("weight", "bias"))
    pairs = [(mean, label) for one in sets for label, mean in one.items()]
    for batch in order:
        step_w, step_b = np.zeros_like(w), np.zeros_like(b)
        for mean, label in (pairs[i] for i in batch):
            scores = np.exp(w @ mean + b)
            error = scores / scores.sum() - np.eye(len(b))[label]
            step_w, step_b = step_w + np.outer(error, mean), step_b + error
        w, b = w - lr * step_w / len(batch), b - lr * step_b / len(batch)
    return {"head.weight": torch.from_numpy(w).float(), "head.bias": torch.from_numpy(b).float()}


def sent(outcome: Outcome, kind: str, number: int) -> list[State]:
    """The weights that each client was sent."""
    messages = [message for message, _ in outcome.grid.log if message.metadata.message_type == kind]
    records = [one.content.array_records["weights"] for one in messages if one.metadata.group_id == str(number)]
    return [{name: torch.from_numpy(values_of(array).copy()) for name, array in one.items()} for one in records]


@pytest.mark.parametrize(("epochs", "size"), [(1, 1), (2, 4)])
def test_two_rounds_equal_an_independent_script(epochs: int, size: int, tmp_path: Path) -> None:
    hparams = {"fedgh__server_epochs": epochs, "fedgh__server_batch_size": size, "fedgh__server_lr": 0.1}
    outcome, config = federation(tmp_path, partition="label-shift", alpha=0.5, **hparams)

    clients = [FedGHClient(Settings.from_run_config(config), index) for index in range(CLIENTS)]
    shuffle = torch.Generator().manual_seed(derive_seed(clients[0].seed, "fedgh"))
    header = sent(outcome, MessageType.TRAIN, 1)[0]
    for number in (1, 2):
        for received in sent(outcome, MessageType.TRAIN, number):
            assert received.keys() == HEADER
            assert_close(received, header)
        sets = [client.train(number, header) for client in clients]
        count = sum(len(one) for one in sets)
        orders = [torch.randperm(count, generator=shuffle).tolist() for _ in range(epochs)]
        header = trained(header, sets, [order[i : i + size] for order in orders for i in range(0, count, size)], 0.1)
    assert_close(load_file(outcome.folder / "weights.safetensors"), header)
    for client in clients:
        assert_close(model_left(tmp_path, client.name), copied(client.model) | header)
    held = sum(len(client.rows_of()) for client in clients)
    assert held < CLIENTS * 10  # so some class is missing somewhere
    assert outcome.rows[1]["bytes"] == {"up": held * (4 * 16 + 8), "down": CLIENTS * 4 * (16 + 1) * 10}


def test_with_one_header_that_is_never_trained_it_is_local(tmp_path: Path) -> None:
    """Nothing else of what it exchanges reaches a client, and the pass for the representations leaves no trace."""
    small = {"head": "orthogonal-shared", "initial_weights": "shared", "train_samples": 45}
    outcomes = [run_federation(run_config(tmp_path / algo, algo=algo, **small), CLIENTS) for algo in ("fedgh", "local")]
    found, wanted = (models_left(one) for one in outcomes)
    assert metrics(outcomes[0]) == metrics(outcomes[1])
    for site, one in wanted.items():
        assert all(torch.equal(found[site][name], value) for name, value in one.items())
    assert "server" not in outcomes[0].rows[0]


def test_heads_of_several_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="differ in weights; fedgh needs one shape of what it shares"):
        federation(tmp_path, ("htcnn-1", "mobilenet-v2+fc256"))

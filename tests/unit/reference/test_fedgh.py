"""FedGH, two rounds: bodies of different architectures.

The header's steps by hand, in float64, on every mean alone.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import MessageType

from protofl_common.basics.seeding import derive_seed
from tests.support import plain
from tests.support.declaration import PLAIN, Declared
from tests.support.harness import Outcome

DECLARED = Declared(PLAIN, acts={"server-epochs": 3, "server-lr": 0.5, "server-batch-size": 4})

ARCHS = ("cnn4", "htcnn-3", "htcnn-1")
HEADER = {"head.weight", "head.bias"}
Means = dict[int, np.ndarray]


class FedGHClient(plain.PlainClient):
    def train(self, number: int, header: plain.State) -> Means:
        self.model.load_state_dict(plain.copied(self.model) | header)
        self.sgd(number)
        return {label: mean.numpy() for label, mean in self.class_means().items()}


def trained(
    header: plain.State, sets: list[Means], batches: Iterable[list[int]], lr: float
) -> plain.State:
    """θ ← θ − η/B Σ (softmax(W r + b) − onehot(s)) [r, 1], B by B representations r of class s."""
    w = header["head.weight"].double().numpy().copy()
    b = header["head.bias"].double().numpy().copy()
    pairs = [(mean, label) for one in sets for label, mean in one.items()]
    for batch in batches:
        step_w = np.zeros_like(w)
        step_b = np.zeros_like(b)
        for i in batch:
            mean, label = pairs[i]
            scores = np.exp(w @ mean + b)
            error = scores / scores.sum() - np.eye(len(b))[label]
            step_w = step_w + np.outer(error, mean)
            step_b = step_b + error
        w = w - lr * step_w / len(batch)
        b = b - lr * step_b / len(batch)
    return {"head.weight": torch.from_numpy(w).float(), "head.bias": torch.from_numpy(b).float()}


def headers_sent(outcome: Outcome, kind: str, number: int) -> list[plain.State]:
    """What the messages of this kind of a round brought the clients."""
    messages = [message for message, _ in outcome.exchanged(kind, number)]
    return [plain.tensors(message.content.array_records["weights"]) for message in messages]


@pytest.mark.parametrize(("epochs", "size"), [(1, 1), (2, 4)])
def test_two_rounds_equal_an_independent_script(epochs: int, size: int, tmp_path: Path) -> None:
    """The header that travels and is left, the models and the bytes are the script's.

    Some class is missing at some client.
    """
    settings = {
        "feature_dim": 16,
        "lr": 0.02,
        "liars": 0,
        "fedgh__server_epochs": epochs,
        "fedgh__server_batch_size": size,
        "fedgh__server_lr": 0.1,
        **plain.UNEQUAL,
    }
    outcome, clients = plain.side_by_side(tmp_path, FedGHClient, ARCHS, algo="fedgh", **settings)

    shuffle = torch.Generator().manual_seed(derive_seed(clients[0].seed, "fedgh"))
    header = headers_sent(outcome, MessageType.TRAIN, 1)[0]
    for number in (1, 2):
        for received in headers_sent(outcome, MessageType.TRAIN, number):
            assert received.keys() == HEADER
            plain.assert_close(received, header)
        sets = [client.train(number, header) for client in clients]
        batches = plain.minibatches(sum(len(means) for means in sets), size, epochs, shuffle)
        header = trained(header, sets, batches, 0.1)

    plain.assert_close(plain.weights_left(outcome), header)
    models = {client.name: plain.copied(client.model) | header for client in clients}
    plain.assert_models_left(tmp_path, models)

    means_sent = sum(len(client.rows_of()) for client in clients)
    assert means_sent < plain.CLIENTS * 10
    assert outcome.rows[1]["bytes"] == {
        "up": means_sent * (4 * 16 + 8),
        "down": plain.CLIENTS * 4 * (16 + 1) * 10,
    }

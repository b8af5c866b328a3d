"""FedGH, two rounds: bodies of different architectures.

The header's steps by hand, in float64, on every mean alone.
"""

from collections.abc import Iterable

import pytest
import torch
from flwr.app import MessageType

from protofl_common.basics.seeding import derive_seed
from tests.support import plain
from tests.support.declaration import PLAIN, Declared
from tests.support.harness import Outcome

DECLARED = Declared(PLAIN, acts={"server-epochs": 3, "server-lr": 0.5, "server-batch-size": 4})

HEADER = {"head.weight", "head.bias"}
LR = 0.1
Pair = tuple[int, torch.Tensor]


class FedGHClient(plain.SharingClient):
    def means(self, number: int, header: plain.State) -> list[Pair]:
        """Train, and return each class with its mean representation."""
        self.train(number, header)
        return list(self.class_means().items())


def trained(header: plain.State, pairs: list[Pair], batches: Iterable[list[int]]) -> plain.State:
    """Return the header after θ ← θ − η/B Σ (softmax(W r + b) − onehot(s)) [r, 1], batch by batch.

    A batch has B pairs of a class s and a mean representation r.
    """
    w = header["head.weight"].double()
    b = header["head.bias"].double()
    one_hot = torch.eye(len(b))
    for batch in batches:
        step_w = torch.zeros_like(w)
        step_b = torch.zeros_like(b)
        for i in batch:
            label, mean = pairs[i]
            scores = torch.exp(w @ mean + b)
            error = scores / scores.sum() - one_hot[label]
            step_w += torch.outer(error, mean)
            step_b += error
        w = w - LR / len(batch) * step_w
        b = b - LR / len(batch) * step_b
    return {"head.weight": w.float(), "head.bias": b.float()}


def headers_sent(outcome: Outcome, kind: str, number: int) -> list[plain.State]:
    """Return the headers that a round's messages of this kind brought the clients."""
    messages = [message for message, _ in outcome.exchanged(kind, number)]
    return [plain.tensors(message.content.array_records["weights"]) for message in messages]


@pytest.mark.parametrize(("epochs", "size"), [(1, 1), (2, 4)])
def test_two_rounds_equal_an_independent_script(epochs, size, tmp_path):
    """The header that travels and is left, the models and the bytes are the script's.

    Some class is missing at some client.
    """
    settings = plain.UNEQUAL | {
        "lr": 0.02,
        "liars": 0,
        "fedgh__server_epochs": epochs,
        "fedgh__server_batch_size": size,
        "fedgh__server_lr": LR,
    }
    outcome, clients = plain.side_by_side(
        tmp_path, FedGHClient, plain.HETEROGENEOUS, algo="fedgh", **settings
    )

    shuffle = torch.Generator().manual_seed(derive_seed(clients[0].seed, "fedgh"))
    header = headers_sent(outcome, MessageType.TRAIN, 1)[0]
    for number in (1, 2):
        for received in headers_sent(outcome, MessageType.TRAIN, number):
            assert received.keys() == HEADER
            plain.assert_close(received, header)
        pairs = []
        for client in clients:
            pairs += client.means(number, header)
        batches = plain.minibatches(len(pairs), size, epochs, shuffle)
        header = trained(header, pairs, batches)

    plain.assert_weights_left(outcome, header)
    plain.assert_models_left(outcome, clients, header)

    assert len(pairs) < plain.CLIENTS * 10  # classes
    assert outcome.rows[1]["bytes"] == {
        "up": len(pairs) * (4 * 16 + 8),  # 16 features, and a label
        "down": plain.CLIENTS * 4 * (16 + 1) * 10,  # weights and bias of each class
    }

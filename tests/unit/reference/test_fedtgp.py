"""FedTGP, two rounds with the paper's defaults.

The clients' Eq. 11, and the server's own draw, Eq. 9 and Eq. 10.
"""

from itertools import combinations

import pytest
import torch

from protofl_common.basics.seeding import derive_seed
from tests.support import plain
from tests.support.declaration import PLAIN, Declared

SERVER = {"transform": False, "server-epochs": 3, "server-lr": 0.5, "server-batch-size": 4}
ACTS = {
    "lambda": 3.0,
    "distance": "l1",
    "granularity": "sample",
    "margin": "fixed",
    "margin-threshold": 0.001,
}
DECLARED = Declared(PLAIN, losses=("cross-entropy", "prototype"), acts=ACTS | SERVER)

DIM = 16
# The server's training:
EPOCHS = 3
RATE = 0.01
Table = dict[int, torch.Tensor]


class Client(plain.PlainClient):
    starts_alike = False

    def train(self, number: int, prototypes: Table) -> Table:
        """Train on CE + 0.1 · mean over a batch's classes c of ‖mean z of c − P̂^c‖₂ (Eq. 11).

        Return the class means after it.
        """
        self.sgd(number, loss=lambda batch: self.loss(batch, prototypes))
        return {c: mean.float() for c, mean in self.class_means().items()}

    def loss(self, batch: list[int], prototypes: Table) -> torch.Tensor:
        """Return the cross-entropy plus 0.1 times the mean distance to the classes' prototypes."""
        z = self.model.body(self.x[batch])
        labels = self.labels(batch)
        distances = []
        for c in set(labels) & prototypes.keys():
            is_own = torch.tensor(labels) == c
            distances.append((z[is_own].mean(0) - prototypes[c]).norm())
        apart = sum(distances) / max(1, len(distances))
        return plain.cross_entropy(self.model.head(z), labels) + 0.1 * apart


class Server:
    """The server: vectors Ṕ ~ N(0, 1), and F = FC → ReLU → FC if there is a ``transform``.

    Both are drawn once, and trained on in every round, in batches of ``size`` (0: all at once).
    """

    def __init__(self, seed: int, transform: bool, size: int) -> None:
        start = derive_seed(seed, "fedtgp")
        self.size = size
        torch.manual_seed(start)
        self.vectors = torch.randn(10, DIM).requires_grad_()
        self.layers = [torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)] if transform else []
        self.shuffle = torch.Generator().manual_seed(start)
        self.seen: set[int] = set()

    def prototypes(self) -> Table:
        """Return P̂^c = F(Ṕ^c) of each class c that a client has ever sent."""
        vectors = {c: self.vectors[c] for c in sorted(self.seen)}
        if not self.layers:
            return vectors
        first, second = self.layers
        return {c: second(torch.relu(first(vector))) for c, vector in vectors.items()}

    def train(self, sets: list[Table]) -> None:
        """Train by Eq. 9, with the adaptive margin of Eq. 10, on the clients' class means."""
        pairs = []
        for one in sets:
            pairs += one.items()
        margin = adaptive_margin(sets)
        self.seen |= {c for c, _ in pairs}
        trained = [self.vectors]
        for layer in self.layers:
            trained += layer.parameters()

        for batch in plain.minibatches(len(pairs), self.size or len(pairs), EPOCHS, self.shuffle):
            table = self.prototypes()
            losses = []
            for i in batch:
                c, mean = pairs[i]
                scores = {d: torch.exp(-(mean - p).norm()) for d, p in table.items()}
                scores[c] = scores[c] * torch.exp(torch.tensor(-margin))
                losses.append(-torch.log(scores[c] / sum(scores.values())))
            plain.descend(sum(losses) / len(losses), trained, RATE)


def adaptive_margin(sets: list[Table]) -> float:
    """Return the largest distance between two classes' centres, at most the paper's τ = 100."""
    centres = [sum(means) / len(means) for means in plain.by_class(sets).values()]
    distances = [float((a - b).norm()) for a, b in combinations(centres, 2)]
    return min(100.0, max(distances))


@pytest.mark.parametrize(("transform", "size"), [(True, 10), (False, 0)])
def test_two_rounds_equal_an_independent_script(transform, size, tmp_path):
    """Global prototypes and models are the script's, also without F and in a single batch."""
    settings = {"fedtgp__server_epochs": EPOCHS, **plain.UNEQUAL}
    if not transform:  # else both are the defaults
        settings |= {"fedtgp__transform": False, "fedtgp__server_batch_size": size}
    outcome, clients = plain.side_by_side(tmp_path, Client, "htcnn-1", algo="fedtgp", **settings)

    server = Server(clients[0].seed, transform, size)
    prototypes = {}
    for number in (1, 2):
        server.train([client.train(number, prototypes) for client in clients])
        prototypes = {c: p.detach() for c, p in server.prototypes().items()}

    plain.assert_prototypes_left(outcome, prototypes, rtol=1e-4, atol=1e-5)
    plain.assert_models_left(outcome, clients)

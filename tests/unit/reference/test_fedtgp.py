"""FedTGP, two rounds with the paper's defaults: the clients' Eq. 11, and the server's own draw, Eq. 9 and Eq. 10."""

from itertools import combinations
from pathlib import Path

import torch
from safetensors.torch import load_file

from protofl_common.basics.seeding import derive_seed
from tests.support import plain
from tests.support.declaration import PLAIN, Declared

DECLARED = Declared(
    PLAIN,
    losses=("cross-entropy", "prototype"),
    acts={
        "lambda": 3.0,
        "distance": "l1",
        "granularity": "sample",
        "margin": "fixed",
        "margin-threshold": 0.001,
        "transform": False,
        "server-epochs": 3,
        "server-lr": 0.5,
        "server-batch-size": 4,
    },
)

DIM, EPOCHS, RATE, SIZE = 16, 3, 0.01, 10
Table = dict[int, torch.Tensor]


class Client(plain.PlainClient):
    starts_alike = False

    def train(self, number: int, prototypes: Table) -> Table:
        """CE + 0.1 · mean over the batch's classes of ‖mean z of the class − P̂^c‖₂; then the class means."""
        self.model.train()
        velocity = [torch.zeros_like(p) for p in self.model.parameters()]
        for batch in self.batches(number):
            z, labels = self.model.body(self.x[batch]), [self.y[i] for i in batch]
            loss = plain.cross_entropy(self.model.head(z), labels)
            apart = [
                (z[[y == c for y in labels]].mean(0) - prototypes[c]).norm() for c in set(labels) if c in prototypes
            ]
            if apart:
                loss = loss + 0.1 * sum(apart) / len(apart)
            self.step(loss, self.model, velocity)
        with torch.no_grad():
            z = self.model.eval().body(self.x)
        return {c: z[[y == c for y in self.y]].mean(0) for c in sorted(set(self.y))}


class Server:
    """Ṕ ~ N(0, 1) and F = FC → ReLU → FC, drawn once, trained on in every round."""

    def __init__(self, seed: int) -> None:
        start = derive_seed(seed, "fedtgp")
        torch.manual_seed(start)
        self.vectors = torch.randn(10, DIM).requires_grad_()
        self.layers = [torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)]
        self.shuffle = torch.Generator().manual_seed(start)
        self.seen: set[int] = set()

    def prototypes(self) -> Table:
        first, second = self.layers
        return {c: second(torch.relu(first(self.vectors[c]))) for c in sorted(self.seen)}

    def train(self, sets: list[Table]) -> None:
        pairs = [(c, mean) for one in sets for c, mean in one.items()]
        centres = {c: torch.stack([mean for d, mean in pairs if d == c]).mean(0) for c, _ in pairs}
        margin = min(100.0, max(float((centres[a] - centres[b]).norm()) for a, b in combinations(centres, 2)))
        self.seen |= centres.keys()
        trained = [self.vectors, *(p for layer in self.layers for p in layer.parameters())]
        for _ in range(EPOCHS):
            order = torch.randperm(len(pairs), generator=self.shuffle).tolist()
            for start in range(0, len(order), SIZE):
                table, losses = self.prototypes(), []
                for c, mean in (pairs[i] for i in order[start : start + SIZE]):
                    near = {d: torch.exp(-(mean - p).norm() - margin * (d == c)) for d, p in table.items()}
                    losses.append(-torch.log(near[c] / sum(near.values())))
                gradients = torch.autograd.grad(sum(losses) / len(losses), trained)
                with torch.no_grad():
                    for p, g in zip(trained, gradients, strict=True):
                        p.sub_(RATE * g)


def test_two_rounds_equal_an_independent_script(tmp_path: Path) -> None:
    more = {"feature_dim": DIM, "fedtgp__server_epochs": EPOCHS, **plain.LABEL_SHIFT}
    outcome, clients = plain.side_by_side(tmp_path, Client, "htcnn-1", algo="fedtgp", **more)
    server, prototypes = Server(clients[0].seed), Table()
    for number in (1, 2):
        server.train([client.train(number, prototypes) for client in clients])
        prototypes = {c: p.detach() for c, p in server.prototypes().items()}
    found = load_file(outcome.folder / "prototypes.safetensors")
    assert found["labels"].tolist() == sorted(prototypes)
    torch.testing.assert_close(found["means"], torch.stack(list(prototypes.values())), rtol=1e-4, atol=1e-5)
    for client in clients:
        plain.assert_close(plain.model_left(outcome.folder, client.name), plain.copied(client.model))

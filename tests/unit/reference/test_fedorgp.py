"""FedORGP, two rounds: angles, the server's training, its prototypes, one at a time in float64."""

from pathlib import Path

import pytest
import torch

from protofl_common.basics.seeding import derive_seed
from tests.support import plain
from tests.support.declaration import PLAIN, Declared

DECLARED = Declared(
    PLAIN,
    losses=("cross-entropy", "prototype"),
    acts={
        "lambda": 9.0,
        "gamma": 0.0,
        "server-epochs": 3,
        "server-lr": 0.5,
        "server-batch-size": 4,
    },
)

ARCHS, DIM, SIZE = ("cnn4", "htcnn-3", "htcnn-1"), 16, 8
Table = dict[int, torch.Tensor]


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sum() / (a * a).sum().sqrt() / (b * b).sum().sqrt()


class FedORGPClient(plain.PlainClient):
    starts_alike = False

    def train(self, number: int, prototypes: Table) -> Table:
        def turn(z: torch.Tensor, label: int) -> torch.Tensor | float:
            return (
                self.hparams.lambda_ * (1 - cosine(z.double(), prototypes[label]))
                if label in prototypes
                else 0.0
            )

        self.sgd(number, loss=lambda batch: self.cross_entropy_and(batch, turn))
        return self.class_means()


class PlainServer:
    def __init__(self, client: FedORGPClient) -> None:
        self.hparams, seed = client.hparams, derive_seed(client.seed, "fedorgp")
        torch.manual_seed(seed)
        self.vectors = torch.randn(10, DIM).double().requires_grad_()
        first, second = torch.nn.Linear(DIM, DIM).double(), torch.nn.Linear(DIM, DIM).double()
        self.parameters = [self.vectors, first.weight, first.bias, second.weight, second.bias]
        self.generator = torch.Generator().manual_seed(seed)
        self.seen: set[int] = set()

    def prototype(self, label: int) -> torch.Tensor:
        vectors, weight, bias, weight2, bias2 = self.parameters
        return weight2 @ torch.relu(weight @ vectors[label] + bias) + bias2

    def train(self, sets: list[Table]) -> Table:
        samples = [(label, mean) for one in sets for label, mean in one.items()]
        self.seen |= {label for label, _ in samples}
        for batch in plain.minibatches(
            len(samples), SIZE, self.hparams.server_epochs, self.generator
        ):
            plain.descend(
                self.loss([samples[i] for i in batch]), self.parameters, self.hparams.server_lr
            )
        return {label: self.prototype(label).detach() for label in sorted(self.seen)}

    def loss(self, batch: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        total, prototypes = (
            torch.zeros((), dtype=torch.float64),
            {label: self.prototype(label) for label in self.seen},
        )
        for label, mean in batch:
            total = total + 1 - cosine(mean, prototypes[label])
            others = [
                cosine(mean, one).abs() for other, one in prototypes.items() if other != label
            ]
            total = total + self.hparams.gamma * sum(others) / len(others)
        return total / len(batch)


@pytest.mark.parametrize(("lambda_", "gamma"), [(10.0, 10.0), (1.0, 0.5)])
def test_two_rounds_equal_an_independent_script(
    lambda_: float, gamma: float, tmp_path: Path
) -> None:
    hparams = {
        "fedorgp__lambda": lambda_,
        "fedorgp__gamma": gamma,
        "fedorgp__server_batch_size": SIZE,
    }
    hparams |= {"fedorgp__server_epochs": 4, "fedorgp__server_lr": 0.1}
    more = {
        "partition": "pathological",
        "classes_per_client": 3,
        "liars": 0,
        **plain.TINY,
        **hparams,
    }
    outcome, clients = plain.side_by_side(tmp_path, FedORGPClient, ARCHS, algo="fedorgp", **more)
    server = PlainServer(clients[0])
    prototypes: Table = {}
    for number in (1, 2):
        prototypes = server.train([client.train(number, prototypes) for client in clients])

    plain.assert_prototypes_left(outcome, prototypes)
    assert len(prototypes) < 10  # a class that nobody holds
    plain.assert_models_left(
        tmp_path, {client.name: plain.copied(client.model) for client in clients}
    )

    numbers = {
        "up": sum(len(set(client.y)) for client in clients),
        "down": plain.CLIENTS * len(prototypes),
    }

    assert outcome.rows[1]["bytes"] == {way: many * (4 * DIM + 8) for way, many in numbers.items()}

"""FedORGP, two rounds: angles, the server's training, its prototypes, one at a time in float64."""

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

DIM = 16
SIZE = 8
"""Class means in a batch of the server's training."""
Table = dict[int, torch.Tensor]


class FedORGPClient(plain.PlainClient):
    starts_alike = False

    def train(self, number: int, prototypes: Table) -> Table:
        """Train on CE, plus λ (1 − cos(z, P^y)) of samples whose class has a prototype P^y.

        Return the class means after it.
        """

        def angle(z: torch.Tensor, label: int) -> torch.Tensor | float:
            if label not in prototypes:
                return 0.0
            return self.hparams.lambda_ * (1 - plain.cosine(z.double(), prototypes[label]))

        self.sgd(number, loss=lambda batch: self.cross_entropy_and(batch, angle))
        return self.class_means()


class PlainServer:
    """The server: a vector of each class, and FC → ReLU → FC that makes prototypes of them.

    Vectors and layers are all trained.
    """

    def __init__(self, client: FedORGPClient) -> None:
        seed = derive_seed(client.seed, "fedorgp")
        self.hparams = client.hparams
        torch.manual_seed(seed)
        self.vectors = torch.randn(10, DIM).double().requires_grad_()
        first = torch.nn.Linear(DIM, DIM).double()
        second = torch.nn.Linear(DIM, DIM).double()
        self.parameters = [self.vectors, first.weight, first.bias, second.weight, second.bias]
        self.generator = torch.Generator().manual_seed(seed)
        self.seen: set[int] = set()

    def prototype(self, label: int) -> torch.Tensor:
        vectors, weight, bias, weight2, bias2 = self.parameters
        return weight2 @ torch.relu(weight @ vectors[label] + bias) + bias2

    def train(self, sets: list[Table]) -> Table:
        """Learn from all clients' class means; return the prototypes of all classes ever sent."""
        samples = [(label, mean) for means in sets for label, mean in means.items()]
        self.seen |= {label for label, _ in samples}
        epochs = self.hparams.server_epochs
        for batch in plain.minibatches(len(samples), SIZE, epochs, self.generator):
            loss = self.loss([samples[i] for i in batch])
            plain.descend(loss, self.parameters, self.hparams.server_lr)
        return {label: self.prototype(label).detach() for label in sorted(self.seen)}

    def loss(self, batch: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Return 1 − cos with the own prototype + γ times the mean |cos| with the others."""
        prototypes = {label: self.prototype(label) for label in self.seen}
        losses = []
        for label, mean in batch:
            cosines = {c: plain.cosine(mean, prototype) for c, prototype in prototypes.items()}
            own = cosines.pop(label)
            of_others = sum(cosine.abs() for cosine in cosines.values()) / len(cosines)
            losses.append(1 - own + self.hparams.gamma * of_others)
        return sum(losses) / len(batch)


@pytest.mark.parametrize(("lambda_", "gamma"), [(10.0, 10.0), (1.0, 0.5)])
def test_two_rounds_equal_an_independent_script(lambda_, gamma, tmp_path):
    """Global prototypes and models are the script's, with a class that nobody holds."""
    settings = {
        "partition": "pathological",
        "classes_per_client": 3,
        "liars": 0,
        "fedorgp__lambda": lambda_,
        "fedorgp__gamma": gamma,
        "fedorgp__server_batch_size": SIZE,
        "fedorgp__server_epochs": 4,
        "fedorgp__server_lr": 0.1,
        **plain.TINY,
    }
    outcome, clients = plain.side_by_side(
        tmp_path, FedORGPClient, plain.HETEROGENEOUS, algo="fedorgp", **settings
    )

    server = PlainServer(clients[0])
    prototypes = {}
    for number in (1, 2):
        prototypes = server.train([client.train(number, prototypes) for client in clients])

    plain.assert_prototypes_left(outcome, prototypes)
    assert len(prototypes) < 10
    plain.assert_models_left(outcome, clients)

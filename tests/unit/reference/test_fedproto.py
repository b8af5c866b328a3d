"""FedProto, two rounds, written again, sample by sample.

Losses, steps, prototypes, aggregation and inference.
"""

import pytest
import torch

from tests.support import plain
from tests.support.declaration import COUNTED, Declared

DECLARED = Declared(COUNTED, losses=("cross-entropy", "prototype"))

# without dropout, so that script and system draw the same random numbers
ARCHS = ("cnn4", "htcnn-3", "cnn4")
Table = dict[int, torch.Tensor]


class FedProtoClient(plain.PlainClient):
    starts_alike = False

    def regulariser(self, z: torch.Tensor, labels: list[int], protos: Table) -> torch.Tensor:
        """Return Eq. 6 by the letter (l2 of class means, summed), or the authors' MSE a sample."""
        total = torch.zeros(())
        if self.hparams.granularity == "class":
            for label in set(labels) & protos.keys():
                is_own = torch.tensor(labels) == label
                total = total + (z[is_own].mean(0) - protos[label]).norm()
            return total
        for row, label in zip(z, labels, strict=True):
            if label in protos:
                squares = (row - protos[label]) ** 2
                total = total + squares.mean() / len(labels)
        return total

    def train(self, number: int, protos: Table) -> None:
        self.sgd(number, loss=lambda batch: self.loss(batch, protos))

    def loss(self, batch: list[int], protos: Table) -> torch.Tensor:
        """Cross-entropy + λ times the regulariser."""
        labels = self.labels(batch)
        z = self.model.body(self.x[batch])
        loss = plain.cross_entropy(self.model.head(z), labels)
        return loss + self.hparams.lambda_ * self.regulariser(z, labels, protos)

    def prototypes(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Return for each class its mean, and what it weighs at the server."""
        is_counted = self.hparams.weighting == "counts"
        found = {}
        for c, mean in self.class_means().items():
            found[c] = (mean, self.y.count(c) if is_counted else 1)
        return found

    def accuracies(self, protos: Table) -> dict[str, float]:
        """Return the accuracies of the head and of the nearest prototype on the test samples."""
        with torch.no_grad():
            z = self.model.body(self.x_test)
            by_head = self.model.head(z)
        distances = torch.full((len(z), 10), torch.inf, dtype=torch.float64)
        for c, mean in protos.items():
            distances[:, c] = (z.double() - mean).norm(dim=1)
        return {"head": self.accuracy(by_head), "prototype": self.accuracy(-distances)}


@pytest.mark.parametrize(
    ("weighting", "distance", "granularity"),
    [
        pytest.param("counts", "l2", "class", id="the paper"),
        pytest.param("uniform", "mse", "sample", id="the authors' code"),
    ],
)
def test_two_rounds_equal_an_independent_script(weighting, distance, granularity, tmp_path):
    """The global prototypes, and both accuracies of each client, are the script's."""
    settings = {
        "fedproto__weighting": weighting,
        "fedproto__distance": distance,
        "fedproto__granularity": granularity,
        "lr": 0.02,
        "partition": "label-shift",
        "alpha": 0.5,
    }
    outcome, clients = plain.side_by_side(tmp_path, FedProtoClient, ARCHS, **settings)

    protos = {}
    for number in (1, 2):
        for client in clients:
            client.train(number, protos)
        merged = plain.class_averages(client.prototypes() for client in clients)
        protos = {c: mean.float() for c, mean in merged.items()}

    plain.assert_prototypes_left(outcome, protos, rtol=1e-4, atol=1e-5)
    for client in clients:
        plain.assert_accuracy(outcome, client, **client.accuracies(protos))

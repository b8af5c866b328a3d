"""FedProto, two rounds, written again, sample by sample.

Losses, steps, prototypes, aggregation and inference.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.declaration import COUNTED, Declared
from tests.support.plain import (
    PlainClient,
    assert_prototypes_left,
    class_averages,
    cross_entropy,
    side_by_side,
)

DECLARED = Declared(COUNTED, losses=("cross-entropy", "prototype"))

ARCHS = ("cnn4", "htcnn-3", "cnn4")  # no dropout, so that both draw the same random numbers


class FedProtoClient(PlainClient):
    starts_alike = False

    def regulariser(
        self, z: torch.Tensor, labels: list[int], protos: dict[int, np.ndarray]
    ) -> torch.Tensor:
        """Eq. 6 by the letter (l2 of class means, summed), or the authors' MSE per sample."""
        total = torch.zeros(())
        if self.hparams.granularity == "class":
            for label in set(labels) & set(protos):
                own = torch.stack([z[row] for row, y in enumerate(labels) if y == label]).mean(0)
                total = total + ((own - torch.from_numpy(protos[label])) ** 2).sum().sqrt()
            return total
        for row, label in enumerate(labels):
            if label in protos:
                squares = (z[row] - torch.from_numpy(protos[label])) ** 2
                total = total + squares.mean() / len(labels)
        return total

    def train(self, number: int, protos: dict[int, np.ndarray]) -> None:
        self.sgd(number, loss=lambda batch: self.loss(batch, protos))

    def loss(self, batch: list[int], protos: dict[int, np.ndarray]) -> torch.Tensor:
        """Cross-entropy + λ times the regulariser."""
        labels = [self.y[i] for i in batch]
        z = self.model.body(self.x[batch])
        loss = cross_entropy(self.model.head(z), labels)
        return loss + self.hparams.lambda_ * self.regulariser(z, labels, protos)

    def prototypes(self) -> dict[int, tuple[np.ndarray, int]]:
        """With the weight of each."""
        weights = {c: self.y.count(c) if self.hparams.weighting == "counts" else 1 for c in self.y}
        return {c: (mean.numpy(), weights[c]) for c, mean in self.class_means().items()}

    def accuracies(self, protos: dict[int, np.ndarray]) -> tuple[float, float]:
        """Of the nearest prototype, and of the head, on the test samples."""
        with torch.no_grad():
            z = self.model.body(self.x_test)
            by_head = self.model.head(z).argmax(1).tolist()

        by_prototype = []
        for row in z.numpy().astype(np.float64):
            distances = {c: np.sqrt(((row - protos[c]) ** 2).sum()) for c in sorted(protos)}
            by_prototype.append(min(distances, key=distances.__getitem__))

        def accuracy(predicted: list[int]) -> float:
            return float(np.mean([a == b for a, b in zip(predicted, self.y_test, strict=True)]))

        return accuracy(by_prototype), accuracy(by_head)


@pytest.mark.parametrize(
    ("weighting", "distance", "granularity"),
    [
        pytest.param("counts", "l2", "class", id="the paper"),
        pytest.param("uniform", "mse", "sample", id="the authors' code"),
    ],
)
def test_two_rounds_equal_an_independent_script(
    weighting: str, distance: str, granularity: str, tmp_path: Path
) -> None:
    """The global prototypes, and both accuracies of each client, are the script's."""
    settings: dict[str, Any] = {
        "fedproto__weighting": weighting,
        "fedproto__distance": distance,
        "fedproto__granularity": granularity,
        "feature_dim": 16,
        "lr": 0.02,
        "partition": "label-shift",
        "alpha": 0.5,
    }
    outcome, clients = side_by_side(tmp_path, FedProtoClient, ARCHS, **settings)

    protos: dict[int, np.ndarray] = {}
    for number in (1, 2):
        for client in clients:
            client.train(number, protos)
        merged = class_averages(client.prototypes() for client in clients)
        protos = {c: mean.astype(np.float32) for c, mean in merged.items()}

    assert_prototypes_left(outcome, protos, rtol=1e-4, atol=1e-5)
    for client in clients:
        by_prototype, by_head = client.accuracies(protos)
        reported = outcome.summary["accuracy-of-clients"][client.name]
        one_sample = 1.01 / len(client.y_test)  # a borderline one may fall to the other side
        assert reported["prototype"] == pytest.approx(by_prototype, abs=one_sample)
        assert reported["head"] == pytest.approx(by_head, abs=one_sample)

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
        labels, z = [self.y[i] for i in batch], self.model.body(self.x[batch])
        return cross_entropy(self.model.head(z), labels) + self.hparams.lambda_ * self.regulariser(
            z, labels, protos
        )

    def prototypes(self) -> dict[int, tuple[np.ndarray, int]]:
        """With the weight of each."""
        weights = {c: self.y.count(c) if self.hparams.weighting == "counts" else 1 for c in self.y}
        return {c: (mean.numpy(), weights[c]) for c, mean in self.class_means().items()}

    def accuracies(self, protos: dict[int, np.ndarray]) -> tuple[float, float]:
        with torch.no_grad():
            z = self.model.body(self.x_test)
            head = self.model.head(z).argmax(1).tolist()
        labels = sorted(protos)
        nearest = []
        for row in z.numpy().astype(np.float64):
            nearest.append(
                labels[
                    int(
                        np.argmin([np.sqrt(((row - protos[label]) ** 2).sum()) for label in labels])
                    )
                ]
            )
        hits = [
            [a == b for a, b in zip(found, self.y_test, strict=True)] for found in (nearest, head)
        ]
        return float(np.mean(hits[0])), float(np.mean(hits[1]))


WAYS = ("weighting", "distance", "granularity")


@pytest.mark.parametrize("ways", [("counts", "l2", "class"), ("uniform", "mse", "sample")])
def test_two_rounds_equal_an_independent_script(ways: tuple[str, str, str], tmp_path: Path) -> None:
    more: dict[str, Any] = {f"fedproto__{name}": way for name, way in zip(WAYS, ways, strict=True)}
    more |= {"feature_dim": 16, "lr": 0.02, "partition": "label-shift", "alpha": 0.5}
    outcome, clients = side_by_side(tmp_path, FedProtoClient, ARCHS, **more)
    protos: dict[int, np.ndarray] = {}
    for number in (1, 2):
        for client in clients:
            client.train(number, protos)
        merged = class_averages(client.prototypes() for client in clients)
        protos = {c: mean.astype(np.float32) for c, mean in merged.items()}

    assert_prototypes_left(outcome, protos, rtol=1e-4, atol=1e-5)

    for client in clients:
        nearest, head = client.accuracies(protos)
        reported = outcome.summary["accuracy-of-clients"][client.name]
        one = 1.01 / len(client.y_test)  # a borderline sample may fall to the other side
        assert reported["prototype"] == pytest.approx(nearest, abs=one)
        assert reported["head"] == pytest.approx(head, abs=one)

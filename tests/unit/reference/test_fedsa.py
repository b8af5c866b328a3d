"""FedSA, two rounds: anchors, margin, the four terms and prototypes, one at a time in float64."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MessageType

from client_app.algorithms.fedsa import FedSA
from protofl_common.basics.seeding import derive_seed
from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from tests.support import plain
from tests.support.attacks import values_of
from tests.support.declaration import PLAIN, Declared

DECLARED = Declared(
    PLAIN,
    keeps=("own_prototypes",),
    losses=("cross-entropy", "regularization", "contrast", "calibration"),
    acts={"regularization": 5.0, "contrast": 0.0, "calibration": 0.0, "smoothing": 0.5},
)

ARCHS, DIM = ("cnn4", "htcnn-3", "htcnn-1"), 16
Table = dict[int, torch.Tensor]


def apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a - b) ** 2).sum().sqrt()


def margin(vectors: list[torch.Tensor]) -> float:
    """The mean over vectors of the distance to the nearest other one."""
    nearest = [min(float(apart(a, b)) for b in vectors if b is not a) for a in vectors]
    return sum(nearest) / len(nearest)


def first_anchors(seed: int) -> torch.Tensor:
    """Two layers, each standardised over the classes, then ReLU."""
    torch.manual_seed(derive_seed(seed, "fedsa"))
    layers = [torch.nn.Linear(DIM, DIM) for _ in range(2)]
    x = torch.randn(10, DIM).double()
    for layer in layers:
        x = x @ layer.weight.detach().double().T + layer.bias.detach().double()
        mean = x.mean(0)
        x = torch.relu((x - mean) / (((x - mean) ** 2).mean(0) + 1e-5).sqrt())
    return x


class FedSAClient(plain.PlainClient):
    starts_alike, own = False, Table()

    def train(self, number: int, anchors: torch.Tensor) -> Table:
        delta = max(margin(list(anchors)), margin(list(self.own.values())) if self.own else 0.0)
        self.sgd(number, loss=lambda batch: self.loss(batch, anchors, delta))
        self.own = self.class_means()
        return self.own

    def loss(self, batch: list[int], anchors: torch.Tensor, delta: float) -> torch.Tensor:
        z, labels, hparams = (
            self.model.body(self.x[batch]),
            [self.y[i] for i in batch],
            self.hparams,
        )
        total = plain.cross_entropy(self.model.head(z), labels).double()
        total = total + hparams.calibration * plain.cross_entropy(
            self.model.head(anchors.float()), list(range(10))
        )
        for row, label in zip(z.double(), labels, strict=True):
            squares = ((row - anchors[label]) ** 2).sum() / DIM
            scores = [
                torch.exp(-apart(row, a) - delta * (c == label)) for c, a in enumerate(anchors)
            ]
            contrast = -torch.log(scores[label] / sum(scores))
            total = total + (hparams.regularization * squares + hparams.contrast * contrast) / len(
                batch
            )
        return total


@pytest.mark.parametrize(("weights", "alpha"), [((10.0, 1.0, 1.0), 0.9999), ((0.5, 2.0, 0.3), 0.4)])
def test_two_rounds_equal_an_independent_script(
    weights: tuple[float, ...], alpha: float, tmp_path: Path
) -> None:
    names = ("regularization", "contrast", "calibration")
    hparams: dict[str, Any] = {
        f"fedsa__{name}": value for name, value in zip(names, weights, strict=True)
    }
    more = {
        "partition": "pathological",
        "classes_per_client": 3,
        "liars": 0,
        "fedsa__smoothing": alpha,
        **hparams,
    }
    outcome, clients = plain.side_by_side(
        tmp_path, FedSAClient, ARCHS, algo="fedsa", **plain.TINY, **more
    )
    anchors = first_anchors(clients[0].seed)
    prototypes: Table = {}
    for number in (1, 2):
        sets = [client.train(number, anchors) for client in clients]
        for label in sorted({label for one in sets for label in one}):
            held = [one[label] for one in sets if label in one]
            prototypes[label] = sum(held) / len(held)
            anchors[label] = alpha * anchors[label] + (1 - alpha) * prototypes[label]

    plain.assert_prototypes_left(outcome, prototypes)
    assert len(prototypes) < 10  # a class that nobody holds

    last = outcome.exchanged(MessageType.EVALUATE)[0][0]
    np.testing.assert_allclose(
        values_of(last.content["anchors"]["means"]), anchors, rtol=1e-3, atol=1e-4
    )
    plain.assert_models_left(
        tmp_path, {client.name: plain.copied(client.model) for client in clients}
    )
    assert outcome.rows[1]["bytes"]["up"] == sum(len(set(client.y)) for client in clients) * (
        4 * DIM + 8
    )
    assert outcome.rows[1]["bytes"]["down"] == plain.CLIENTS * (10 + len(prototypes)) * (
        4 * DIM + 8
    )


def test_the_margin_is_the_larger_of_the_anchors_and_the_own_prototypes() -> None:
    client, labels = FedSA.__new__(FedSA), torch.arange(3)
    client.client = SimpleNamespace(device=torch.device("cpu"), num_classes=3)  # type: ignore[assignment]
    client.settings = SimpleNamespace(exchange=CATALOG["fedsa"].exchange)  # type: ignore[assignment]
    for own, margin_wanted in ((None, 2**0.5), (0.1, 2**0.5), (9.0, 9 * 2**0.5)):
        client.own_prototypes = None if own is None else Prototypes(own * torch.eye(3), labels)
        client.receive(Payload(anchors=Prototypes(torch.eye(3), labels)))
        assert client.margin == pytest.approx(margin_wanted)

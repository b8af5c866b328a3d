"""FedSA, two rounds: anchors, margin, the four terms and prototypes, one at a time in float64."""

from types import SimpleNamespace

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

DIM = 16
Table = dict[int, torch.Tensor]


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a - b) ** 2).sum().sqrt()


def margin(vectors: list[torch.Tensor]) -> float:
    """Return the mean over the vectors of the distance to the nearest other one."""
    nearest = []
    for a in vectors:
        nearest.append(min(float(distance(a, b)) for b in vectors if b is not a))
    return sum(nearest) / len(nearest)


def first_anchors(seed: int) -> torch.Tensor:
    """Return the first anchors: random vectors behind two layers.

    Each layer's numbers are standardised over the classes, and pass a ReLU.
    """
    torch.manual_seed(derive_seed(seed, "fedsa"))
    layers = [torch.nn.Linear(DIM, DIM) for _ in range(2)]
    x = torch.randn(10, DIM).double()
    for layer in layers:
        x = x @ layer.weight.detach().double().T + layer.bias.detach().double()
        mean = x.mean(0)
        x = torch.relu((x - mean) / (((x - mean) ** 2).mean(0) + 1e-5).sqrt())
    return x


class FedSAClient(plain.PlainClient):
    starts_alike = False
    own = Table()
    """Its class means of the last round."""

    def train(self, number: int, anchors: torch.Tensor) -> Table:
        """Train with the larger of the anchors' margin and the own means'; return the new means."""
        delta = margin(list(anchors))
        if self.own:
            delta = max(delta, margin(list(self.own.values())))
        self.sgd(number, loss=lambda batch: self.loss(batch, anchors, delta))
        self.own = self.class_means()
        return self.own

    def loss(self, batch: list[int], anchors: torch.Tensor, delta: float) -> torch.Tensor:
        """Return CE, the head's CE on the anchors, and the regularization and contrast of samples.

        In the contrast the margin δ is added to the distance to the sample's own anchor.
        """
        hparams = self.hparams
        labels = self.labels(batch)
        z = self.model.body(self.x[batch])
        total = plain.cross_entropy(self.model.head(z), labels).double()
        calibration = plain.cross_entropy(self.model.head(anchors.float()), list(range(10)))
        total = total + hparams.calibration * calibration

        for row, label in zip(z.double(), labels, strict=True):
            away = torch.stack([distance(row, anchor) for anchor in anchors])
            squares = away[label] ** 2 / DIM
            scores = torch.exp(-away - delta * torch.eye(10)[label])
            contrast = -torch.log(scores[label] / scores.sum())
            terms = hparams.regularization * squares + hparams.contrast * contrast
            total = total + terms / len(batch)
        return total


@pytest.mark.parametrize(("weights", "alpha"), [((10.0, 1.0, 1.0), 0.9999), ((0.5, 2.0, 0.3), 0.4)])
def test_two_rounds_equal_an_independent_script(weights, alpha, tmp_path):
    """Prototypes, anchors and models are the script's, with a class that nobody holds."""
    regularization, contrast, calibration = weights
    settings = {
        "partition": "pathological",
        "classes_per_client": 3,
        "liars": 0,
        "fedsa__smoothing": alpha,
        "fedsa__regularization": regularization,
        "fedsa__contrast": contrast,
        "fedsa__calibration": calibration,
        **plain.TINY,
    }
    outcome, clients = plain.side_by_side(
        tmp_path, FedSAClient, plain.HETEROGENEOUS, algo="fedsa", **settings
    )

    anchors = first_anchors(clients[0].seed)
    prototypes = {}
    for number in (1, 2):
        sets = [client.train(number, anchors) for client in clients]
        for label, held in plain.by_class(sets).items():
            prototypes[label] = sum(held) / len(held)
            anchors[label] = alpha * anchors[label] + (1 - alpha) * prototypes[label]

    plain.assert_prototypes_left(outcome, prototypes)
    assert len(prototypes) < 10
    last_message, _ = outcome.exchanged(MessageType.EVALUATE)[0]
    sent_anchors = values_of(last_message.content["anchors"]["means"])
    np.testing.assert_allclose(sent_anchors, anchors, rtol=1e-3, atol=1e-4)
    plain.assert_models_left(outcome, clients)


@pytest.mark.parametrize(("length", "margin_wanted"), [
    pytest.param(None, 2**0.5, id="no prototypes yet"),
    pytest.param(0.1, 2**0.5, id="prototypes closer together"),
    pytest.param(9.0, 9 * 2**0.5, id="prototypes further apart"),
])  # fmt: skip
def test_the_margin_is_the_larger_of_the_anchors_and_the_own_prototypes(length, margin_wanted):
    """The anchors are unit vectors, √2 apart; the client's prototypes are so many times as long."""
    labels = torch.arange(3)
    client = FedSA.__new__(FedSA)  # without a model, which the margin does not need
    client.client = SimpleNamespace(device=torch.device("cpu"), num_classes=3)
    client.settings = SimpleNamespace(exchange=CATALOG["fedsa"].exchange)
    client.own_prototypes = None
    if length is not None:
        client.own_prototypes = Prototypes(length * torch.eye(3), labels)

    client.receive(Payload(anchors=Prototypes(torch.eye(3), labels)))

    assert client.margin == pytest.approx(margin_wanted)

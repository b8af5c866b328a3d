"""FedPCL, three rounds: contrast, prototypes, padding and inference from the equations.

And Table 5's other losses.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from client_app.algorithms.fedpcl import FedPCL
from client_app.learning.training import Batch
from protofl_common.experiment.settings import Settings
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from tests.support.declaration import COUNTED, Declared
from tests.support.harness import client_of, run_config, run_federation
from tests.support.plain import CLIENTS, assert_prototypes_left, class_averages
from tests.support.plain_fedpcl import FedPCLClient, Table

DECLARED = Declared(
    COUNTED,
    losses=("contrast", "global", "local", "cross-entropy", "prototype"),
    minimised=("global", "local"),  # the others are ablations
    acts={"temperature": 0.5, "prototypes": "global", "loss": "ce-protodist", "denominator": "all"},
)


@pytest.mark.parametrize("alpha", [0.3, 100.0])
def test_three_rounds_equal_an_independent_script(alpha: float, tmp_path: Path) -> None:
    config = run_config(tmp_path, algo="fedpcl", rounds=3, feature_dim=16, lr=0.01)
    config |= {"partition": "feature-label-shift", "alpha": alpha, "train-samples": 40}
    outcome = run_federation(config, clients=CLIENTS)

    clients = [FedPCLClient(Settings.from_run_config(config), index) for index in range(CLIENTS)]
    labels, overall = [client.y for client in clients], Table()
    sets: list[Table] = []
    for number in (1, 2, 3):
        for client in clients:
            client.train(number, overall, sets)
        own = [client.prototypes() for client in clients]
        counts = [
            {c: (mean, y.count(c)) for c, mean in one.items()}
            for y, one in zip(labels, own, strict=True)
        ]
        overall = class_averages(counts)  # Eq. 6 without its further 1/|N_j|
        sets = [overall | one for one in own]  # Eq. 7

    assert_prototypes_left(outcome, overall)

    for client in clients:
        reported = outcome.summary["accuracy-of-clients"][client.name]
        assert set(reported) == {"prototype"}
        one = 1.01 / len(client.y_test)  # a borderline sample may fall to the other side
        assert reported["prototype"] == pytest.approx(client.accuracy(), abs=one)


HELD = 7
"""The server has prototypes of classes 0 … 6."""


def client(tmp_path: Path, loss: str) -> FedPCL:
    config = run_config(
        tmp_path, algo="fedpcl", backbones="glyphs", feature_dim=6, fedpcl__loss=loss
    )
    found = FedPCL(client_of(config, 1, 5), 2)
    means = torch.rand(HELD, 6, generator=torch.Generator().manual_seed(0))
    found.receive(Payload(prototypes=Prototypes(means, torch.arange(HELD))))
    return found


def batch(z: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> Batch:
    """Without the inputs, at which no loss of FedPCL looks."""
    return Batch(torch.empty(len(labels), 0), labels, torch.arange(len(labels)), z, logits)


@pytest.mark.parametrize("loss", ["ce", "ce-protodist"])
def test_cross_entropy_and_the_distance_to_the_global_prototype(loss: str, tmp_path: Path) -> None:
    """A sample whose class has no prototype adds a distance of 0 to the mean over the batch."""
    found = client(tmp_path, loss)
    generator = torch.Generator().manual_seed(1)
    z, logits = torch.randn(10, 6, generator=generator), torch.randn(10, 10, generator=generator)
    terms = found.loss(batch(z, logits, torch.arange(10)))
    expected = {
        "cross-entropy": -logits.double()
        .log_softmax(1)
        .numpy()[np.arange(10), np.arange(10)]
        .mean()
    }
    if loss == "ce-protodist":
        apart = normalize(z)[:HELD] - normalize(found.global_prototypes.means)
        expected["prototype"] = float(apart.square().sum() / 10)

    assert {name: value.item() for name, value in terms.items()} == pytest.approx(
        expected, rel=1e-5
    )


def test_supervised_contrast_knows_no_prototypes(tmp_path: Path) -> None:
    found = client(tmp_path, "supcon")
    z, labels = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) // 2
    terms = found.loss(batch(z, torch.zeros(8, 10), labels))
    found.receive(Payload())

    assert found.loss(batch(z, torch.zeros(8, 10), labels)) == terms
    assert list(terms) == ["contrast"]

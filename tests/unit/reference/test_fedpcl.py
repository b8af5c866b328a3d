"""FedPCL, three rounds: contrast, prototypes, padding and inference from the equations.

And Table 5's other losses.
"""

from pathlib import Path

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
from tests.support.plain import CLIENTS, assert_accuracy, assert_prototypes_left, class_averages
from tests.support.plain_fedpcl import FedPCLClient

DECLARED = Declared(
    COUNTED,
    losses=("contrast", "global", "local", "cross-entropy", "prototype"),
    minimised=("global", "local"),  # the others are ablations
    acts={"temperature": 0.5, "prototypes": "global", "loss": "ce-protodist", "denominator": "all"},
)


@pytest.mark.parametrize("alpha", [0.3, 100.0])
def test_three_rounds_equal_an_independent_script(alpha, tmp_path):
    """The global prototypes, and each client's accuracy by its prototypes, are the script's."""
    config = run_config(
        tmp_path,
        algo="fedpcl",
        rounds=3,
        feature_dim=16,
        lr=0.01,
        partition="feature-label-shift",
        alpha=alpha,
        train_samples=40,
    )
    outcome = run_federation(config, clients=CLIENTS)

    clients = [FedPCLClient(Settings.from_run_config(config), index) for index in range(CLIENTS)]
    overall = {}
    sets = []
    for number in (1, 2, 3):
        for client in clients:
            client.train(number, overall, sets)
        own = [client.prototypes() for client in clients]
        with_counts = []
        for client, means in zip(clients, own, strict=True):
            with_counts.append({c: (mean, client.y.count(c)) for c, mean in means.items()})
        overall = class_averages(with_counts)  # Eq. 6 without its further 1/|N_j|
        sets = [overall | means for means in own]  # Eq. 7

    assert_prototypes_left(outcome, overall)
    for client in clients:
        assert_accuracy(outcome, client, prototype=client.nearest())


HELD = 7
"""The server has prototypes of classes 0 … 6."""


def client(tmp_path: Path, loss: str) -> FedPCL:
    """Return a client in round 2 that minimises this loss; the server has HELD prototypes."""
    config = run_config(
        tmp_path, algo="fedpcl", backbones="glyphs", feature_dim=6, fedpcl__loss=loss
    )
    half = FedPCL(client_of(config, 1, 5), 2)
    means = torch.rand(HELD, 6, generator=torch.Generator().manual_seed(0))
    half.receive(Payload(prototypes=Prototypes(means, torch.arange(HELD))))
    return half


def batch(z: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> Batch:
    """Return a batch without the inputs, at which no loss of FedPCL looks."""
    return Batch(torch.empty(len(labels), 0), labels, torch.arange(len(labels)), z, logits)


@pytest.mark.parametrize("loss", ["ce", "ce-protodist"])
def test_cross_entropy_and_the_distance_to_the_global_prototype(loss, tmp_path):
    """A sample whose class has no prototype adds a distance of 0 to the mean over the batch."""
    half = client(tmp_path, loss)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(10, 6, generator=generator)
    logits = torch.randn(10, 10, generator=generator)

    terms = half.loss(batch(z, logits, torch.arange(10)))  # a sample of each class

    at_the_label = logits.double().log_softmax(1).diagonal()
    expected = {"cross-entropy": -float(at_the_label.mean())}
    if loss == "ce-protodist":
        apart = normalize(z)[:HELD] - normalize(half.global_prototypes.means)
        expected["prototype"] = float(apart.square().sum() / 10)
    found = {name: value.item() for name, value in terms.items()}
    assert found == pytest.approx(expected, rel=1e-5)


def test_supervised_contrast_knows_no_prototypes(tmp_path):
    """The loss is the same with the server's prototypes and without any."""
    half = client(tmp_path, "supcon")
    z = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    two_of_each_class = torch.arange(8) // 2
    some = batch(z, torch.zeros(8, 10), two_of_each_class)

    with_prototypes = half.loss(some)
    half.receive(Payload())

    assert half.loss(some) == with_prototypes
    assert list(with_prototypes) == ["contrast"]

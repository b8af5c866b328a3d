"""FPL, two rounds: class means, clusters, both prototype terms, the models' mean, written again."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from client_app.algorithms.base import client_half
from client_app.learning.training import Batch
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from tests.support import plain
from tests.support.declaration import PLAIN, Declared
from tests.support.harness import client_of, run_config
from tests.support.plain_finch import coarsest_clusters

DECLARED = Declared(
    PLAIN,
    weights=True,
    losses=("cross-entropy", "contrast", "consistency"),
    acts={"lambda": 3.0, "temperature": 0.5, "contrast": False, "consistency": "squared-l2"},
)

SITES = 6
"""As many as it takes for a class to have two clusters."""
Clusters = dict[int, list[np.ndarray]]
"""Class -> its cluster prototypes."""


class FPLClient(plain.PlainClient):
    def train(self, number: int, weights: plain.State, clusters: Clusters) -> plain.State:
        """Train on CE, and λ times both prototype terms of samples whose class has clusters."""
        self.model.load_state_dict(weights)

        def terms(z: torch.Tensor, label: int) -> torch.Tensor | float:
            if label not in clusters:
                return 0.0
            return self.hparams.lambda_ * self.of_sample(z, label, clusters)

        self.sgd(number, loss=lambda batch: self.cross_entropy_and(batch, terms))
        return plain.copied(self.model)

    def of_sample(self, z: torch.Tensor, label: int, clusters: Clusters) -> torch.Tensor:
        """Return the contrast with all clusters, Eq. 8, plus the distance to the class's own mean.

        The latter is to the mean of the class's clusters, Eq. 10. Both are in float64.
        """
        z = z.double()
        scores = {}
        for k, of_class in clusters.items():
            cosines = torch.stack([plain.cosine(z, torch.from_numpy(c)) for c in of_class])
            scores[k] = torch.exp(cosines / self.hparams.temperature).sum()
        contrast = -torch.log(scores[label] / sum(scores.values()))

        unbiased = torch.from_numpy(np.mean(clusters[label], axis=0))
        squares = (z - unbiased) ** 2
        if self.hparams.consistency == "mse":
            return contrast + squares.mean()
        return contrast + squares.sum()

    def prototypes(self) -> dict[int, np.ndarray]:
        return {k: mean.numpy() for k, mean in self.class_means().items()}


def clustered(sent: list[dict[int, np.ndarray]]) -> Clusters:
    """Return the cluster prototypes of each class (Eq. 5), by FINCH's coarsest partition."""
    of_classes = plain.by_class(sent)
    return {k: coarsest_clusters(np.stack(rows)) for k, rows in of_classes.items()}


@pytest.mark.parametrize(
    ("partition", "tau", "consistency"),
    [("feature-shift", 0.1, "squared-l2"), ("label-shift", 0.5, "mse")],
)
def test_two_rounds_equal_an_independent_script(partition, tau, consistency, tmp_path):
    """Weights, clusters, and the entries that go up, are the script's."""
    settings = {
        "lr": 0.003,
        "fpl__lambda": 2.0,
        "fpl__temperature": tau,
        "fpl__consistency": consistency,
        **plain.UNEQUAL,
        "partition": partition,
    }
    outcome, clients = plain.side_by_side(
        tmp_path, FPLClient, "htcnn-1", SITES, algo="fpl", **settings
    )

    weights = plain.copied(clients[0].model)
    clusters = {}
    for number in (1, 2):
        models = [client.train(number, weights, clusters) for client in clients]
        weights = plain.mean_by_samples(clients, models)
        clusters = clustered([client.prototypes() for client in clients])

    plain.assert_weights_left(outcome, weights)

    kept = load_file(outcome.folder / "prototypes.safetensors")
    labels = []
    for k, of_class in clusters.items():
        labels += [k] * len(of_class)
    assert kept["labels"].tolist() == labels
    assert len(labels) > len(clusters)  # some class has several
    means = np.concatenate(list(clusters.values()))
    np.testing.assert_allclose(kept["means"], means, rtol=1e-3, atol=1e-4)

    for _, reply in outcome.exchanged():
        records = {name: list(one) for name, one in reply.content.array_records.items()}
        assert records == {"weights": list(weights), "prototypes": ["means", "labels"]}


def test_cosines_below_zero_count_as_they_are(tmp_path):
    """Features behind a projection may be negative, and so may cosines.

    Eq. 8 clamps none, so that loss and gradient are the script's here too.
    """
    settings = {"models": "htcnn-1", "feature_dim": 4}
    settings |= {"fpl__temperature": 0.5, "fpl__lambda": 1.0}
    config = run_config(tmp_path, algo="fpl", **settings)
    means = torch.tensor([
        [1.0, 0, 0, 0],
        [-1, 1, 0, 0],
        [0, 0, -1, 1],
    ])  # fmt: skip
    z = torch.tensor([
        [-2.0, 0.5, 1, 0],
        [0.5, -1, 1, -3],
    ], requires_grad=True)  # fmt: skip
    labels = torch.tensor([0, 1])

    algorithm = client_half(CATALOG["fpl"])(client_of(config, 0, SITES), 2)
    algorithm.receive(Payload(prototypes=Prototypes(means, torch.tensor([0, 1, 1]))))
    terms = algorithm.loss(Batch(z, labels, labels, z, torch.zeros(2, 10)))
    loss = terms["contrast"] + terms["consistency"]
    (gradient,) = torch.autograd.grad(loss, z)

    script = FPLClient(Settings.from_run_config(config), 0, "htcnn-1", SITES)
    of_first, *of_second = means.double().numpy()
    clusters = {0: [of_first], 1: of_second}
    wanted = sum(script.of_sample(z[row], row, clusters) for row in (0, 1)) / 2
    (wanted_gradient,) = torch.autograd.grad(wanted, z)

    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    torch.testing.assert_close(gradient, wanted_gradient.float())

"""FPL, two rounds: class means, clusters, both prototype terms, the models' mean, written again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finch import FINCH
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
        self.model = self.model_of("global")
        self.model.load_state_dict(weights)

        def terms(z: torch.Tensor, label: int) -> torch.Tensor | float:
            return (
                self.hparams.lambda_ * self.of_sample(z, label, clusters)
                if label in clusters
                else 0.0
            )

        self.sgd(number, loss=lambda batch: self.cross_entropy_and(batch, terms))
        return plain.copied(self.model)

    def of_sample(self, z: torch.Tensor, label: int, clusters: Clusters) -> torch.Tensor:
        """Eq. 8 and 10, in float64."""
        z = z.double()

        def similarity(c: np.ndarray) -> torch.Tensor:
            c = torch.from_numpy(c)
            return torch.exp(
                (z * c).sum() / (z.norm().clamp(min=1e-12) * c.norm()) / self.hparams.temperature
            )

        every = {k: sum(similarity(c) for c in of_class) for k, of_class in clusters.items()}
        unbiased = sum(clusters[label]) / len(clusters[label])
        squares = sum((z[v] - unbiased[v]) ** 2 for v in range(len(z)))
        if self.hparams.consistency == "mse":
            squares = squares / len(z)
        return -torch.log(every[label] / sum(every.values())) + squares

    def prototypes(self) -> dict[int, np.ndarray]:
        return {k: mean.numpy() for k, mean in self.class_means().items()}


def clustered(sent: list[dict[int, np.ndarray]]) -> Clusters:
    """Eq. 5, by FINCH's coarsest partition."""
    found: Clusters = {}
    for k in range(10):
        rows = np.array([one[k] for one in sent if k in one])
        if len(rows):
            groups = FINCH(rows, verbose=False)[0][:, -1] if len(rows) > 1 else np.zeros(1)
            found[k] = [rows[groups == group].mean(0) for group in np.unique(groups)]
    return found


@pytest.mark.parametrize(
    ("partition", "tau", "consistency"),
    [("feature-shift", 0.1, "squared-l2"), ("label-shift", 0.5, "mse")],
)
def test_two_rounds_equal_an_independent_script(
    partition: str, tau: float, consistency: str, tmp_path: Path
) -> None:
    hparams: dict[str, Any] = {
        "fpl__lambda": 2.0,
        "fpl__temperature": tau,
        "fpl__consistency": consistency,
    }
    more = {
        "feature_dim": 16,
        "lr": 0.003,
        "train_samples": 20,
        **plain.UNEQUAL,
        "partition": partition,
        **hparams,
    }
    outcome, clients = plain.side_by_side(tmp_path, FPLClient, "htcnn-1", SITES, algo="fpl", **more)
    weights, clusters = plain.copied(clients[0].model_of("global")), Clusters()
    for number in (1, 2):
        models = [client.train(number, weights, clusters) for client in clients]
        sent = [client.prototypes() for client in clients]
        weights, clusters = plain.averaged(models, [len(one.y) for one in clients]), clustered(sent)
    plain.assert_close(plain.weights_left(outcome), weights)
    kept = load_file(outcome.folder / "prototypes.safetensors")
    assert kept["labels"].tolist() == [k for k, of_class in clusters.items() for _ in of_class]
    assert any(len(of_class) > 1 for of_class in clusters.values())
    np.testing.assert_allclose(
        kept["means"], np.concatenate(list(clusters.values())), rtol=1e-3, atol=1e-4
    )

    numbers = sum(value.numel() for value in weights.values())
    for row in outcome.rows[:2]:
        held = [len(set(client.y)) for client in clients]
        assert row["bytes"]["up"] == sum(
            4 * (numbers + 16 * c) + 8 * c for c in held
        )  # a label beside each
    for _, reply in outcome.exchanged():
        records = {name: list(one) for name, one in reply.content.array_records.items()}
        assert records == {"weights": list(weights), "prototypes": ["means", "labels"]}


def test_cosines_below_zero_count_as_they_are(tmp_path: Path) -> None:
    """Features behind a projection have signs.

    Eq. 8 clamps none, so each prototype pushes or pulls (Eq. 8 and 10).
    """
    config = run_config(
        tmp_path, algo="fpl", feature_dim=4, models="htcnn-1", fpl__temperature=0.5, fpl__lambda=1.0
    )
    site = client_of(config, 0, SITES)
    algorithm = client_half(CATALOG["fpl"])(site, 2)
    means = torch.tensor([[1.0, 0, 0, 0], [-1, 1, 0, 0], [0, 0, -1, 1]])
    algorithm.receive(Payload(prototypes=Prototypes(means, torch.tensor([0, 1, 1]))))
    z = torch.tensor([[-2.0, 0.5, 1, 0], [0.5, -1, 1, -3]], requires_grad=True)
    labels = torch.tensor([0, 1])
    terms = algorithm.loss(Batch(z, labels, labels, z, torch.zeros(2, 10)))
    (found,) = torch.autograd.grad(terms["contrast"] + terms["consistency"], z)

    plain = FPLClient(Settings.from_run_config(config), 0, "htcnn-1", SITES)
    clusters = {0: [means[0].double().numpy()], 1: [one.double().numpy() for one in means[1:]]}
    loss = sum(plain.of_sample(z[row], row, clusters) for row in (0, 1)) / 2
    (wanted,) = torch.autograd.grad(loss, z)
    assert float(terms["contrast"] + terms["consistency"]) == pytest.approx(float(loss), rel=1e-5)
    torch.testing.assert_close(found, wanted.float())

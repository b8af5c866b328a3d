"""Several labels a sample, written again: FedProto for two rounds, and LDA of each label."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from protofl_common.models.trained import TrainedModel
from protofl_common.tools.cli import main
from tests.support.harness import Outcome, client_of, run_config, run_federation
from tests.support.plain import (
    PlainClient,
    assert_prototypes_left,
    class_averages,
    side_by_side,
)

Numbers = NDArray[np.float64]
Place = tuple[int, int]  # a label, and whether it holds
L = 10
TWO_DIGITS: dict[str, Any] = {
    "task": "multi-label",
    "dataset": "two-digits",
    "test_from": "official-own",
    "annotated_labels": 6,
    "total_samples": 150,
    "train_samples": 0,
}


# -- FedProto
class Client(PlainClient):
    starts_alike = False

    def train(self, number: int, protos: dict[Place, Any]) -> None:
        self.sgd(number, loss=lambda batch: self.loss(batch, protos))

    def loss(self, batch: list[int], protos: dict[Place, Any]) -> torch.Tensor:
        """Binary cross-entropy over what is known, and the mean pull to the prototypes of it."""
        z = self.model.body(self.x[batch])
        probabilities = torch.sigmoid(self.model.head(z))
        entropy = torch.zeros(())
        pull = torch.zeros(())
        known = 0
        for row, i in enumerate(batch):
            for label, holds in enumerate(self.y[i]):
                if holds < 0:
                    continue
                known += 1
                p = probabilities[row, label]
                entropy = entropy - torch.log(p if holds else 1 - p)
                if (label, holds) in protos:
                    pull = pull + ((z[row] - torch.from_numpy(protos[label, holds])) ** 2).mean()
        return (entropy + self.hparams.lambda_ * pull) / known

    def prototypes(self) -> dict[Place, tuple[Any, int]]:
        with torch.no_grad():
            z = self.model.eval().body(self.x).double().numpy()
        found = {}
        for label in range(L):
            for holds in (0, 1):
                rows = [i for i, labels in enumerate(self.y) if labels[label] == holds]
                if rows:
                    found[label, holds] = (z[rows].mean(0), len(rows))
        return found


def test_two_rounds_equal_an_independent_script(tmp_path: Path) -> None:
    more: dict[str, Any] = {"algo": "fedproto", "feature_dim": 16, "lr": 0.02, **TWO_DIGITS}
    outcome, clients = side_by_side(tmp_path, Client, ("cnn4", "htcnn-3", "cnn4"), **more)
    protos: dict[Place, Any] = {}
    for number in (1, 2):
        for client in clients:
            client.train(number, protos)
        merged = class_averages(client.prototypes() for client in clients)
        protos = {place: mean.astype(np.float32) for place, mean in merged.items()}
    by_class = {2 * label + holds: mean for (label, holds), mean in protos.items()}
    assert len(by_class) == 2 * L
    assert_prototypes_left(outcome, by_class, rtol=1e-4, atol=1e-5)


# -- LDA of each label
def federation(folder: Path, **settings: Any) -> tuple[Outcome, Numbers, NDArray[np.int64]]:
    """A run of three clients, and all training features with the labels that each has annotated."""
    small = {"algo": "gaussian", "rounds": 1, "backbones": "glyphs", **TWO_DIGITS}
    config = run_config(folder, **small | settings)
    outcome = run_federation(config, 3)
    sets = [client_of(config, client, 3).train_set for client in range(3)]
    x = np.concatenate([one.in_memory.numpy() for one in sets]).astype(np.float64)
    return outcome, x, np.concatenate([one.labels.numpy() for one in sets])


def moments_of(outcome: Outcome) -> dict[str, Numbers]:
    state = load_file(max((outcome.folder / "checkpoints").glob("*.safetensors")))
    return {
        name.partition("/")[2]: value.numpy()
        for name, value in state.items()
        if name.startswith("moments/")
    }


def oas(covariance: Numbers, n: float) -> Numbers:
    """Chen et al. 2010, Eq. 23, and a millionth of the mean variance."""
    p = len(covariance)
    trace, squares = np.trace(covariance), (covariance**2).sum()
    rho = min(1, ((1 - 2 / p) * squares + trace**2) / ((n + 1 - 2 / p) * (squares - trace**2 / p)))
    return (1 - rho) * covariance + (rho * trace / p + 1e-9 + 1e-6 * trace / p) * np.eye(p)


def moments_by_hand(x: Numbers, y: NDArray[np.int64]) -> dict[str, Numbers]:
    """Sums over samples, divided by their number; a sample counts for each label that is known."""
    n = len(x)
    each = np.stack([y[:, label] == holds for label in range(L) for holds in (0, 1)], 1) * 1.0
    rows, columns = np.triu_indices(x.shape[1])
    times = (y >= 0).sum(1)
    return {
        "shares": each.sum(0) / n,
        "first": each.T @ x / n,
        "second": ((x * times[:, None]).T @ x / n)[rows, columns],
    }


def lda_by_hand(x: Numbers, y: NDArray[np.int64], at: Numbers) -> Numbers:
    """Log odds [M, L] of each label, by the scatter within all 2 L classes together."""
    known = [(label, holds) for label in range(L) for holds in (0, 1)]
    rows = {place: x[y[:, place[0]] == place[1]] for place in known}
    scatter = sum((rows[p] - rows[p].mean(0)).T @ (rows[p] - rows[p].mean(0)) for p in known)
    total = sum(len(rows[place]) for place in known)
    inverse = np.linalg.inv(oas(scatter / total, total))
    odds = np.empty((len(at), L))
    for label in range(L):
        scores = []
        for holds in (0, 1):
            away = at - rows[label, holds].mean(0)
            distances = np.einsum("mf,fg,mg->m", away, inverse, away)
            scores.append(np.log(len(rows[label, holds])) - distances / 2)
        odds[:, label] = scores[1] - scores[0]
    return odds


def test_lda_of_each_label_is_that_of_all_features_in_one_place(tmp_path: Path) -> None:
    outcome, x, y = federation(tmp_path)
    for name, wanted in moments_by_hand(x, y).items():
        found = moments_of(outcome)[name]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9 * np.abs(wanted).max())

    file = outcome.folder / "clients" / "site-0" / "model.safetensors"
    found = TrainedModel.read(file).build().double()(torch.from_numpy(x)).numpy()
    wanted = lda_by_hand(x, y, x)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_a_site_that_is_forgotten_leaves_the_others_moments(tmp_path: Path) -> None:
    outcome, x, y = federation(tmp_path, gaussian__revocable=True)
    arguments = ["forget", str(outcome.folder), "--site", "site-2", "--by", "ann"]
    main(arguments)
    file = outcome.folder / "clients" / "site-0" / "model.safetensors"
    found = TrainedModel.read(file).build().double()(torch.from_numpy(x)).numpy()
    config = run_config(tmp_path, algo="gaussian", rounds=1, backbones="glyphs", **TWO_DIGITS)
    left = sum(len(client_of(config, client, 3).train_set) for client in range(2))
    known = [label for label in range(L) if (y[:left, label] >= 0).any()]
    assert len(known) == L - 1
    wanted = lda_by_hand(x[:left], y[:left], x)[:, known]
    found = found[:, known]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("algo", ["gaussian", "fedproto"])
def test_sums_under_secure_aggregation_are_the_same(algo: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"algo": algo, "rounds": 1, "feature_dim": 16}
    plain, *_ = federation(tmp_path / "plain", **more)
    secure, *_ = federation(tmp_path / "secure", secagg=True, **more)
    if algo == "gaussian":
        for name, wanted in moments_of(plain).items():
            found = moments_of(secure)[name]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
        return
    sets = [load_file(run.folder / "prototypes.safetensors") for run in (secure, plain)]
    assert sets[0]["labels"].equal(sets[1]["labels"])
    torch.testing.assert_close(sets[0]["means"], sets[1]["means"], rtol=0, atol=1e-5)

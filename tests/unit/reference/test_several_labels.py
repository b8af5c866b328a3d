"""Several labels a sample, written again: FedProto for two rounds, and LDA of each label."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from protofl_common.tools.cli import main
from tests.support.harness import Outcome, client_of, run_config, run_federation
from tests.support.plain import (
    PlainClient,
    assert_prototypes_left,
    class_averages,
    side_by_side,
)
from tests.support.plain_gaussian import Numbers, assert_within, head_left, moments_of, oas

Labels = NDArray[np.int64]
Place = tuple[int, int]
"""A label, and whether a sample has it (1) or not (0): what a prototype is of."""
L = 10
PLACES = list(itertools.product(range(L), (0, 1)))
TWO_DIGITS: dict[str, Any] = {
    "task": "multi-label",
    "dataset": "two-digits",
    "test_from": "official-own",
    "annotated_labels": 6,
    "total_samples": 150,
    "train_samples": 0,
}


# -- FedProto
Table = dict[Place, torch.Tensor]


class Client(PlainClient):
    starts_alike = False

    def train(self, number: int, protos: Table) -> None:
        self.sgd(number, loss=lambda batch: self.loss(batch, protos))

    def loss(self, batch: list[int], protos: Table) -> torch.Tensor:
        """Return binary cross-entropy over known labels, with the pull to their prototypes.

        A label that is not known is negative.
        """
        z = self.model.body(self.x[batch])
        probabilities = torch.sigmoid(self.model.head(z))
        terms = []
        for row, i in enumerate(batch):
            for label, holds in enumerate(self.y[i]):
                if holds < 0:
                    continue

                p = probabilities[row, label]
                if not holds:
                    p = 1 - p
                term = -torch.log(p)
                if (label, holds) in protos:
                    squares = (z[row] - protos[label, holds]) ** 2
                    term = term + self.hparams.lambda_ * squares.mean()
                terms.append(term)
        return sum(terms) / len(terms)

    def prototypes(self) -> dict[Place, tuple[torch.Tensor, int]]:
        """Return the mean feature of each place, and of how many samples it is."""
        with torch.no_grad():
            z = self.model.eval().body(self.x).double()
        found = {}
        for label, holds in PLACES:
            rows = [i for i, labels in enumerate(self.y) if labels[label] == holds]
            if rows:
                found[label, holds] = (z[rows].mean(0), len(rows))
        return found


def test_two_rounds_of_fedproto_equal_an_independent_script(tmp_path):
    """There is a global prototype of each of ten labels with it, and one without it."""
    more = {"algo": "fedproto", "lr": 0.02, **TWO_DIGITS}
    outcome, clients = side_by_side(tmp_path, Client, ("cnn4", "htcnn-3", "cnn4"), **more)

    protos = {}
    for number in (1, 2):
        for client in clients:
            client.train(number, protos)
        merged = class_averages(client.prototypes() for client in clients)
        protos = {place: mean.float() for place, mean in merged.items()}

    by_class = {2 * label + holds: mean for (label, holds), mean in protos.items()}
    assert len(by_class) == 2 * L
    assert_prototypes_left(outcome, by_class, rtol=1e-4, atol=1e-5)


# -- LDA of each label
def federation(folder: Path, **settings: Any) -> tuple[Outcome, Numbers, Labels]:
    """Run three clients; return all training features with the labels that each has annotated."""
    small = {"algo": "gaussian", "rounds": 1, "backbones": "glyphs", **TWO_DIGITS}
    config = run_config(folder, **small | settings)
    outcome = run_federation(config, 3)

    sets = [client_of(config, client).train_set for client in range(3)]
    features = [one.in_memory.numpy() for one in sets]
    labels = [one.labels.numpy() for one in sets]
    return outcome, np.concatenate(features).astype(np.float64), np.concatenate(labels)


def moments_by_hand(x: Numbers, y: Labels) -> dict[str, Numbers]:
    """Return sums over samples, divided by their number.

    A sample counts once for each label that is known of it.
    """
    is_absent_or_present = np.stack([y == 0, y == 1], axis=2)
    of_each_class = is_absent_or_present.reshape(len(y), 2 * L).astype(np.float64)
    times = (y >= 0).sum(1, keepdims=True)
    upper = np.triu_indices(x.shape[1])
    sums = {
        "shares": of_each_class.sum(0),
        "first": of_each_class.T @ x,
        "second": ((x * times).T @ x)[upper],
    }
    return {name: value / len(x) for name, value in sums.items()}


def lda_by_hand(x: Numbers, y: Labels, at: Numbers) -> Numbers:
    """Return the log odds [M, L] of each label, by the scatter within all 2 L classes together."""
    rows = {}
    for label, holds in PLACES:
        rows[label, holds] = x[y[:, label] == holds]
    apart = np.concatenate([of_class - of_class.mean(0) for of_class in rows.values()])
    inverse = np.linalg.inv(oas(apart.T @ apart / len(apart), len(apart)))

    scores = np.empty((2, len(at), L))
    for label, holds in PLACES:
        of_class = rows[label, holds]
        away = at - of_class.mean(0)
        distances = np.einsum("mf,fg,mg->m", away, inverse, away)
        scores[holds, :, label] = np.log(len(of_class)) - distances / 2
    return scores[1] - scores[0]


def test_lda_of_each_label_is_that_of_all_features_in_one_place(tmp_path):
    """Moments and log odds of three clients are those by hand from all their samples."""
    outcome, x, y = federation(tmp_path)

    moments = moments_of(outcome)
    for name, wanted in moments_by_hand(x, y).items():
        assert_within(moments[name], wanted, 1e-9)
    found = head_left(outcome)(torch.from_numpy(x)).numpy()
    assert_within(found, lda_by_hand(x, y, x), 1e-4)


def test_a_site_that_is_forgotten_leaves_the_others_moments(tmp_path):
    """Of one of ten labels nobody else has annotated anything, so that its odds do not count."""
    outcome, x, y = federation(tmp_path, gaussian__revocable=True)

    main(["forget", str(outcome.folder), "--site", "site-2", "--by", "ann"])

    found = head_left(outcome)(torch.from_numpy(x)).numpy()
    config = outcome.grid.run_config
    left = sum(len(client_of(config, client).train_set) for client in range(2))
    is_known = (y[:left] >= 0).any(0)
    assert is_known.sum() == L - 1
    wanted = lda_by_hand(x[:left], y[:left], x)
    assert_within(found[:, is_known], wanted[:, is_known], 1e-4)


@pytest.mark.parametrize("algo", ["gaussian", "fedproto"])
def test_sums_under_secure_aggregation_are_the_same(algo, tmp_path):
    """The moments, or the prototypes, are within rounding those of a run without it."""
    more = {"algo": algo, "rounds": 1, "feature_dim": 16}
    plain, *_ = federation(tmp_path / "plain", **more)
    secure, *_ = federation(tmp_path / "secure", secagg=True, **more)
    if algo == "gaussian":
        of_secure = moments_of(secure)
        for name, wanted in moments_of(plain).items():
            assert_within(of_secure[name], wanted, 1e-6)
        return

    in_secure = load_file(secure.folder / "prototypes.safetensors")
    in_plain = load_file(plain.folder / "prototypes.safetensors")
    assert in_secure["labels"].equal(in_plain["labels"])
    torch.testing.assert_close(in_secure["means"], in_plain["means"], rtol=0, atol=1e-5)

"""Hiding training labels: how many, which, and that nothing else changes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofl_common.data import UNLABELLED
from protofl_common.data.clients import hide_labels

from .conftest import OpenAll


def test_a_rate_of_every_class_keeps_its_label_and_at_least_one() -> None:
    labels = np.repeat([0, 3, 4, 7], [10, 5, 1, 100])
    hidden = hide_labels(labels, 0.2, np.random.default_rng(0))
    assert [int((hidden == label).sum()) for label in (0, 3, 4, 7)] == [2, 1, 1, 20]
    kept = hidden != UNLABELLED
    assert (hidden == UNLABELLED).sum() == 116 - 24
    np.testing.assert_array_equal(hidden[kept], labels[kept])


@pytest.mark.parametrize("rate", [1e-9, 0.001, 0.005])
def test_a_rate_too_small_for_a_class_leaves_one_label(rate: float) -> None:
    hidden = hide_labels(np.repeat([1, 2], [100, 3]), rate, np.random.default_rng(0))
    assert (hidden == 1).sum() == (hidden == 2).sum() == 1


def test_at_rate_one_the_labels_are_the_very_same_and_nothing_is_drawn() -> None:
    labels, rng = np.arange(5), np.random.default_rng(3)
    assert hide_labels(labels, 1.0, rng) is labels
    assert rng.random() == np.random.default_rng(3).random()


def test_the_given_labels_are_not_written_to() -> None:
    labels = np.zeros(8, dtype=np.int64)
    labels.flags.writeable = False
    assert (hide_labels(labels, 0.5, np.random.default_rng(0)) == UNLABELLED).sum() == 4


def test_what_is_labelled_at_a_rate_is_labelled_at_every_larger_one() -> None:
    labels = np.arange(300) % 3
    hidden = [hide_labels(labels, rate, np.random.default_rng(5)) for rate in (0.05, 0.1, 0.2, 0.5, 1.0)]
    sets = [set(np.flatnonzero(one != UNLABELLED)) for one in hidden]
    assert [len(one) for one in sets] == [15, 30, 60, 150, 300]
    assert all(small < large for small, large in pairwise(sets))


SHIFT: dict[str, Any] = {"dataset": "digit-domains", "partition": "feature-shift", "train_samples": 0}


def test_only_training_labels_change(open_all: OpenAll) -> None:
    for whole, few in zip(open_all(5, **SHIFT), open_all(5, **SHIFT, positive_rate=0.1), strict=True):
        np.testing.assert_array_equal(few.train_inputs, whole.train_inputs)
        np.testing.assert_array_equal(few.test_inputs, whole.test_inputs)
        np.testing.assert_array_equal(few.test_labels, whole.test_labels)
        known = few.train_labels != UNLABELLED
        np.testing.assert_array_equal(few.train_labels[known], whole.train_labels[known])
        assert set(few.train_labels[known]) == set(whole.train_labels)
        counts = np.bincount(whole.train_labels)
        np.testing.assert_array_equal(np.bincount(few.train_labels[known]), np.round(0.1 * counts))
        assert few.domain == whole.domain


def test_which_labels_depends_on_seed_and_client_alone(open_all: OpenAll) -> None:
    same = {"dataset": "digits", "partition": "iid", "train_samples": 0, "positive_rate": 0.2}
    first, again = open_all(3, **same), open_all(3, **same)
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.train_labels, two.train_labels)
    known = [client.train_labels != UNLABELLED for client in (*first, *open_all(3, seed=7, **same))]
    assert len({mask.tobytes() for mask in known}) == 6


def test_rates_share_one_division_in_the_cache(open_all: OpenAll, cache_dir: Path) -> None:
    few = {"dataset": "digits", "partition": "iid", "train_samples": 50}
    open_all(3, seed=99, **few)
    before = set(cache_dir.iterdir())
    open_all(3, seed=99, **few, positive_rate=0.3)
    assert set(cache_dir.iterdir()) == before

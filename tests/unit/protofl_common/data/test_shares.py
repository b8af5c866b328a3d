"""The stratified helpers, on labels small enough to reason about."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofl_common.data import partitions

LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=60).map(np.array)


@given(
    st.lists(st.integers(0, 4), max_size=60).map(lambda labels: np.array(labels, dtype=np.int64)),
    st.integers(0, 99),
)
def test_a_shuffled_class_has_its_positions_in_one_common_order(labels, seed):
    """Each class has its positions in the order of one permutation of all samples."""
    decks = partitions.shuffled_by_class(labels, np.random.default_rng(seed))

    shuffled = np.random.default_rng(seed).permutation(len(labels))
    for deck, label in zip(decks, np.unique(labels), strict=True):
        assert deck.tolist() == shuffled[labels[shuffled] == label].tolist()


@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0]), max_size=40),
    st.integers(0, 50),
    st.integers(0, 99),
)
def test_the_rows_of_lowest_turn_are_taken_and_ties_drawn_by_lot(turns, limit, seed):
    """`_first` takes the ``limit`` rows of lowest turn, and draws lots among equals.

    A limit of 0 takes all rows.
    """
    first = partitions._first(np.array(turns), limit, np.random.default_rng(seed))

    lots = np.random.default_rng(seed).random(len(turns))
    order = np.lexsort((lots, turns))  # by turn, then by lot
    taken = limit or len(turns)

    assert first.tolist() == sorted(order[:taken])


@given(LABELS, st.floats(0.01, 0.99), st.integers(0, 99))
def test_split_is_stratified(labels, fraction, seed):
    """Nothing is lost, no part is empty, and each class of two samples is in both parts."""
    train, test = partitions.split(labels, fraction, np.random.default_rng(seed))

    assert sorted([*train, *test]) == list(range(len(labels)))
    assert len(train) > 0
    assert len(test) > 0
    for label in set(labels.tolist()):
        count = np.sum(labels == label)
        kept = np.sum(labels[train] == label)
        if count >= 2:
            assert 1 <= kept < count
            assert abs(kept - fraction * count) <= 1


@given(LABELS, st.floats(0.01, 0.9), st.integers(0, 99))
def test_what_is_set_aside_leaves_every_class_in_training(labels, fraction, seed):
    """As many are set aside as the fraction says, or fewer: each class keeps one sample."""
    stay, aside = partitions.set_aside(labels, fraction, np.random.default_rng(seed))

    assert sorted([*stay, *aside]) == list(range(len(labels)))
    assert set(labels[stay]) == set(labels)
    asked_for = round(fraction * len(labels))
    classes = len(set(labels))
    assert len(aside) == min(asked_for, len(labels) - classes)


@given(LABELS, st.integers(0, 70), st.integers(0, 99))
def test_balanced_takes_equally_from_each_class(labels, limit, seed):
    """A class with samples left gives at most one less than any other.

    A limit of 0 means no limit.
    """
    kept = partitions.balanced(labels, limit, np.random.default_rng(seed))

    assert len(set(kept)) == len(kept)
    assert len(kept) == min(limit or len(labels), len(labels))

    available = np.bincount(labels)
    taken = np.bincount(labels[kept], minlength=len(available))
    of_unfinished_classes = taken[taken < available]
    if len(of_unfinished_classes):
        assert taken.max() <= of_unfinished_classes.min() + 1


def test_eleven_of_a_class_are_dealt_evenly_to_three_clients():
    """Each client gets three or four of them, and eleven of all 33 samples."""
    labels = np.repeat([0, 1], [11, 22])

    shares = partitions.dealt_evenly(labels, 3, np.random.default_rng(0))

    assert sorted(np.concatenate(shares)) == list(range(33))
    for share in shares:
        assert len(share) == 11
        assert np.sum(labels[share] == 0) in (3, 4)


@pytest.mark.parametrize("limit", [10, 40])
def test_what_is_kept_has_the_class_proportions(limit):
    labels = np.repeat([0, 1, 2], [20, 20, 160])

    kept = partitions.proportional(labels, limit, np.random.default_rng(1))

    assert len(kept) == len(set(kept)) == limit
    proportions = np.array([0.1, 0.1, 0.8])
    np.testing.assert_allclose(np.bincount(labels[kept]), proportions * limit, atol=1)


def test_what_is_set_aside_has_the_class_proportions():
    labels = np.repeat([0, 1, 2], [40, 20, 140])
    _, aside = partitions.set_aside(labels, 0.1, np.random.default_rng(1))
    assert np.bincount(labels[aside]).tolist() == [4, 2, 14]

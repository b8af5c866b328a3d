"""Around the partitions: the pool, the split into training and test samples, the caps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .conftest import WHOLE, OpenAll, counts, held


def test_training_cap_is_balanced_and_the_rest_is_for_testing(open_all: OpenAll) -> None:
    for client in open_all(5, dataset="digit-domains", partition="feature-shift", train_samples=35, test_samples=0):
        assert sorted(np.bincount(client.train_labels)) == [3] * 5 + [4] * 5
        assert len(client.test_labels) == 500 - 35


def test_test_cap_keeps_proportions(open_all: OpenAll) -> None:
    for client in open_all(5, dataset="digit-domains", partition="feature-shift", test_samples=50):
        assert len(client.train_labels) == 30
        assert set(np.bincount(client.test_labels)) <= {4, 5, 6}
        assert len(client.test_labels) == 50


def test_total_samples_are_drawn_before_dividing(open_all: OpenAll) -> None:
    everyone = open_all(4, dataset="digits", partition="iid", total_samples=100, **WHOLE)
    assert [counts(client).sum() for client in everyone] == [25] * 4


def test_official_test_part(open_all: OpenAll, mnist_dir: Path) -> None:
    """The made-up MNIST has images 0…399 for training and 400…499 for testing, of class number mod 10."""
    official = {"dataset": "mnist", "data_dir": str(mnist_dir), "test_from": "official"}
    everyone = open_all(5, **official, partition="pathological", **WHOLE)
    numbers = [client.train_images[:, 0, 0, :2].astype(int) @ [256, 1] for client in everyone]
    np.testing.assert_array_equal(np.sort(np.concatenate(numbers)), np.arange(400))
    for client in everyone:
        tests = client.test_images[:, 0, 0, :2].astype(int) @ [256, 1]
        assert set(tests) == {number for number in range(400, 500) if number % 10 in held(client)}
    capped = open_all(5, **official, partition="iid", train_samples=20, test_samples=30, total_samples=390)
    for client in capped:
        assert (np.bincount(client.train_labels) == 2).all()
        assert (np.bincount(client.test_labels) == 3).all()

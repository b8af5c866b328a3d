"""Clusters: finch-clust's partitions, small cases, and means."""

import numpy as np
import pytest
import torch
from finch import FINCH

from protofl_common.maths import finch
from protofl_common.maths.finch import finch_partitions
from protofl_common.maths.prototypes import cluster, cluster_classes


def same_partition(one, other):
    """Return whether two numberings of clusters put the same rows together.

    They do if each number of the one goes with a single number of the other.
    """
    pairs = set(zip(one.tolist(), other.tolist(), strict=True))
    return len(pairs) == len(set(one)) == len(set(other))


def rows_of(source):
    """Return uniform rows ("random"), 12 blobs of 20 rows each ("blobs"), or sparse ones ("relu").

    The blobs are far apart; the sparse rows are as features after a ReLU.
    """
    random = np.random.default_rng(5)
    if source == "random":
        return random.random((150, 16))
    if source == "blobs":
        centres = np.eye(12) * 5 + 1
        return np.repeat(centres, 20, axis=0) + random.normal(0, 0.05, (240, 12))
    return np.maximum(0, random.normal(-1, 1, (120, 64)))


@pytest.mark.parametrize("source", ["random", "blobs", "relu"])
def test_every_partition_is_finch_clusts(source):
    """From fine to coarse, as many clusters and the same rows together as the authors' package.

    It returns a column for each of P partitions of the N rows, and their numbers of clusters.
    """
    rows = rows_of(source)

    found = finch_partitions(rows)

    expected_NP, counts, _ = FINCH(rows, verbose=False)
    assert len(found) == expected_NP.shape[1]
    for partition, expected, count in zip(found, expected_NP.T, counts, strict=True):
        assert partition.max() + 1 == count
        assert same_partition(partition, expected)


def test_neighbours_are_the_same_when_they_are_searched_block_by_block(monkeypatch):
    """Similarities are computed for as many pairs at once as fit into memory."""
    rows = rows_of("random")
    expected = finch_partitions(rows)

    monkeypatch.setattr(finch, "MAX_PAIRS", 7 * len(rows))  # 150 rows: 21 blocks of 7, one of 3

    for partition, wanted in zip(finch_partitions(rows), expected, strict=True):
        assert partition.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(np.ones((1, 3)), id="one"),
        pytest.param(np.ones((2, 3)), id="two alike"),
        pytest.param(np.eye(2), id="two at a right angle"),
        pytest.param(np.ones((6, 3)), id="six alike"),
        pytest.param(np.zeros((5, 3)), id="zeros, which have no direction"),
    ],
)
def test_few_or_equal_vectors_are_one_cluster(rows):
    (partition,) = finch_partitions(rows)
    assert partition.tolist() == [0] * len(rows)


def two_groups():
    """Return three vectors along each axis; the means are (2.9/3, 0.1/3) and (0.1/3, 5.9/3)."""
    return torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.9, 0.0], [0.0, 2.0], [0.1, 2.0], [0.0, 1.9]])


@pytest.mark.parametrize(("method", "clusters"), [("finch", 0), ("kmeans", 0), ("kmeans", 2)])
def test_means_of_two_groups_by_hand(method, clusters):
    """``clusters``: how many are asked for, 0 for as many as the vectors show."""
    means, counts = cluster(two_groups(), method, clusters)

    assert counts.sum() == len(two_groups())
    in_order = means[means[:, 0].argsort()]  # clusters have no order of their own
    wanted = torch.tensor([[0.1 / 3, 5.9 / 3], [2.9 / 3, 0.1 / 3]])
    torch.testing.assert_close(in_order, wanted)


def test_kmeans_makes_as_many_clusters_as_finchs_coarsest_partition():
    rows = rows_of("blobs")
    partitions = finch_partitions(rows)
    assert len(partitions) > 1
    means, counts = cluster(torch.from_numpy(rows), "kmeans")
    assert len(means) == partitions[-1].max() + 1 < partitions[0].max() + 1
    assert counts.sum() == len(rows)


def test_average_is_one_mean():
    means, _ = cluster(two_groups(), "average")
    torch.testing.assert_close(means, two_groups().mean(0, keepdim=True))


def test_kmeans_has_no_more_clusters_than_different_vectors():
    of_two, _ = cluster(two_groups()[:2], "kmeans", 5)
    assert len(of_two) == 2

    of_four_alike, _ = cluster(torch.ones(4, 2), "kmeans", 3)
    assert len(of_four_alike) == 1


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"'dbscan'.*finch, kmeans, average"):
        cluster(two_groups(), "dbscan")


def test_a_ratio_of_centres_is_not_rounded_up_by_floating_point():
    """0.07 · 100 is a little above 7 in floating point, and ceil would make 8 of it."""
    centres = cluster_classes(torch.rand(100, 2), torch.zeros(100), "kmeans", ratio=0.07)
    assert len(centres) == 7

"""Prototypes on hand-worked arrays."""

import pytest
import torch

from protofl_common.maths.aggregation import MEAN, fuse_by_similarity, merge_by_class
from protofl_common.maths.prototypes import (
    Prototypes,
    chosen,
    distances,
    margins,
)


def prototypes(means, labels, counts=None):
    return Prototypes(
        torch.tensor(means),
        torch.tensor(labels),
        None if counts is None else torch.tensor(counts),
    )


def test_merging_by_counts_needs_those_of_every_client():
    with pytest.raises(ValueError, match="counts of every client"):
        merge_by_class([prototypes([[1.0]], [0])], "counts")


def test_a_class_nobody_sent_keeps_its_prototype():
    """Class 3 has a prototype from before, and class 0 a new one."""
    previous = prototypes([[1.0], [2.0]], [0, 3])
    sent = prototypes([[9.0]], [0], [2])

    merged = MEAN.merge_prototypes([sent], "counts", previous)

    assert merged.labels.tolist() == [0, 3]
    assert merged.means.tolist() == [[9.0], [2.0]]


def test_a_classs_own_prototypes_do_not_make_its_margin():
    """A margin is the distance to the nearest prototype of another class: 5 between 0 and 2 here.

    Class 1 has no prototype, and so no margin.
    """
    several = prototypes([[0.0, 0.0], [1.0, 0.0], [0.0, 5.0]], [2, 2, 0])
    torch.testing.assert_close(
        margins(several, 3), torch.tensor([5.0, torch.nan, 5.0]).double(), equal_nan=True
    )


def nearest(features, prototypes):
    """Return the label of the nearest prototype of each feature vector."""
    return prototypes.labels[distances(features, prototypes).argmin(dim=1)]


def test_nearest_label_by_hand_among_all_and_among_some():
    """If no prototype is of a class that is asked for, all prototypes are compared."""
    known = prototypes([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]], [4, 2, 7])
    features = torch.tensor([[1.0, 1.0], [9.0, 2.0], [2.0, 9.0]])

    assert nearest(features, known).tolist() == [4, 2, 7]

    among_two = chosen(known, torch.tensor([4, 7]))
    assert nearest(features, among_two).tolist() == [4, 4, 7]

    among_none = chosen(known, torch.tensor([5]))
    assert nearest(features, among_none).tolist() == [4, 2, 7]


def test_nearest_label_far_from_the_origin():
    """|z|² + |p|² − 2 z·p with squares of 10⁸ would leave nothing of the distance in float32."""
    known = prototypes([[1e4, 0.0], [1e4 + 0.25, 0.0]], [0, 1])
    features = torch.tensor([[1e4 + 0.1, 0.0], [1e4 + 0.2, 0.0]])

    assert nearest(features, known).tolist() == [0, 1]


def test_cosine_distances_are_of_directions_alone():
    """Unit vectors at a right angle are √2 apart, however long the vectors were."""
    known = prototypes([[5.0, 0.0], [0.0, 0.1]], [3, 4])
    features = torch.tensor([[2.0, 0.0], [0.0, 9.0]])

    found = distances(features, known, "cosine")

    torch.testing.assert_close(found, torch.tensor([[0.0, 2**0.5], [2**0.5, 0.0]]))


def test_joined_sets_keep_their_order_and_tell_counts_only_if_all_do():
    """The rows of one set follow those of the other, even of equal classes."""
    one = prototypes([[1.0, 1.0]], [4], [3])
    other = prototypes([[0.0, 0.0], [0.0, 0.0]], [1, 4], [5, 6])

    both = Prototypes.joined([one, other])
    assert both.labels.tolist() == [4, 1, 4]
    assert both.means[:, 0].tolist() == [1, 0, 0]
    assert both.counts.tolist() == [3, 5, 6]
    assert Prototypes.joined([one, other.without_counts()]).counts is None


def test_fusion_goes_by_how_alike_prototypes_are():
    """Two of three prototypes of class 0 point in one direction, and only they count when cold.

    At a high temperature all weigh the same. Class 3 is of one client.
    """
    sets = [
        prototypes([[1.0, 0.0], [7.0, 7.0]], [0, 3]),
        prototypes([[3.0, 0.0]], [0]),
        prototypes([[0.0, 8.0]], [0]),
    ]

    cold = fuse_by_similarity(sets, 0.01)
    assert cold.labels.tolist() == [0, 3]
    torch.testing.assert_close(cold.means, torch.tensor([[2.0, 0.0], [7.0, 7.0]]))

    hot = fuse_by_similarity(sets, 1e6)
    mean_of_all = torch.tensor([4 / 3, 8 / 3])
    torch.testing.assert_close(hot.means[0], mean_of_all, rtol=1e-4, atol=0)

"""Merging that bears some hostile clients: coordinate-wise median and trimmed mean of prototypes.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018, Definitions 1 and 2,
there for gradients. Every client that holds a class weighs the same: counts are a client's own claim, and a large one
would undo the protection. Symbols: n clients that hold a class, D feature dimension, β ``trim_fraction``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from protofl_common.prototypes import Prototypes, from_mapping, merge_by_class


def merge_prototypes(
    sets: Sequence[Prototypes], weighting: str, previous: Prototypes | None, merging: str, trim_fraction: float
) -> Prototypes:
    """One prototype per class by ``merging``: ``mean`` (`merge_by_class`), ``median`` or ``trimmed-mean``.

    ``sets`` hold one prototype per class each. A class nobody sent keeps that of ``previous``.
    """
    if merging == "mean":
        return merge_by_class(sets, weighting, previous)
    rows: dict[int, list[Tensor]] = defaultdict(list)
    for one in sets:
        for label, mean in zip(one.labels.tolist(), one.means, strict=True):
            rows[label].append(mean)
    means = {} if previous is None else dict(zip(previous.labels.tolist(), previous.means, strict=True))
    for label, held in rows.items():
        means[label] = mean_of_middle(torch.stack(held), dropped(len(held), merging, trim_fraction))
    return from_mapping(means)


def dropped(n: int, merging: str, trim_fraction: float) -> int:
    """How many of n values go at each end: ⌈βn⌉, or for the median all but the middle one or two.

    β is rounded up, so that three clients are enough to outvote one; with two nothing can be dropped.
    """
    most = (n - 1) // 2
    return most if merging == "median" else min(most, math.ceil(round(trim_fraction * n, 9)))


def mean_of_middle(means_ND: Tensor, dropped: int) -> Tensor:
    """The mean [D] over clients, in each coordinate without its ``dropped`` smallest and largest values."""
    ordered = means_ND.double().sort(dim=0).values
    return ordered[dropped : len(ordered) - dropped].mean(dim=0).float()

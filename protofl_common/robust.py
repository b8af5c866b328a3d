"""Merging that bears some hostile clients: coordinate-wise median and trimmed mean, and updates of bounded length.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018, Definitions 1 and 2,
there for gradients. Every client that sends a prototype or weights weighs the same: samples are a client's own claim,
and a large one would undo the protection. Symbols: n clients, D dimensions, β ``trim_fraction``.

Sun et al., "Can You Really Backdoor Federated Learning?", 2019: an update w_i − w longer than M is cut to the length M,
here a multiple of the round's median length.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from protofl_common.prototypes import Prototypes, from_mapping, merge_by_class

FEWEST = 3
"""Clients from which on their median tells what is usual, and can outvote one of them."""
AT_ONCE = 2**18
"""Coordinates that are sorted at once: of a large layer of many clients, all would take gigabytes."""


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
        means[label] = mean_of_middle(torch.stack(held), dropped(len(held), merging, trim_fraction)).float()
    return from_mapping(means)


def merge_weights(
    sets: Sequence[Mapping[str, Tensor]], shares: Sequence[float], merging: str, trim_fraction: float
) -> dict[str, Tensor]:
    """The clients' weights as one, tensor by tensor, computed in float64; whole numbers are rounded.

    ``mean`` is Σ_i share_i · w_i; ``median`` and ``trimmed-mean`` leave the ``shares`` aside.
    """
    drop = dropped(len(sets), merging, trim_fraction)
    merged = {}
    for name, one in sets[0].items():
        values = [weights[name] for weights in sets]
        mean = _weighted_sum(values, shares) if merging == "mean" else _middle(values, drop)
        merged[name] = (mean if one.is_floating_point() else mean.round()).to(one.dtype)
    return merged


def _weighted_sum(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = torch.zeros_like(values[0], dtype=torch.float64)
    for value, share in zip(values, shares, strict=True):
        total += value.double() * share
    return total


def _middle(values: Sequence[Tensor], drop: int) -> Tensor:
    parts = zip(*(value.flatten().split(AT_ONCE) for value in values), strict=True)
    return torch.cat([mean_of_middle(torch.stack(part), drop) for part in parts]).reshape(values[0].shape)


def clip_updates(
    sets: Sequence[Mapping[str, Tensor]], received: Sequence[Mapping[str, Tensor]], ratio: float
) -> list[Mapping[str, Tensor]]:
    """The weights w_i of each client, no farther from those it ``received`` than ``ratio`` times the median distance.

    Fewer than `FEWEST` sets are returned as they are. Integer buffers do not count, and stay.
    """
    lengths = [_distance(one, other) for one, other in zip(sets, received, strict=True)]
    limit = ratio * statistics.median_low(lengths) if len(sets) >= FEWEST else math.inf
    found = zip(sets, received, lengths, strict=True)
    return [one if length <= limit else _between(other, one, limit / length) for one, other, length in found]


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    pairs = [(value, other[name]) for name, value in one.items() if value.is_floating_point()]
    return math.sqrt(sum(float((value.double() - start.double()).square().sum()) for value, start in pairs))


def _between(start: Mapping[str, Tensor], end: Mapping[str, Tensor], part: float) -> dict[str, Tensor]:
    return {
        name: start[name].double().lerp(value.double(), part).to(value.dtype) if value.is_floating_point() else value
        for name, value in end.items()
    }


def dropped(n: int, merging: str, trim_fraction: float) -> int:
    """How many of n values go at each end: ⌈βn⌉, or for the median all but the middle one or two.

    β is rounded up, so that three clients are enough to outvote one; with two nothing can be dropped.
    """
    most = (n - 1) // 2
    return most if merging == "median" else min(most, math.ceil(round(trim_fraction * n, 9)))


def mean_of_middle(means_ND: Tensor, dropped: int) -> Tensor:
    """The mean [D] float64 over clients, in each coordinate without its ``dropped`` smallest and largest values."""
    ordered = means_ND.double().sort(dim=0).values
    return ordered[dropped : len(ordered) - dropped].mean(dim=0)

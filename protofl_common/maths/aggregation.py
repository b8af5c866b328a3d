"""The clients' prototypes, or their weights, as one: the mean, or a statistic that withstands some hostile clients.

Median and trimmed mean: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
2018, Definitions 1 and 2, there for gradients. Every client that sends a prototype or weights weighs the same: samples
are a client's own claim, and a large one would undo the protection. Symbols: n clients, D dimensions, β ``trim``.

Sun et al., "Can You Really Backdoor Federated Learning?", 2019: an update w_i − w longer than M is cut to the length M,
here a multiple of the round's median length.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from protofl_common.maths.prototypes import Prototypes

FEWEST = 3  # clients from which on their median tells what is usual, and can outvote one of them
State = Mapping[str, Tensor]  # of a model, or of a part of it: a parameter's or buffer's name -> its value
COORDINATES = 2**18  # coordinates that are sorted at once: of a large layer of many clients, all would take gigabytes


def merge_prototypes(
    sets: Sequence[Prototypes], weighting: str, previous: Prototypes | None, merging: str, trim: float
) -> Prototypes:
    """One prototype per class by ``merging``, of at least one set; a class nobody sent stays as in ``previous``."""
    if merging == "mean":
        merged = merge_by_class(sets, weighting)
    else:
        every = Prototypes.joined(sets)
        labels_C = every.labels.unique()
        sent = [every.means[every.labels == label] for label in labels_C]
        middle = [mean_of_middle(means, dropped(len(means), merging, trim)).float() for means in sent]
        merged = Prototypes(torch.stack(middle), labels_C)
    if previous is None:
        return merged
    both = merged.completed_by(previous)
    return both.only(both.labels.argsort())


def merge_by_class(sets: Sequence[Prototypes], weighting: str) -> Prototypes:
    """One prototype per class: the mean over the clients that have the class (FedProto Eq. 4), at least one of any.

    ``weighting``: ``"counts"`` by the samples behind each prototype, which gives the mean over all clients' samples of
    the class; ``"uniform"``: every client weighs the same.
    """
    every = Prototypes.joined(sets)
    counts_P = torch.ones(len(every)) if weighting == "uniform" else every.counts
    if counts_P is None:
        raise ValueError("weighting by counts needs the counts of every client")
    weights_P = counts_P.double()
    labels_C, class_P = every.labels.unique(return_inverse=True)
    totals_C = weights_P.new_zeros(len(labels_C)).index_add_(0, class_P, weights_P)
    sums_CD = weights_P.new_zeros(len(labels_C), every.means.shape[1])
    sums_CD.index_add_(0, class_P, weights_P.unsqueeze(1) * every.means.double())
    return Prototypes((sums_CD / totals_C.unsqueeze(1)).float(), labels_C)


def without_the_farthest(sets: Sequence[Prototypes], merging: str, trim: float) -> list[Prototypes]:
    """The sets without the prototypes of the clients that are least like the others.

    For servers that train on prototypes or cluster them. A client has one vote on a class: the mean of its prototypes.
    It is as unlike the others as its votes are on average far from those of its classes (`_distances`): one class
    alone does not show who gives his prototypes to wrong classes. Of the n clients that have a class, those `dropped`
    that are most unlike go; with ``mean`` none.
    """
    if merging == "mean":
        return list(sets)
    distances_MC = _distances(sets)
    unlike_M = distances_MC.nanmean(dim=1)
    remaining = [torch.ones(len(prototypes), dtype=torch.bool) for prototypes in sets]
    for label, of_class_M in enumerate(distances_MC.T):
        holders = torch.nonzero(~of_class_M.isnan()).flatten()
        most_unlike = holders[unlike_M[holders].argsort(stable=True)]
        for client in most_unlike[len(holders) - dropped(len(holders), merging, trim) :].tolist():
            remaining[client] &= sets[client].labels != label
    return [prototypes.only(rows) for prototypes, rows in zip(sets, remaining, strict=True)]


def _distances(sets: Sequence[Prototypes]) -> Tensor:
    """How far each client's vote on a class is from the coordinate-wise median of all, [M, C] float64.

    Euclidean, in multiples of the class's median distance; NaN where a client has no vote or fewer than `FEWEST` have.
    """
    classes = 1 + max((int(prototypes.labels.max()) for prototypes in sets if len(prototypes)), default=-1)
    found_MC = torch.full((len(sets), classes), torch.nan, dtype=torch.float64)
    for label in range(classes):
        holders = [client for client, prototypes in enumerate(sets) if label in prototypes.labels]
        if len(holders) < FEWEST:
            continue
        votes = [sets[client].means[sets[client].labels == label].double().mean(0) for client in holders]
        votes_ND = torch.stack(votes)
        far_N = (votes_ND - mean_of_middle(votes_ND, dropped(len(holders), "median", 0.0))).norm(dim=1)
        found_MC[holders, label] = far_N / far_N.median().clamp_min(torch.finfo(torch.float64).tiny)
    return found_MC


def merge_weights(sets: Sequence[State], shares: Sequence[float], merging: str, trim: float) -> dict[str, Tensor]:
    """Σ_i share_i · w_i in float64, whole numbers rounded; ``median`` and ``trimmed-mean`` ignore ``shares``."""
    drop = dropped(len(sets), merging, trim)
    merged = {}
    for name, first in sets[0].items():
        values = [weights[name] for weights in sets]
        if merging == "mean":
            weighted = (value.double() * share for value, share in zip(values, shares, strict=True))
            mean = sum(weighted, torch.zeros_like(first, dtype=torch.float64))
        else:
            parts = zip(*(value.flatten().split(COORDINATES) for value in values), strict=True)
            mean = torch.cat([mean_of_middle(torch.stack(part), drop) for part in parts]).reshape(first.shape)
        merged[name] = (mean if first.is_floating_point() else mean.round()).to(first.dtype)
    return merged


def clip_updates(sets: Sequence[State], received: Sequence[State], ratio: float) -> list[State]:
    """Cut w_i farther from those received than ``ratio`` times the median, of at least `FEWEST` clients."""
    lengths = [
        length_of(value.double() - other[name].double() for name, value in sent.items() if value.is_floating_point())
        for sent, other in zip(sets, received, strict=True)
    ]
    limit = ratio * statistics.median_low(usual) if len(usual := with_length(lengths)) >= FEWEST else math.inf
    pairs = zip(sets, received, lengths, strict=True)
    return [sent if length <= limit else _between(other, sent, limit / length) for sent, other, length in pairs]


def with_length(lengths: Sequence[float]) -> Sequence[float]:
    """Return the lengths whose median says what is usual: without zeros where these are half of them or more."""
    return lengths if statistics.median_low(lengths) else [length for length in lengths if length]


def length_of(tensors: Iterable[Tensor]) -> float:
    """The norm of all numbers together but whole ones, such as of positions."""
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors if each.is_floating_point()))


def _between(start: State, end: State, part: float) -> dict[str, Tensor]:
    return {
        name: start[name].double().lerp(value.double(), part).to(value.dtype) if value.is_floating_point() else value
        for name, value in end.items()
    }


def dropped(n: int, merging: str, trim: float) -> int:
    """Count what goes at each end of n: ⌈βn⌉ of a part β below 1, else β; for the median all but one or two."""
    most = (n - 1) // 2
    return most if merging == "median" else min(most, math.ceil(round(trim * n if trim < 1 else trim, 9)))


def mean_of_middle(means_ND: Tensor, dropped: int) -> Tensor:
    """The mean [D] float64 over clients, in each coordinate without its ``dropped`` smallest and largest values."""
    ordered = means_ND.double().sort(dim=0).values
    return ordered[dropped : len(ordered) - dropped].mean(dim=0)

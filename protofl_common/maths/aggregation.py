"""Several clients' prototypes, or weights, as one: a mean, or what withstands hostile clients.

Median and trimmed mean: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates", ICML 2018, Definitions 1 and 2, there for gradients. Every client that sends a
prototype or weights weighs the same: samples are a client's own claim, and a large one would undo
the protection. Symbols: n clients, D dimensions, β ``trim``.

Sun et al., "Can You Really Backdoor Federated Learning?", 2019: an update w_i − w longer than M is
cut to the length M, here a multiple of the round's median length.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from protofl_common.maths.prototypes import Prototypes

# clients from which on their median tells what is usual, and can outvote one of them
MIN_CLIENTS_FOR_MEDIAN = 3
State = Mapping[str, Tensor]  # of a model or a part of it: name of parameter or buffer -> value
# sorted at once: all of a large layer of many clients would take gigabytes
COORDINATES_AT_ONCE = 2**18


@dataclass(frozen=True)
class Aggregator:
    """How what several clients have sent becomes one.

    ``merging`` is ``mean``, ``median`` or ``trimmed-mean``. A trimmed mean leaves out ``trim`` of
    the values at each end: a part of them if below 1, else so many.
    """

    merging: str = "mean"
    trim: float = 0.0

    def merge_prototypes(
        self,
        sets: Sequence[Prototypes],
        weighting: str,
        previous: Prototypes | None,
        factors: Sequence[float] = (),
    ) -> Prototypes:
        """Merge at least one set into one prototype per class; a class nobody sent stays as before.

        ``weighting`` and ``factors`` are those of `merge_by_class`; a median and a trimmed mean
        ignore them.
        """
        if self.merging == "mean":
            merged = merge_by_class(sets, weighting, factors)
        else:  # a median too is a trimmed mean: of the one or two in the middle
            joined = Prototypes.joined(sets)
            labels_C = joined.labels.unique()
            merged_means = []
            for label in labels_C:
                means_ND = joined.means[joined.labels == label]
                drop = self.dropped_at_each_end(len(means_ND))
                merged_means.append(trimmed_mean(means_ND, drop).float())
            merged = Prototypes(torch.stack(merged_means), labels_C)

        if previous is None:
            return merged
        completed = merged.completed_by(previous)
        rows_by_label = completed.labels.argsort()
        return completed.only(rows_by_label)

    def merge_weights(self, sets: Sequence[State], shares: Sequence[float]) -> dict[str, Tensor]:
        """Merge the clients' weights in float64; whole numbers are rounded.

        The mean is Σ_i share_i · w_i; a median and a trimmed mean ignore ``shares``.
        """
        drop = self.dropped_at_each_end(len(sets))
        merged = {}
        for name, first in sets[0].items():
            values = [weights[name] for weights in sets]
            if self.merging == "mean":
                mean = torch.zeros_like(first, dtype=torch.float64)
                for value, share in zip(values, shares, strict=True):
                    mean += value.double() * share
            else:
                pieces = [value.flatten().split(COORDINATES_AT_ONCE) for value in values]
                middles = []
                for of_clients in zip(*pieces, strict=True):
                    middles.append(trimmed_mean(torch.stack(of_clients), drop))
                mean = torch.cat(middles).reshape(first.shape)
            if not first.is_floating_point():
                mean = mean.round()
            merged[name] = mean.to(first.dtype)
        return merged

    def without_outliers(self, sets: Sequence[Prototypes]) -> list[Prototypes]:
        """Remove the prototypes of the clients that are least like the others; none for a mean.

        For servers that train on prototypes or cluster them. A client has one vote on a class: the
        mean of its prototypes. It is as unlike the others as its votes are on average far from
        those of its classes (`_distances_from_median`): one class alone does not show who gives his
        prototypes to wrong classes. Of the n clients that have a class, those
        `dropped_at_each_end` that are most unlike lose theirs.
        """
        if self.merging == "mean":
            return list(sets)
        distances_MC = _distances_from_median(sets)
        unlike_M = distances_MC.nanmean(dim=1)
        kept = [torch.ones(len(prototypes), dtype=torch.bool) for prototypes in sets]
        for label, distances_M in enumerate(distances_MC.T):
            holders = torch.nonzero(~distances_M.isnan()).flatten()
            most_unlike_last = holders[unlike_M[holders].argsort(stable=True)]
            first_dropped = len(holders) - self.dropped_at_each_end(len(holders))
            for client in most_unlike_last[first_dropped:].tolist():
                kept[client] &= sets[client].labels != label
        return [prototypes.only(rows) for prototypes, rows in zip(sets, kept, strict=True)]

    def dropped_at_each_end(self, n: int) -> int:
        """Return how many of n values go at each end, before the mean of the rest is taken.

        Of a median (Definition 1) these are all but the one or two in the middle, of a trimmed mean
        (Definition 2) ⌈βn⌉ for a part β, else β values; at least one stays.
        """
        most = (n - 1) // 2
        if self.merging == "median":
            return most
        wanted = self.trim * n if self.trim < 1 else self.trim
        return min(most, math.ceil(round(wanted, 9)))


MEAN = Aggregator()
MEDIAN = Aggregator("median")


def merge_by_class(
    sets: Sequence[Prototypes], weighting: str, factors: Sequence[float] = ()
) -> Prototypes:
    """Average each class's prototypes over the clients that have the class (FedProto Eq. 4).

    At least one set has a prototype. ``weighting``: ``"counts"`` by the samples behind each, which
    gives the mean over all clients' samples of the class; ``"uniform"``: every client weighs the
    same. ``factors`` multiply the weights of the sets; without them each is 1.
    """
    joined = Prototypes.joined(sets)
    counts_P = torch.ones(len(joined)) if weighting == "uniform" else joined.counts
    if counts_P is None:
        raise ValueError("weighting by counts needs the counts of every client")
    weights_P = counts_P.double()
    if factors:
        lengths = torch.tensor([len(prototypes) for prototypes in sets])
        factors_M = torch.tensor(factors, dtype=torch.float64)
        weights_P = weights_P * factors_M.repeat_interleave(lengths)

    labels_C, class_P = joined.labels.unique(return_inverse=True)
    totals_C = weights_P.new_zeros(len(labels_C))
    totals_C.index_add_(0, class_P, weights_P)
    sums_CD = weights_P.new_zeros(len(labels_C), joined.means.shape[1])
    sums_CD.index_add_(0, class_P, weights_P.unsqueeze(1) * joined.means.double())
    return Prototypes((sums_CD / totals_C.unsqueeze(1)).float(), labels_C)


def fuse_by_similarity(sets: Sequence[Prototypes], temperature: float) -> Prototypes:
    """Average each class's prototypes, of which those most like the others weigh most (FedDAP).

    Σ_i a_i p_i with a = softmax_i(Σ_j cos(p_i, p_j) / ``temperature``), over all that have the
    class. At least one set has a prototype.
    """
    joined = Prototypes.joined(sets)
    labels_C = joined.labels.unique()
    fused = []
    for label in labels_C:
        means_ND = joined.means[joined.labels == label].double()
        units_ND = normalize(means_ND)
        likeness_N = (units_ND @ units_ND.T).sum(dim=1)
        weights_N = torch.softmax(likeness_N / temperature, dim=0)
        fused.append((weights_N @ means_ND).float())
    return Prototypes(torch.stack(fused), labels_C)


def _distances_from_median(sets: Sequence[Prototypes]) -> Tensor:
    """How far each client's vote on a class is from the coordinate-wise median of all votes on it.

    [M, C] float64, Euclidean, in multiples of the class's median distance; NaN where a client has
    no vote or fewer than `MIN_CLIENTS_FOR_MEDIAN` have.
    """
    classes = 0
    for prototypes in sets:
        if len(prototypes):
            classes = max(classes, 1 + int(prototypes.labels.max()))

    distances_MC = torch.full((len(sets), classes), torch.nan, dtype=torch.float64)
    for label in range(classes):
        holders = [client for client, prototypes in enumerate(sets) if label in prototypes.labels]
        if len(holders) < MIN_CLIENTS_FOR_MEDIAN:
            continue
        votes = []
        for client in holders:
            own_means = sets[client].means[sets[client].labels == label]
            votes.append(own_means.double().mean(0))
        votes_ND = torch.stack(votes)
        median_D = trimmed_mean(votes_ND, MEDIAN.dropped_at_each_end(len(holders)))
        distances_N = (votes_ND - median_D).norm(dim=1)
        usual = distances_N.median().clamp_min(torch.finfo(torch.float64).tiny)
        distances_MC[holders, label] = distances_N / usual
    return distances_MC


def clip_updates(sets: Sequence[State], received: Sequence[State], ratio: float) -> list[State]:
    """Return the clients' weights w_i, with each update w_i − w cut to the length M.

    ``received`` has the w that each client started from. Sun et al. leave M to the user; here it is
    ``ratio`` times the median length of this round's updates. Nothing is cut where fewer than
    `MIN_CLIENTS_FOR_MEDIAN` lengths are left by `lengths_for_median`: so few do not say what is
    usual.
    """
    lengths = [length_of_change(w_i, w) for w_i, w in zip(sets, received, strict=True)]
    usual = lengths_for_median(lengths)
    if len(usual) < MIN_CLIENTS_FOR_MEDIAN:
        return list(sets)
    longest = ratio * statistics.median_low(usual)

    clipped: list[State] = []
    for w_i, w, length in zip(sets, received, lengths, strict=True):
        clipped.append(w_i if length <= longest else _between(w, w_i, longest / length))
    return clipped


def lengths_for_median(lengths: Sequence[float]) -> Sequence[float]:
    """Return the lengths whose median says what is usual.

    These are all, but without zeros where half of them or more are 0.
    """
    if statistics.median_low(lengths):
        return lengths
    return [length for length in lengths if length]


def joint_norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all numbers together but whole ones, such as of positions."""
    square = 0.0
    for tensor in tensors:
        if tensor.is_floating_point():
            square += float(tensor.double().square().sum())
    return math.sqrt(square)


def length_of_change(end: State, start: State) -> float:
    """Return how far ``end`` is from ``start``, whole numbers aside."""
    return joint_norm(
        value.double() - start[name].double()
        for name, value in end.items()
        if value.is_floating_point()
    )


def _between(start: State, end: State, part: float) -> dict[str, Tensor]:
    """start + ``part`` · (end − start); whole numbers as in ``end``."""
    state = {}
    for name, value in end.items():
        if value.is_floating_point():
            value = start[name].double().lerp(value.double(), part).to(value.dtype)
        state[name] = value
    return state


def trimmed_mean(values_ND: Tensor, k: int) -> Tensor:
    """Return the trimmed mean [D] float64 over clients, (1 / (n − 2k)) Σ_{k < i ≤ n − k} x_(i).

    x_(1) ≤ … ≤ x_(n) are the values of one coordinate in ascending order.
    """
    ordered = values_ND.double().sort(dim=0).values
    return ordered[k : len(ordered) - k].mean(dim=0)

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from protofl_common.maths.low_rank import State
from protofl_common.maths.prototypes import Prototypes

# clients from which on their median tells what is usual, and can outvote one of them
MIN_CLIENTS_FOR_MEDIAN = 3
# of a layer, to be sorted together
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
        """Merge at least one set of prototypes into one prototype per class, in order of labels.

        A class that nobody sent keeps the prototype that it has in ``previous``. ``weighting`` and
        ``factors`` are those of `merge_by_class`; a median and a trimmed mean ignore them.
        """
        if self.merging == "mean":
            merged = merge_by_class(sets, weighting, factors)
        else:  # a median too is a trimmed mean: of the one or two in the middle
            merged = _merged_by(self._middle, sets)

        if previous is None:
            return merged
        completed = merged.completed_by(previous)
        rows_by_label = completed.labels.argsort()
        return completed.only(rows_by_label)

    def merge_weights(self, sets: Sequence[State], shares: Sequence[float]) -> dict[str, Tensor]:
        """Merge the clients' weights in float64; tensors of whole numbers are rounded.

        The mean is Σ_i share_i · w_i; a median and a trimmed mean ignore ``shares``.
        """
        merged = {}
        for name, first in sets[0].items():
            values = [weights[name] for weights in sets]
            if self.merging == "mean":
                mean = torch.zeros_like(first, dtype=torch.float64)
                for value, share in zip(values, shares, strict=True):
                    mean += value.double() * share
            else:
                # piece by piece: a large layer of many clients, sorted at once, takes gigabytes
                pieces_of_clients = [value.flatten().split(COORDINATES_AT_ONCE) for value in values]
                means = []
                for pieces in zip(*pieces_of_clients, strict=True):
                    means.append(self._middle(torch.stack(pieces)))
                mean = torch.cat(means).reshape(first.shape)
            if not first.is_floating_point():
                mean = mean.round()
            merged[name] = mean.to(first.dtype)
        return merged

    def without_outliers(self, sets: Sequence[Prototypes]) -> list[Prototypes]:
        """Return the clients' prototypes without those of the clients that are least like the rest.

        For servers that train on prototypes or cluster them; where ``merging`` is a mean, nothing
        is removed. A client has one vote on a class: the mean of its prototypes. A client's
        deviation is the mean over its classes of how far its vote is from the others'
        (`_distances_from_median`): a single class would not show who sends prototypes under wrong
        labels. Of the n clients that have a class, the `dropped_at_each_end` (n) with the largest
        deviations lose their prototypes of it.
        """
        if self.merging == "mean":
            return list(sets)
        labels_C = Prototypes.joined(sets).labels.unique()
        distances_MC = _distances_from_median(sets, labels_C)
        deviations_M = distances_MC.nanmean(dim=1)
        kept = [torch.ones(len(prototypes), dtype=torch.bool) for prototypes in sets]
        for label, distances_M in zip(labels_C, distances_MC.T, strict=True):
            # nobody, where too few clients have the class to compare them
            holders = torch.nonzero(~distances_M.isnan()).flatten()
            largest_last = holders[deviations_M[holders].argsort(stable=True)]
            first_dropped = len(holders) - self.dropped_at_each_end(len(holders))
            for client in largest_last[first_dropped:].tolist():
                kept[client] &= sets[client].labels != label
        return [prototypes.only(rows) for prototypes, rows in zip(sets, kept, strict=True)]

    def _middle(self, values_ND: Tensor) -> Tensor:
        return trimmed_mean(values_ND, self.dropped_at_each_end(len(values_ND)))

    def dropped_at_each_end(self, n: int) -> int:
        """Return how many of n sorted values are left out at each end before their mean is taken.

        Of a median (Definition 1) these are all but the one or two in the middle. Of a trimmed mean
        (Definition 2) they are ⌈βn⌉ if β = ``trim`` is a part, below 1, else β; at least one value
        stays.
        """
        most = (n - 1) // 2
        if self.merging == "median":
            return most
        wanted = self.trim * n if self.trim < 1 else self.trim
        # rounded first: 0.07 of 100 is a little more than 7 in floating point
        return min(most, math.ceil(round(wanted, 9)))


MEAN = Aggregator()
MEDIAN = Aggregator("median")


def merge_by_class(
    sets: Sequence[Prototypes], weighting: str, factors: Sequence[float] = ()
) -> Prototypes:
    """Average each class's prototypes over the clients that have the class (FedProto Eq. 4).

    There is a set for each client; at least one of them has a prototype. ``weighting`` is
    ``"counts"``, by the samples behind each prototype, which gives the mean over all clients'
    samples of the class, or ``"uniform"``: every prototype weighs the same. ``factors`` multiply
    the weights of the sets' prototypes, one for each set; () stands for ones. ValueError if counts
    are wanted and a set has none.
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

    A class's prototypes p_i become Σ_i a_i p_i with a = softmax_i(Σ_j cos(p_i, p_j) /
    ``temperature``). At least one set has a prototype.
    """

    def fused(means_ND: Tensor) -> Tensor:
        units_ND = normalize(means_ND)
        likeness_N = (units_ND @ units_ND.T).sum(dim=1)
        weights_N = torch.softmax(likeness_N / temperature, dim=0)
        return weights_N @ means_ND

    return _merged_by(fused, sets)


def _merged_by(merge: Callable[[Tensor], Tensor], sets: Sequence[Prototypes]) -> Prototypes:
    """Merge each class's prototypes by a function: [n, D] float64, of all sets -> [D]."""
    joined = Prototypes.joined(sets)
    labels_C = joined.labels.unique()
    means = [merge(joined.means[joined.labels == label].double()) for label in labels_C]
    return Prototypes(torch.stack(means).float(), labels_C)


def _distances_from_median(sets: Sequence[Prototypes], labels_C: Tensor) -> Tensor:
    """Return how far each client's vote on a class is from the other clients', [M, C] float64.

    A vote is the mean of the client's prototypes of the class. Its distance is the Euclidean one
    from the coordinate-wise median of all votes on the class, in multiples of the median of these
    distances. NaN where a client has no vote, or fewer than `MIN_CLIENTS_FOR_MEDIAN` have.
    """
    distances_MC = torch.full((len(sets), len(labels_C)), torch.nan, dtype=torch.float64)
    for column, label in enumerate(labels_C):
        votes = {}  # number of a client -> its vote
        for client, prototypes in enumerate(sets):
            own_means = prototypes.means[prototypes.labels == label]
            if len(own_means):
                votes[client] = own_means.double().mean(0)
        if len(votes) < MIN_CLIENTS_FOR_MEDIAN:
            continue
        votes_ND = torch.stack([*votes.values()])
        distances_N = (votes_ND - MEDIAN._middle(votes_ND)).norm(dim=1)
        # tiny in the place of 0, by which it would be divided: the median is 0 where most votes are
        # equal
        median_distance = distances_N.median().clamp_min(torch.finfo(torch.float64).tiny)
        distances_MC[[*votes], column] = distances_N / median_distance
    return distances_MC


def clip_updates(sets: Sequence[State], received: Sequence[State], ratio: float) -> list[State]:
    """Return the clients' weights w_i, with each update w_i − w cut to the length M.

    ``received`` has the w that each client started from. Sun et al. leave M to the user; here it is
    ``ratio`` times the median length of this round's updates. Nothing is cut where
    `lengths_for_median` leaves fewer than `MIN_CLIENTS_FOR_MEDIAN` of them: the median of so few
    could be that of a hostile client.
    """
    lengths = [length_of_change(w_i, w) for w_i, w in zip(sets, received, strict=True)]
    compared = lengths_for_median(lengths)
    if len(compared) < MIN_CLIENTS_FOR_MEDIAN:
        return list(sets)
    longest = ratio * statistics.median_low(compared)

    clipped: list[State] = []
    for w_i, w, length in zip(sets, received, lengths, strict=True):
        clipped.append(w_i if length <= longest else _between(w, w_i, longest / length))
    return clipped


def lengths_for_median(lengths: Sequence[float]) -> Sequence[float]:
    """Return those lengths of clients' updates whose median shall stand for an honest client's.

    These are all lengths, unless the lower median of all is 0, as where half of the clients changed
    nothing: then those above 0.
    """
    if statistics.median_low(lengths):
        return lengths
    return [length for length in lengths if length]


def joint_norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all numbers of the tensors together.

    Tensors of whole numbers, such as positions, are left out.
    """
    square = 0.0
    for tensor in tensors:
        if tensor.is_floating_point():
            square += float(tensor.double().square().sum())
    return math.sqrt(square)


def length_of_change(end: State, start: State) -> float:
    """Return the Euclidean distance of two models' weights; whole numbers are left out."""
    return joint_norm(
        value.double() - start[name].double()
        for name, value in end.items()
        if value.is_floating_point()
    )


def _between(start: State, end: State, part: float) -> dict[str, Tensor]:
    """Return start + ``part`` · (end − start); tensors of whole numbers as in ``end``."""
    state = {}
    for name, value in end.items():
        if value.is_floating_point():
            value = start[name].double().lerp(value.double(), part).to(value.dtype)
        state[name] = value
    return state


def trimmed_mean(values_ND: Tensor, k: int) -> Tensor:
    """Return the trimmed mean [D] float64 of n vectors, each coordinate on its own.

    It is (1 / (n − 2k)) Σ_{k < i ≤ n − k} x_(i), where x_(1) ≤ … ≤ x_(n) are the n values of the
    coordinate: ``k`` are left out at each end.
    """
    ordered = values_ND.double().sort(dim=0).values
    return ordered[k : len(ordered) - k].mean(dim=0)

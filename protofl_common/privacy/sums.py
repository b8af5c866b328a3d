"""An upload as a vector of fixed length whose sum is all that a server which averages needs.

    n                           training samples
    of `Weights`                n · w of every array
    of `Vectors`  [C, W + 1]    k · mean and k of every class, zeros for classes that it has not;
                                k is the number of samples where counts are declared, else 1
    of `Counts`   [C]           as they are

So neither n, nor counts, nor which classes a client has show. A figure f of a report, of n samples,
adds n · f and n: the server learns Σ n · f / Σ n. Numbers travel as whole multiples of 1 / scale,
mod 2^64. The bounds hold at the client only: the server never sees a single vector, and can only
refuse sums that no honest clients can have. A client one of whose numbers is not finite has no
vector (`NotFinite`): it must not be counted among those whose sum hides a single one.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from protofl_common.wire.payloads import (
    MAX_ADDEND,
    MAX_WEIGHT,
    Payload,
    codec_of,
    pack_payload,
    unpack_payload,
)
from protofl_common.wire.records import ROUNDING, Report, is_share, report_names
from protofl_common.wire.schema import Declared, Limits, RefusedMessage, Weights

Means = dict[str, dict[str, float]]
"""``correct``, ``metrics``, ``losses``, ``validation`` -> means over all samples, by name."""
MASKED: Declared = {"masked": Weights()}  # what is sent instead: one array, ``sum``


class NotFinite(ValueError):
    """A number that would be summed is NaN or infinity."""


def sum_after(number: int, rounds: int) -> int:
    """Return the number of the secure sum that follows another; 0 after the last one.

    The sum of round r has the number 2 r. That of the final evaluation, which is after the last of
    ``rounds``, or after round r in a run that stops early, has 2 r + 1.
    """
    is_final = number % 2 == 1
    if is_final:
        return 0
    is_last_round = number >= 2 * rounds
    return number + (1 if is_last_round else 2)


def scale(clients: int) -> float:
    """Return the factor that numbers are multiplied by before they are rounded to 64-bit integers.

    It is so small that no sum over so many ``clients`` of weights times numbers overflows, and a
    power of two, which keeps counts exact.
    """
    bits = 62 - math.ceil(math.log2(clients))  # of an int64's 63 one is spare
    return 2.0**bits / (MAX_WEIGHT * MAX_ADDEND)


def length(declared: Declared, limits: Limits) -> int:
    """Return how many numbers the vector of an upload has: n, and the arrays of all entries."""
    total = 1
    for name, entry in declared.items():
        shapes = codec_of(name, entry, limits).summed().values()
        total += sum(map(math.prod, shapes))
    return total


def to_sums(
    payload: Payload,
    declared: Declared,
    limits: Limits,
    samples: int,
    clients: int,
    step: float = 0.0,
) -> np.ndarray:
    """Turn the upload of a client with ``samples`` training samples into a vector [L] uint64.

    `to_whole` says what ``step`` is. NotFinite for NaN or infinity.
    """
    n = min(samples, MAX_WEIGHT)
    parts = [np.array([n], dtype=np.float64)]
    for name, entry in declared.items():
        addends = codec_of(name, entry, limits).addends(payload.entries[name], n)
        parts += [addend.flatten().numpy() for addend in addends]
    return to_whole(np.concatenate(parts), clients, step)


def to_whole(numbers: NDArray[np.float64], clients: int, step: float = 0.0) -> NDArray[np.uint64]:
    """Turn the numbers of one client into integers mod 2^64 whose sum over ``clients`` is exact.

    Negative ones are in two's complement, as `from_whole` reads them. Where clients share noise,
    all numbers are meant to be whole multiples of its ``step``, a power of two, and are rounded to
    that: n · w of a large mean w is a little off, and no noise would hide in the sum by how much.
    NotFinite for NaN or infinity.
    """
    if not np.isfinite(numbers).all():
        raise NotFinite("NaN or infinity, or a weight beyond 65,536, in what would be sent")
    if step:
        numbers = np.rint(numbers / step) * step
    return np.rint(numbers * scale(clients)).astype(np.int64).view(np.uint64)


def from_whole(sums: NDArray[np.uint64], clients: int) -> NDArray[np.float64]:
    """Turn sums over ``clients`` of what `to_whole` returned back into numbers."""
    return sums.view(np.int64).astype(np.float64) / scale(clients)


def from_sums(
    sums: np.ndarray, declared: Declared, limits: Limits, clients: int
) -> tuple[Payload, int]:
    """Return the mean of all uploads, and how many samples they have, from their ``sums`` [L].

    ``sums`` adds up what `to_sums` returned for each of at most ``clients`` clients. RefusedMessage
    for sums that no honest clients can have.
    """
    numbers = torch.from_numpy(from_whole(sums, clients))
    n = float(numbers[0])  # first in every vector of `to_sums`; the arrays of each entry follow
    is_whole = n % 1 == 0
    if not 1 <= n <= clients * MAX_WEIGHT or not is_whole:
        raise RefusedMessage(f"sums of {n:g} training samples")
    means = {}
    start = 1
    for name, entry in declared.items():
        codec = codec_of(name, entry, limits)
        arrays = {}
        for key, shape in codec.summed().items():
            size = math.prod(shape)
            arrays[key] = numbers[start : start + size].reshape(shape)
            start += size
        means[name] = codec.mean(arrays, n, clients)
    # The mean must pass the checks of a single upload, so it goes through the same reader. Noise on
    # it may be as large as on the upload of a client with the average number of samples
    limits = replace(limits, samples=n / clients)
    packed = pack_payload(Payload(**means), declared)
    mean = unpack_payload(packed, declared, limits, required=False)
    return mean, round(n)


def figure_names(losses: Collection[str], metrics: Collection[str]) -> tuple[str, ...]:
    """Return the names of all figures that are summed, such as ``correct.head``, in their order.

    Those are all that a report may hold, with these names of losses and metrics, but for seconds.
    """
    figures = []
    for group, names in report_names(losses, metrics).items():
        if group != "seconds":  # they stay in the clear (`without_figures`)
            figures += [f"{group}.{name}" for name in names]
    return tuple(sorted(figures))


def weighted_figures(
    report: Report, train_samples: int, names: Sequence[str]
) -> NDArray[np.float64]:
    """Return n · f and n of each figure f that is named, one after another, [2 F].

    A figure's name is "group.key", such as "losses.prototype". n is the number of samples behind
    it: training samples for ``losses``, validation samples for ``validation``, else test samples.
    Of the group ``correct``, n · f is the number of right predictions. A figure that this report
    lacks has zeros. Both are cut to the bounds of sums here, because the server sees only their
    sums. NotFinite for NaN or infinity.
    """
    samples = {"losses": train_samples, "validation": report.validation_samples}
    addends: list[float] = []
    for name in names:
        group, _, key = name.partition(".")
        figures = getattr(report, group)
        if key not in figures:
            addends += [0.0, 0.0]
            continue
        if not math.isfinite(figures[key]):
            raise NotFinite(f"{name} is {figures[key]}")
        n = min(samples.get(group, report.test_samples), MAX_WEIGHT)
        if group == "correct":  # the figure is a number of samples already, and n may be cut
            total = np.rint(n * (figures[key] / max(1, report.test_samples)))
        else:
            total = n * np.clip(figures[key], -MAX_ADDEND, MAX_ADDEND)
        addends += [total, n]
    return np.array(addends, dtype=np.float64)


def without_figures(report: Report) -> Report:
    """Return the part of the report that stays in the clear: the round, and how long it took."""
    return Report(report.round, 0, 0, seconds=report.seconds)


def means_of(sums: NDArray[np.float64], names: Sequence[str], noisy: bool = False) -> Means:
    """Return the mean of each figure from sums [2 F] of what `weighted_figures` returned.

    A figure that no site has is left out. Of ``noisy`` sums shares are cut to [0, 1], else one
    outside is refused: RefusedMessage for all that no honest sites can have.
    """
    means: Means = {"correct": {}, "metrics": {}, "losses": {}, "validation": {}}
    for name, (total, n) in zip(names, sums.reshape(-1, 2).tolist(), strict=True):
        group, _, key = name.partition(".")
        # numbers of samples, and sums of right predictions, are whole with noise, too
        is_count = n >= 0 and n == round(n)
        is_sum_of_nobody = n == 0 and total != 0
        is_possible = is_count and not is_sum_of_nobody
        if group == "correct":
            is_possible = is_possible and total == round(total)
        if not is_possible:
            raise RefusedMessage(f"a sum of {total:g} over {n:g} samples for {name}")
        if not n:
            continue
        mean = total / n
        if noisy and group != "losses" and is_share(key):
            mean = min(max(mean, 0.0), 1.0)
        if group != "losses" and is_share(key) and not 0 <= mean <= 1 + ROUNDING:
            raise RefusedMessage(f"{name} of {mean:g}, outside of 0 to 1")
        means[group][key] = mean
    return means

"""An upload as a vector of fixed length whose sum over the clients is all that a server which averages needs.

    n, 1                        training samples; zeros in the whole vector instead where a number is not finite
    of `Weights`                n · w of every array
    of `Vectors`  [C, W + 1]    k · mean and k of every class, zeros for classes that the client does not hold; k is the
                                number of samples where counts are declared, else 1
    of `Counts`   [C]           as they are

So neither n, nor counts, nor which classes a client has show. A figure f of a report, of n samples, adds n · f and n:
the server learns Σ n · f / Σ n. Numbers travel as whole multiples of 1 / scale, mod 2^64. The bounds hold at the client
only: the server never sees a single vector, and can only refuse sums that no honest clients can have.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from protofl_common.wire.payloads import LARGEST, MOST_SAMPLES, Payload, codec_of, pack_payload, unpack_payload
from protofl_common.wire.records import ROUNDING, Report, is_share, report_names
from protofl_common.wire.schema import Declared, Limits, RefusedMessage, Weights

Means = dict[str, dict[str, float]]  # ``correct``, ``metrics``, ``losses``, ``validation`` -> means over all samples
MASKED: Declared = {"masked": Weights()}  # what is sent instead: one array, ``sum``


def sum_after(number: int, rounds: int) -> int:
    """Return the sum that follows another, 0 after the last: 2 r is round r's, 2 r + 1 the final evaluation's after it.

    A run that stops early has its final evaluation instead.
    """
    if number % 2:
        return 0
    return number + (2 if number < 2 * rounds else 1)


def scale(clients: int) -> float:
    """Steps per 1, so many that the sum over ``clients`` cannot overflow: a power of two, so that counts are exact."""
    return 2.0 ** (62 - math.ceil(math.log2(clients))) / (MOST_SAMPLES * LARGEST)


def length(declared: Declared, limits: Limits) -> int:
    codecs = [codec_of(name, entry, limits) for name, entry in declared.items()]
    return 2 + sum(math.prod(shape) for codec in codecs for shape in codec.summed().values())


def to_sums(payload: Payload, declared: Declared, limits: Limits, samples: int, clients: int) -> np.ndarray:
    """The upload of a client with ``samples`` training samples as a vector [L] uint64; zeros where it is not finite."""
    n = min(samples, MOST_SAMPLES)
    parts = [np.array([n, 1], dtype=np.float64)]
    for name, entry in declared.items():
        addends = codec_of(name, entry, limits).addends(payload.entries[name], n)
        parts += [addend.flatten().numpy() for addend in addends]
    numbers = np.concatenate(parts)
    return to_whole(numbers if np.isfinite(numbers).all() else np.zeros_like(numbers), clients)


def to_whole(numbers: NDArray[np.float64], clients: int) -> NDArray[np.uint64]:
    """Numbers of one of ``clients`` as whole ones, which can be added."""
    if not np.isfinite(numbers).all():
        raise ValueError("NaN or infinity in what would be sent")
    return np.rint(numbers * scale(clients)).astype(np.int64).view(np.uint64)


def from_whole(sums: NDArray[np.uint64], clients: int) -> NDArray[np.float64]:
    return sums.view(np.int64).astype(np.float64) / scale(clients)


def from_sums(sums: np.ndarray, declared: Declared, limits: Limits, clients: int) -> tuple[Payload, int, int]:
    """The mean of all uploads, Σ n, and how many were finite, of ``sums`` [L]; RefusedMessage for impossible ones."""
    numbers = torch.from_numpy(from_whole(sums, clients))
    n, finite, start = float(numbers[0]), float(numbers[1]), 2
    if not 1 <= n <= clients * MOST_SAMPLES or not 1 <= finite <= clients or n % 1 or finite % 1:
        raise RefusedMessage(f"sums of {n:g} training samples of {finite:g} sites (0: none finite; try a smaller lr)")
    means = {}
    for name, entry in declared.items():
        arrays, codec = dict[str, torch.Tensor](), codec_of(name, entry, limits)
        for key, shape in codec.summed().items():
            size = math.prod(shape)
            arrays[key], start = numbers[start : start + size].reshape(shape), start + size
        means[name] = codec.mean(arrays, n, clients)
    limits = replace(limits, samples=n / clients)  # as much noise as the average client's, at most
    mean = unpack_payload(pack_payload(Payload(**means), declared), declared, limits, required=False)
    return mean, round(n), round(finite)


def figure_names(losses: Collection[str], metrics: Collection[str]) -> tuple[str, ...]:
    """``correct.head`` …: all figures that a report may hold, in the order in which they are summed."""
    groups = report_names(losses, metrics)
    return tuple(sorted(f"{group}.{name}" for group in groups.keys() - {"seconds"} for name in groups[group]))


def weighted_figures(report: Report, train_samples: int, names: Sequence[str]) -> NDArray[np.float64]:
    """n · f and n of each figure [2 F], zeros for a figure that this site does not have; bounded like an upload."""
    samples = {"losses": train_samples, "validation": report.validation_samples}
    addends = []
    for name in names:
        group, _, key = name.partition(".")
        figures, n = getattr(report, group), min(samples.get(group, report.test_samples), MOST_SAMPLES)
        share = figures.get(key, math.nan) / (max(1, report.test_samples) if group == "correct" else 1)
        total = n * np.clip(share, -LARGEST, LARGEST)
        addends += [np.rint(total) if group == "correct" else total, n] if math.isfinite(share) else [0.0, 0.0]
    return np.array(addends, dtype=np.float64)


def without_figures(report: Report) -> Report:
    """Return the part of the report that stays in the clear: the round, and how long it took."""
    return Report(report.round, 0, 0, seconds=report.seconds)


def means_of(sums: NDArray[np.float64], names: Sequence[str]) -> Means:
    """The means of the sums [2 F]; RefusedMessage where no honest sites can have such sums."""
    means: Means = {"correct": {}, "metrics": {}, "losses": {}, "validation": {}}
    for name, (total, n) in zip(names, sums.reshape(-1, 2).tolist(), strict=True):
        group, _, key = name.partition(".")
        if n < 0 or n != round(n) or (total and not n) or (group == "correct" and total != round(total)):
            raise RefusedMessage(f"a sum of {total:g} over {n:g} samples for {name}")
        if n and group != "losses" and is_share(key) and not 0 <= total / n <= 1 + ROUNDING:
            raise RefusedMessage(f"{name} of {total / n:g}, outside of 0 to 1")
        if n:
            means[group][key] = total / n
    return means

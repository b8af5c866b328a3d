"""An upload as a vector of fixed length whose sum over the clients is all that a server which averages needs.

    n                           training samples
    of `Weights`                n · w of every array
    of `Vectors`  [C, W + 1]    k · mean and k of every class, zeros for classes that the client does not hold; k is the
                                number of samples where counts are declared, else 1
    of `Counts`   [C]           as they are

So neither n, nor counts, nor which classes a client holds show. Numbers travel as whole multiples of 1 / scale, mod
2^64. The bounds hold at the client only: the server never sees a single vector, and can only refuse sums that no honest
clients can have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.limits import Limits, RefusedMessage
from protofl_common.wire.payloads import Payload, StateDict, Value, pack_payload, unpack_payload
from protofl_common.wire.schema import Counts, Declared, Entry, Vectors, Weights

MOST_SAMPLES, LARGEST = 2.0**20, 2.0**16
"""As how many samples a client, or a class of it, may weigh; the magnitude of a number of its model or prototypes.
What is beyond is cut."""
MASKED: Declared = {"masked": Weights()}
"""What is sent instead: one array, ``sum``."""


def scale(clients: int) -> float:
    """Steps per 1, so many that the sum over ``clients`` cannot overflow: a power of two, so that counts are exact."""
    return 2.0 ** (62 - math.ceil(math.log2(clients))) / (MOST_SAMPLES * LARGEST)


def with_masked(limits: Limits, size: int) -> Limits:
    """The limits of a masked vector [``size``]."""
    return replace(limits, weights={"masked": {"sum": ("int64", (size,))}})


def length(declared: Declared, limits: Limits) -> int:
    """L, the numbers of a vector."""
    return 1 + sum(sum(math.prod(shape) for _, shape in _arrays(name, one, limits)) for name, one in declared.items())


def to_sums(payload: Payload, declared: Declared, limits: Limits, samples: int, clients: int) -> np.ndarray:
    """The upload of a client with ``samples`` training samples as a vector [L] uint64."""
    n = min(samples, MOST_SAMPLES)
    parts = [np.array([n], dtype=np.float64)]
    for name, entry in declared.items():
        parts += _addends(payload.entries[name], name, entry, limits, n)
    return to_whole(np.concatenate(parts), clients)


def to_whole(numbers: NDArray[np.float64], clients: int) -> NDArray[np.uint64]:
    """Numbers of one of ``clients`` as whole ones, which can be added."""
    if not np.isfinite(numbers).all():
        raise ValueError("NaN or infinity in what would be sent")
    return np.rint(numbers * scale(clients)).astype(np.int64).view(np.uint64)


def from_whole(sums: NDArray[np.uint64], clients: int) -> NDArray[np.float64]:
    """The sums of what `to_whole` has made."""
    return sums.view(np.int64).astype(np.float64) / scale(clients)


def from_sums(sums: np.ndarray, declared: Declared, limits: Limits, clients: int) -> tuple[Payload, int]:
    """The mean of all uploads in the form of one, and the sum of n; ``sums`` [L] uint64.

    RefusedMessage where no honest clients can have such sums.
    """
    numbers = torch.from_numpy(from_whole(sums, clients))
    n, start = float(numbers[0]), 1
    if not 1 <= n <= clients * MOST_SAMPLES or n != round(n):
        raise RefusedMessage(f"sums of {n:g} training samples")
    found: dict[str, Value | None] = {}
    for name, entry in declared.items():
        arrays: StateDict = {}
        for key, shape in _arrays(name, entry, limits):
            size = math.prod(shape)
            arrays[key], start = numbers[start : start + size].reshape(shape), start + size
        found[name] = _mean(arrays, name, entry, limits, n, clients)
    return unpack_payload(pack_payload(Payload(**found), declared), declared, limits, required=False), round(n)


def _arrays(name: str, entry: Entry, limits: Limits) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what an entry adds to the vector."""
    if isinstance(entry, Weights):
        yield from ((key, shape) for key, (_, shape) in sorted(limits.weights[name].items()))
    elif isinstance(entry, Vectors):
        yield "", (limits.num_classes, limits.width(entry) + 1)
    else:
        yield "", (limits.num_classes,)


def _addends(value: Any, name: str, entry: Entry, limits: Limits, n: float) -> Iterator[np.ndarray]:
    """The part of the vector that an entry is, bounded."""
    if isinstance(entry, Weights):
        for key in sorted(limits.weights[name]):
            yield n * value[key].detach().cpu().double().clamp(-LARGEST, LARGEST).flatten().numpy()
    elif isinstance(entry, Vectors):
        means_PW = value.means.double().renorm(2, 0, 0.999999 * limits.max_norm).clamp(-LARGEST, LARGEST)
        k_P = torch.ones(len(value)) if value.counts is None else value.counts.clamp(max=int(MOST_SAMPLES))
        table = torch.zeros(limits.num_classes, limits.width(entry) + 1, dtype=torch.float64)
        table[value.labels] = k_P.double()[:, None] * torch.cat([means_PW, torch.ones(len(value), 1)], dim=1)
        yield table.flatten().numpy()
    else:
        yield value.double().clamp(max=MOST_SAMPLES).numpy()


def _mean(
    arrays: Mapping[str, Tensor], name: str, entry: Entry, limits: Limits, n: float, clients: int
) -> Value | None:
    """The entry of all clients together; None for vectors of no class."""
    if isinstance(entry, Weights):
        dtypes = {key: getattr(torch, dtype) for key, (dtype, _) in limits.weights[name].items()}
        means = {key: arrays[key] / n for key in dtypes}
        return {
            key: (one if dtypes[key].is_floating_point else one.round()).to(dtypes[key]) for key, one in means.items()
        }
    if isinstance(entry, Counts):
        return arrays[""].round().long()
    sums_CW, k_C = arrays[""][:, :-1], arrays[""][:, -1]
    labels = (k_C != 0).nonzero().flatten()
    if not len(labels):
        return None
    means_PW, k_P = sums_CW[labels] / k_C[labels, None], k_C[labels]
    counted = isinstance(entry, Vectors) and entry.counts
    if bool((k_P < 1).any()):
        raise RefusedMessage(f"{name} of less than one sample of a class")
    if not counted and (bool((k_P > clients).any()) or bool((k_P != k_P.round()).any())):
        raise RefusedMessage(f"{name} of a class from more than {clients} sites, or from a part of one")
    counts = k_P.round().long() if counted else None
    return Prototypes(means_PW.float(), labels, counts)

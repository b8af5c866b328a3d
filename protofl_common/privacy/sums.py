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
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from protofl_common.wire.limits import Limits, RefusedMessage
from protofl_common.wire.payloads import (
    LARGEST,
    MOST_SAMPLES,
    Payload,
    Value,
    codec_of,
    pack_payload,
    unpack_payload,
)
from protofl_common.wire.schema import Declared, Weights

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
    codecs = [codec_of(name, entry, limits) for name, entry in declared.items()]
    return 1 + sum(math.prod(shape) for codec in codecs for shape in codec.summed().values())


def to_sums(payload: Payload, declared: Declared, limits: Limits, samples: int, clients: int) -> np.ndarray:
    """The upload of a client with ``samples`` training samples as a vector [L] uint64."""
    n = min(samples, MOST_SAMPLES)
    parts = [np.array([n], dtype=np.float64)]
    for name, entry in declared.items():
        addends = codec_of(name, entry, limits).addends(payload.entries[name], n)
        parts += [addend.flatten().numpy() for addend in addends]
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
    means: dict[str, Value | None] = {}
    for name, entry in declared.items():
        arrays, codec = dict[str, torch.Tensor](), codec_of(name, entry, limits)
        for key, shape in codec.summed().items():
            size = math.prod(shape)
            arrays[key], start = numbers[start : start + size].reshape(shape), start + size
        means[name] = codec.mean(arrays, n, clients)
    return unpack_payload(pack_payload(Payload(**means), declared), declared, limits, required=False), round(n)

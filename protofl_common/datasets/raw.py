"""What every source of data delivers, and the error that every step from file to client raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Inputs = NDArray[Any]
Images = NDArray[np.uint8]
Ints = NDArray[np.int64]

VALIDATION = 2


class DataError(ValueError):
    """Data cannot be read or divided as asked; the message names the key, the value and what would be right."""


@dataclass(frozen=True)
class RawData:
    """A whole data set, decoded.

    Attributes
    ----------
    inputs
        uint8 [N, channels, H, W]: images; float32 [N, …]: numbers (a table [N, features], a signal [N, channels,
        steps]), standardised along their second axis; int64 [N, length]: tokens, given to models as they are.
    labels
        int64 [N], indices into ``classes``.
    domains
        int64 [N], indices into ``domain_names``; all 0 when the data have no domains.
    official
        uint8 [N]: 1 for the samples of the official test part, `VALIDATION` (2) for those of a validation part that the
        data name, 0 for all others.
    classes, domain_names
        Names in the order of the indices; ``domain_names`` is empty when the data have no domains.
    """

    inputs: Inputs
    labels: Ints
    domains: Ints
    official: Images
    classes: tuple[str, ...]
    domain_names: tuple[str, ...] = ()


def without_domains(inputs: Inputs, labels: Ints, official: Images, classes: tuple[str, ...]) -> RawData:
    """Raw data of one kind only; labels of any integer type are made int64."""
    labels = np.asarray(labels, dtype=np.int64)
    return RawData(np.ascontiguousarray(inputs), labels, np.zeros_like(labels), official, classes)

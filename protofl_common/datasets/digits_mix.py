"""``digit-mix``: MNIST, USPS and three embedded looks, in the place of Digit-5's five kinds of digits.

The looks are made after the sets that Digit-5 has beside these two: photographs behind the digit (MNIST-M), noise
(SynthDigits), coloured numbers with neighbours (SVHN).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.datasets import digits_domains, torchvision_sets
from protofl_common.datasets.inputs import resized
from protofl_common.datasets.raw import Images, Ints, RawData

REAL = ("mnist", "usps")
LOOKS = ("photo", "inverted", "coloured")
PER_CLASS = 200
"""Images that are taken of each digit of a real set: the first ones of its training part."""


def locate(settings: DataSettings) -> tuple[Path, ...]:
    """The files of MNIST and USPS, both in ``data-dir``."""
    return tuple(path for name in REAL for path in torchvision_sets.locate(name, settings))


def read(settings: DataSettings) -> RawData:
    """All domains, `REAL` before `LOOKS`; 28×28 RGB, without an official test part."""
    parts = [_real(name, settings) for name in REAL]
    drawn = digits_domains.read(settings)
    for look in LOOKS:
        rows = drawn.domains == drawn.domain_names.index(look)
        parts.append((drawn.inputs[rows], drawn.labels[rows]))
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return RawData(
        inputs=images,
        labels=labels,
        domains=np.repeat(np.arange(len(parts)), [len(part) for _, part in parts]),
        official=np.zeros(len(labels), dtype=np.uint8),
        classes=drawn.classes,
        domain_names=REAL + LOOKS,
    )


def _real(name: str, settings: DataSettings) -> tuple[Images, Ints]:
    data = torchvision_sets.read(name, settings)
    training = np.flatnonzero(data.official == 0)
    of_each = [training[data.labels[training] == digit][:PER_CLASS] for digit in range(10)]
    rows = np.sort(np.concatenate(of_each))
    return np.repeat(resized(data.inputs[rows], 28), 3, axis=1), data.labels[rows]

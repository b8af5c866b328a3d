"""What every corpus delivers."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofl_common.data.raw import Images, Ints

SIDE = 64
"""Pixels a side."""

Pixels = NDArray[np.float32]
"""float32 [64, 64, 3] in [0, 1] (values outside are clipped at the end)."""


@dataclass(frozen=True)
class Corpus:
    """Endless images of known classes."""

    draw: Callable[[int, np.random.Generator], tuple[Pixels, tuple[int, ...]]]
    """``draw(label, rng)``: one image of class ``label``, another one at each call, and its further labels."""
    classes: tuple[int, ...]
    """Number of classes of each label, the first being what ``draw`` is asked for."""
    per_class: int  # images to draw
    flips: bool  # whether a mirrored image is of the same class
    strength: float = 1.0  # of the augmentation, 0 to 1
    lr: float = 0.1  # the highest learning rate


def drawn(corpus: Corpus, per_class: int, seed: int, part: int) -> tuple[Images, Ints]:
    """Images uint8 [N, 3, 64, 64] and labels int64 [N, len(classes)]; other images for another seed or part."""
    rng = np.random.default_rng([seed, part])
    first = np.tile(np.arange(corpus.classes[0]), per_class)
    images = np.empty((len(first), 3, SIDE, SIDE), dtype=np.uint8)
    labels = np.empty((len(first), len(corpus.classes)), dtype=np.int64)
    for row, label in enumerate(first):
        pixels, others = corpus.draw(int(label), rng)
        images[row] = np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8).transpose(2, 0, 1)
        labels[row] = label, *others
    return images, labels

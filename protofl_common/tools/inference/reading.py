"""Image files as a model wants them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from protofl_common.datasets.folders import read_image
from protofl_common.datasets.raw import Images
from protofl_common.models.trained import ModelCard


def read_images(files: Sequence[Path], card: ModelCard) -> Images:
    """uint8 [N, channels, size, size]: stretched to the model's size, and grey where it has seen grey images.

    DataError for a file that cannot be read.
    """
    colour = np.stack([read_image(file, card.input_shape[1]) for file in files])
    return colour if card.input_shape[0] == 3 else _grey(colour)


def _grey(colour: Images) -> Images:
    """[N, 3, H, W] -> [N, 1, H, W]: luma as PIL computes it (ITU-R 601-2), so that a grey file stays as it is."""
    weights = np.array([19595, 38470, 7471], dtype=np.int64)
    return np.asarray((np.tensordot(weights, colour, axes=(0, 1)) + 0x8000) >> 16, dtype=np.uint8)[:, None]

"""Files as a model wants them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from protofl_common.datasets.files import Rows, tokens
from protofl_common.datasets.folders import read_image
from protofl_common.datasets.raw import DataError, Images, Inputs
from protofl_common.models.trained import ModelCard


def read_inputs(files: Sequence[Path], card: ModelCard) -> tuple[list[str], Inputs]:
    """What each sample is called, and the inputs [N, …]: images one a file, others one a row of a file.

    DataError for a file that cannot be read, or does not have what the model takes.
    """
    if card.input_type == "uint8":
        return [str(file) for file in files], read_images(files, card)
    parts = [_rows(file, card) for file in files]
    for file, part in zip(files, parts, strict=True):
        if part.shape[1:] != card.input_shape:
            raise DataError(f"{file}: a sample is {list(part.shape[1:])}; the model takes {list(card.input_shape)}")
    names = [f"{file}:{row}" for file, part in zip(files, parts, strict=True) for row in range(len(part))]
    return names, np.concatenate(parts)


def read_images(files: Sequence[Path], card: ModelCard) -> Images:
    """uint8 [N, channels, size, size]: stretched to the model's size, and grey where it has seen grey images.

    DataError for a file that cannot be read.
    """
    colour = np.stack([read_image(file, card.input_shape[1]) for file in files])
    return colour if card.input_shape[0] == 3 else _grey(colour)


def _rows(file: Path, card: ModelCard) -> Inputs:
    """The samples of a file: ``.npy``, ``.npz`` with ``inputs``, or CSV with the columns of the training data."""
    try:
        if file.suffix == ".npy":
            array: Inputs = np.load(file, allow_pickle=False)
            return array
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                return np.asarray(arrays["inputs"])
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise DataError(f"{file} cannot be read as arrays of inputs ({error})") from error
    rows = Rows(file)
    if card.input_type == "int64":
        return tokens(rows.texts(), card.input_shape[0])
    return rows.numbers(rows.others)


def _grey(colour: Images) -> Images:
    """[N, 3, H, W] -> [N, 1, H, W]: luma as PIL computes it (ITU-R 601-2), so that a grey file stays as it is."""
    weights = np.array([19595, 38470, 7471], dtype=np.int64)
    return np.asarray((np.tensordot(weights, colour, axes=(0, 1)) + 0x8000) >> 16, dtype=np.uint8)[:, None]

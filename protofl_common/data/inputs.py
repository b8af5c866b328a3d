"""Helpers on the inputs [N, …] of a data set: images uint8 [N, channels, H, W], numbers (floating), tokens (integers).

Images are too large to be made floating point at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofl_common.data.raw import DataError, Images, Inputs, Ints

if TYPE_CHECKING:
    import torch

CHUNK = 2048
"""Images handled at a time."""
MOST_IN_MEMORY = 2**32
"""Bytes of inputs as float32; more stay on the disk (`StoredRows`)."""


class StoredRows:
    """Rows int64 [N] of a memory-mapped array [M, …]: like an array, but each index reads from the disk."""

    def __init__(self, array: Inputs, rows: Ints) -> None:
        self.array, self.rows = array, rows
        self.shape, self.dtype, self.ndim = (len(rows), *array.shape[1:]), array.dtype, array.ndim

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Inputs:
        return np.asarray(self.array[self.rows[index]])

    def __array__(self, *_: Any, **__: Any) -> Inputs:
        """All of them, in memory."""
        return self[:]


def described(inputs: Inputs) -> str:
    """Type and shape of a sample: ``"float32 [30]"``."""
    return f"{inputs.dtype} {list(inputs.shape[1:])}"


def are_images(inputs: Inputs) -> bool:
    """True for bytes of shape [N, channels, H, W]."""
    return inputs.dtype == np.uint8 and inputs.ndim == 4


def resized(images: Inputs, side: int) -> Inputs:
    """The images stretched to ``side``×``side`` pixels (bilinear, antialiased as in PIL); 0: as they are.

    DataError when the inputs are no images.
    """
    if side == 0 or (are_images(images) and images.shape[2:] == (side, side)):
        return images
    if not are_images(images):
        raise DataError(f"image-size = {side}: only images can be resized; a sample is {described(images)}; use 0")
    return np.concatenate([_stretched(images[start : start + CHUNK], side) for start in range(0, len(images), CHUNK)])


def _stretched(images: Images, side: int) -> Images:
    import torch

    floats = torch.from_numpy(np.ascontiguousarray(images)).float()
    stretched = torch.nn.functional.interpolate(floats, (side, side), mode="bilinear", antialias=True)
    return np.asarray(stretched.round().clamp(0, 255).byte().numpy())


def normalised(inputs: Inputs, mean: Sequence[float], std: Sequence[float], device: torch.device) -> torch.Tensor:
    """Inputs for models, of the same shape: float32 (x − mean) / std per channel or feature, or int64 tokens.

    Bytes are scaled to [0, 1] first. Without ``mean`` and ``std`` the inputs are tokens, which stay as they are.
    """
    import torch

    if not mean:
        return torch.from_numpy(np.asarray(inputs).astype(np.int64)).to(device)
    values = torch.from_numpy(np.array(inputs)).to(device).float()  # bytes take a quarter of the way to a GPU
    if inputs.dtype == np.uint8:
        values.div_(255)
    per_channel = (-1, *(1,) * (inputs.ndim - 2))
    return values.sub_(torch.tensor(mean, device=device).view(per_channel)).div_(
        torch.tensor(std, device=device).view(per_channel)
    )


def statistics(inputs: Inputs) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that `normalised` takes: of each channel or feature (axis 1); () for tokens."""
    if are_images(inputs):
        return channel_statistics(inputs)
    if not np.issubdtype(inputs.dtype, np.floating):
        return (), ()
    others = (0, *range(2, inputs.ndim))
    return _as_tuples(inputs.mean(axis=others, dtype=np.float64), inputs.std(axis=others, dtype=np.float64))


def channel_statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of the images scaled to [0, 1]; a deviation of 0 becomes 1."""
    counts = np.zeros((images.shape[1], 256), dtype=np.int64)
    step = max(1, 2**22 // images[0, 0].size)  # counting takes 8 bytes a pixel
    for start in range(0, len(images), step):
        for channel, count in enumerate(counts):
            count += np.bincount(images[start : start + step, channel].ravel(), minlength=256)
    values, totals = np.arange(256) / 255, counts.sum(axis=1)
    mean = counts @ values / totals
    std = np.sqrt(np.maximum(counts @ values**2 / totals - mean**2, 0))
    return _as_tuples(mean, std)


def _as_tuples(mean: NDArray[np.float64], std: NDArray[np.float64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(mean.tolist()), tuple(np.where(std > 1e-6, std, 1.0).tolist())

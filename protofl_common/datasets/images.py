"""Small helpers on image arrays uint8 [N, channels, H, W] that are too large to be made floating point at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from protofl_common.datasets.raw import Images, Ints

if TYPE_CHECKING:
    import torch

CHUNK = 2048
"""Images handled at a time."""


def resized(images: Images, side: int) -> Images:
    """The images stretched to ``side``×``side`` pixels (bilinear, antialiased as in PIL); 0: as they are."""
    if side == 0 or images.shape[2:] == (side, side):
        return images
    return np.concatenate([_stretched(images[start : start + CHUNK], side) for start in range(0, len(images), CHUNK)])


def _stretched(images: Images, side: int) -> Images:
    import torch

    floats = torch.from_numpy(np.ascontiguousarray(images)).float()
    stretched = torch.nn.functional.interpolate(floats, (side, side), mode="bilinear", antialias=True)
    return np.asarray(stretched.round().clamp(0, 255).byte().numpy())


def normalised(images: Images, mean: Sequence[float], std: Sequence[float], device: torch.device) -> torch.Tensor:
    """What models are given, float32 of the images' shape: (x/255 − mean) / std, per channel."""
    import torch

    mean_C11 = torch.tensor(mean, device=device).view(-1, 1, 1)
    std_C11 = torch.tensor(std, device=device).view(-1, 1, 1)
    return torch.from_numpy(images.astype(np.float32)).to(device).div_(255).sub_(mean_C11).div_(std_C11)


def channel_statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of the images scaled to [0, 1]; a deviation of 0 becomes 1."""
    counts = np.stack([_histogram(images[:, channel]) for channel in range(images.shape[1])])
    values, totals = np.arange(256) / 255, counts.sum(axis=1)
    mean = counts @ values / totals
    std = np.sqrt(np.maximum(counts @ values**2 / totals - mean**2, 0))
    return tuple(mean.tolist()), tuple(np.where(std > 1e-6, std, 1.0).tolist())


def _histogram(channel: Images) -> Ints:
    """int64 [256]: how often each value occurs."""
    counts = np.zeros(256, dtype=np.int64)
    for start in range(0, len(channel), CHUNK):
        counts += np.bincount(channel[start : start + CHUNK].ravel(), minlength=256)
    return counts

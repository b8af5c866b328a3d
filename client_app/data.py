"""This client's own data, as tensors on its device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protofl_common.datasets import ClientData


@dataclass(frozen=True)
class LabelledImages:
    """Normalised images [N, channels, H, W] float32 and labels [N] int64, both on the device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def to_device(images: np.ndarray, labels: np.ndarray, data: ClientData, device: torch.device) -> LabelledImages:
    """Bytes to normalised floats: (x/255 − mean) / std per channel of the data set."""
    mean = torch.tensor(data.mean, device=device).view(1, -1, 1, 1)
    std = torch.tensor(data.std, device=device).view(1, -1, 1, 1)
    pixels = torch.from_numpy(images).to(device).float()
    return LabelledImages(pixels.div_(255).sub_(mean).div_(std), torch.from_numpy(labels).to(device))

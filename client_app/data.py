"""This client's own data, as tensors on its device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protofl_common.datasets import UNLABELLED, ClientData
from protofl_common.datasets.images import normalised


@dataclass(frozen=True)
class LabelledImages:
    """Normalised images [N, channels, H, W] float32 and labels [N] int64, both on the device."""

    images: Tensor
    labels: Tensor
    unlabelled: Tensor | None = None
    """Further images [U, channels, H, W] without a label (``positive-rate`` below 1); not counted in N."""

    def __len__(self) -> int:
        return len(self.labels)

    def with_unlabelled(self) -> LabelledImages:
        """All N + U images, those without a label at the end, with the label `UNLABELLED` (-1)."""
        if self.unlabelled is None:
            return self
        nothing = self.labels.new_full((len(self.unlabelled),), UNLABELLED)
        return LabelledImages(torch.cat([self.images, self.unlabelled]), torch.cat([self.labels, nothing]))


def to_device(images: np.ndarray, labels: np.ndarray, data: ClientData, device: torch.device) -> LabelledImages:
    """Bytes to floats, normalised by the mean and deviation of the data set."""
    pixels = normalised(images, data.mean, data.std, device)
    return unlabelled_apart(pixels, torch.from_numpy(labels.astype(np.int64)).to(device))


def unlabelled_apart(images: Tensor, labels: Tensor) -> LabelledImages:
    """Images (or their features) [N + U, …] with their labels, of which those that are `UNLABELLED` stand apart."""
    known = labels != UNLABELLED
    if bool(known.all()):
        return LabelledImages(images, labels)
    return LabelledImages(images[known], labels[known], images[~known])

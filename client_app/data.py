"""This client's own data, as tensors on its device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protofl_common.datasets import UNLABELLED, ClientData
from protofl_common.datasets.inputs import normalised


@dataclass(frozen=True)
class Samples:
    """Inputs [N, …] as the model takes them and labels [N] int64, on the device.

    Inputs are normalised images or numbers, tokens, or features of frozen backbones.
    """

    inputs: Tensor
    labels: Tensor
    unlabelled: Tensor | None = None
    """Further inputs [U, …] without a label (``positive-rate`` below 1); not counted in N."""

    def __len__(self) -> int:
        return len(self.labels)

    def with_unlabelled(self) -> Samples:
        """All N + U samples, those without a label at the end, with the label `UNLABELLED` (-1)."""
        if self.unlabelled is None:
            return self
        nothing = self.labels.new_full((len(self.unlabelled),), UNLABELLED)
        return Samples(torch.cat([self.inputs, self.unlabelled]), torch.cat([self.labels, nothing]))


def to_device(inputs: np.ndarray, labels: np.ndarray, data: ClientData, device: torch.device) -> Samples:
    """Images and numbers as floats, normalised by the mean and deviation of the data set; tokens as they are."""
    values = normalised(inputs, data.mean, data.std, device)
    return unlabelled_apart(values, torch.from_numpy(labels.astype(np.int64)).to(device))


def unlabelled_apart(inputs: Tensor, labels: Tensor) -> Samples:
    """Inputs [N + U, …] with their labels, of which those that are `UNLABELLED` stand apart."""
    known = labels != UNLABELLED
    if bool(known.all()):
        return Samples(inputs, labels)
    return Samples(inputs[known], labels[known], inputs[~known])

"""This client's own data, as tensors on its device, or, where the memory is too small for that, on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from client_app.augment import Augment
from protofl_common.data import UNLABELLED, ClientData
from protofl_common.data.raw import StoredRows, normalised


class StoredInputs:
    """Inputs [N, …] that stay on the disk: of the rows that are asked for, the tensor that others are part of."""

    def __init__(self, rows: StoredRows, data: ClientData, device: torch.device) -> None:
        self.rows, self.data, self.device = rows, data, device

    def __getitem__(self, index: Tensor) -> Tensor:
        """Rows ``index`` [B], int64."""
        return normalised(self.rows[index.cpu().numpy()], self.data.mean, self.data.std, self.device)

    def split(self, size: int) -> Iterator[Tensor]:
        """All rows in their order, ``size`` at a time."""
        for index in torch.arange(len(self.rows)).split(size):
            yield self[index]


@dataclass(frozen=True)
class Samples:
    """Inputs [N, …] as the model takes them and labels [N] int64, on the device.

    Inputs are normalised images or numbers, tokens, or features of frozen backbones.
    """

    inputs: Tensor | StoredInputs
    labels: Tensor
    unlabelled: Tensor | None = None
    """Further inputs [U, …] without a label (``positive-rate`` below 1); not counted in N."""
    augment: Augment | None = None
    """How inputs are changed when a batch to train on is made of them; nothing else sees them changed."""

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return a batch of ``rows`` [B]: inputs, changed by `augment` with ``generator``, labels, and rows."""
        inputs = self.inputs[rows]
        return self.augment(inputs, generator) if self.augment else inputs, self.labels[rows], rows

    @property
    def in_memory(self) -> Tensor:
        """The inputs where they are a tensor: features of backbones always are."""
        assert isinstance(self.inputs, Tensor)
        return self.inputs

    def with_unlabelled(self) -> Samples:
        """All N + U samples, those without a label at the end, with the label `UNLABELLED` (-1)."""
        if self.unlabelled is None:
            return self
        nothing = self.labels.new_full((len(self.unlabelled),), UNLABELLED)
        inputs, labels = torch.cat([self.in_memory, self.unlabelled]), torch.cat([self.labels, nothing])
        return Samples(inputs, labels, augment=self.augment)


def to_device(inputs: np.ndarray, labels: np.ndarray, data: ClientData, device: torch.device) -> Samples:
    """Images and numbers as floats, normalised by the mean and deviation of the data set; tokens as they are."""
    known = torch.from_numpy(labels.astype(np.int64)).to(device)
    if isinstance(inputs, StoredRows) and not bool((known == UNLABELLED).any()):
        return Samples(StoredInputs(inputs, data, device), known)
    return split_unlabelled(normalised(inputs, data.mean, data.std, device), known)


def split_unlabelled(inputs: Tensor, labels: Tensor) -> Samples:
    """Inputs [N + U, …] with their labels, of which those that are `UNLABELLED` stand apart."""
    known = labels != UNLABELLED
    if bool(known.all()):
        return Samples(inputs, labels)
    return Samples(inputs[known], labels[known], inputs[~known])

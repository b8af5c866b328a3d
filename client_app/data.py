"""This client's own data, as tensors on its device, or, where the memory is too small for that, on the disk.

Training images may be changed at random, anew for each batch (setting ``augment``). Source: the authors' code of
FedPLVM flips and turns DomainNet's, by torchvision's ``RandomHorizontalFlip`` and ``RandomRotation(30)``. Here each
image of a batch has its own draw, as there, but the whole batch is changed at once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from protofl_common.basics.text import names_in
from protofl_common.data import UNLABELLED, ClientData
from protofl_common.data.raw import DataError, StoredRows, are_images, described, normalised

MOST_DEGREES = 30.0


class StoredInputs:
    """Inputs [N, …] that stay on the disk: of the rows that are asked for, the tensor that others are part of."""

    def __init__(self, rows: StoredRows, data: ClientData, device: torch.device) -> None:
        self.rows, self.data, self.device = rows, data, device

    def __getitem__(self, index: Tensor) -> Tensor:
        return normalised(self.rows[index.cpu().numpy()], self.data.mean, self.data.std, self.device)

    def split(self, size: int) -> Iterator[Tensor]:
        for index in torch.arange(len(self.rows)).split(size):
            yield self[index]


@dataclass(frozen=True)
class Augment:
    """Images of a batch are changed; all randomness comes from the ``generator``, of the CPU."""

    kinds: frozenset[str]  # ``flip``: mirrored, one in two; ``rotate``: by up to 30°, nearest pixel, black outside
    black_C11: Tensor  # Black after normalisation, [channels, 1, 1]

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        many = len(images)
        if "flip" in self.kinds:
            chosen = (torch.rand(many, generator=generator) < 0.5).to(images.device)
            images = torch.where(chosen[:, None, None, None], images.flip(3), images)
        if "rotate" in self.kinds:
            angles = (torch.rand(many, generator=generator) * 2 - 1) * math.radians(MOST_DEGREES)
            images = rotated(images - self.black_C11, angles.to(images.device)) + self.black_C11
        return images


@dataclass(frozen=True)
class Samples:
    """Labels [N] int64 and inputs [N, …] on the device: images or numbers, normalised, tokens, or features."""

    inputs: Tensor | StoredInputs
    labels: Tensor
    unlabelled: Tensor | None = None  # Further inputs [U, …] without a label (``positive-rate`` below 1), not of N
    augment: Augment | None = None  # Changes inputs of a batch to train on, and no others

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

    def with_unlabelled(self) -> "Samples":
        """All N + U samples, those without a label at the end, with the label `UNLABELLED` (-1)."""
        if self.unlabelled is None:
            return self
        nothing = self.labels.new_full((len(self.unlabelled),), UNLABELLED)
        inputs = torch.cat([self.in_memory, self.unlabelled])
        return Samples(inputs, torch.cat([self.labels, nothing]), augment=self.augment)


def to_device(inputs: np.ndarray, labels: np.ndarray, data: ClientData, device: torch.device) -> Samples:
    """Images and numbers as floats, normalised by the mean and deviation of the data set; tokens as they are."""
    labels_N = torch.from_numpy(labels.astype(np.int64)).to(device)
    if isinstance(inputs, StoredRows) and not bool((labels_N == UNLABELLED).any()):
        return Samples(StoredInputs(inputs, data, device), labels_N)
    return split_unlabelled(normalised(inputs, data.mean, data.std, device), labels_N)


def split_unlabelled(inputs: Tensor, labels: Tensor) -> Samples:
    if bool((is_known := labels != UNLABELLED).all()):
        return Samples(inputs, labels)
    return Samples(inputs[is_known], labels[is_known], inputs[~is_known])


def augment_of(named: str, data: ClientData, device: torch.device) -> Augment | None:
    """Return the augmentation that the setting names; None for ``none``. DataError for inputs that are no images."""
    if not (kinds := frozenset(names_in(named)) - {"none"}):
        return None
    if not are_images(data.train_inputs):
        sample = described(data.train_inputs)
        raise DataError(f"augment = {named!r}: only images take it; a sample is {sample}; set none")
    black_C = -torch.tensor(data.mean, device=device) / torch.tensor(data.std, device=device)
    return Augment(kinds, black_C.view(-1, 1, 1))


def rotated(images: Tensor, angles_B: Tensor) -> Tensor:
    """Images [B, channels, H, W] turned counter-clockwise by ``angles_B`` [B], radians; 0 where there was nothing."""
    height, width = images.shape[2:]
    cos, sin, none = angles_B.cos(), angles_B.sin(), torch.zeros_like(angles_B)
    rows = torch.stack([cos, -sin * height / width, none], 1), torch.stack([sin * width / height, cos, none], 1)
    grid = affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)

"""A client's samples: tensors on its device, or on the disk where the memory is too small.

Training images may be changed at random, anew for each batch (setting ``augment``). Source: the
authors' code of FedPLVM flips and turns DomainNet's, by torchvision's ``RandomHorizontalFlip`` and
``RandomRotation(30)``. Here each image of a batch has its own draw, as there, but the whole batch
is changed at once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from protofl_common.config.lists import names_in
from protofl_common.data import ClientData
from protofl_common.data.raw import DataError, StoredRows, are_images, described, normalised
from protofl_common.tasks import UNLABELLED, Task

MOST_DEGREES = 30.0


class StoredInputs:
    """Inputs [N, …] that stay on the disk; asked for rows, it reads them as a tensor."""

    def __init__(self, rows: StoredRows, data: ClientData, device: torch.device) -> None:
        self.rows = rows
        self.data = data
        self.device = device

    def __getitem__(self, index: Tensor) -> Tensor:
        inputs = self.rows[index.cpu().numpy()]
        return normalised(inputs, self.data.mean, self.data.std, self.device)

    def split(self, size: int) -> Iterator[Tensor]:
        for index in torch.arange(len(self.rows)).split(size):
            yield self[index]


@dataclass(frozen=True)
class Augment:
    """Changes the images of a batch at random.

    ``flip`` mirrors one image in two; ``rotate`` turns each by up to 30°, with the nearest pixel,
    and black outside. All randomness comes from the ``generator``, which is the CPU's.
    """

    kinds: frozenset[str]  # ``flip``, ``rotate``
    black_C11: Tensor  # Black after normalisation, [channels, 1, 1]

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        batch_size = len(images)
        if "flip" in self.kinds:
            is_flipped_B = (torch.rand(batch_size, generator=generator) < 0.5).to(images.device)
            images = torch.where(is_flipped_B[:, None, None, None], images.flip(3), images)
        if "rotate" in self.kinds:
            part_B = torch.rand(batch_size, generator=generator) * 2 - 1  # of the largest angle
            angles_B = (part_B * math.radians(MOST_DEGREES)).to(images.device)
            images = rotated(images - self.black_C11, angles_B) + self.black_C11
        return images


@dataclass(frozen=True)
class Samples:
    """Labels [N, …] int64, as the task has them, and inputs [N, …] on the device.

    Inputs are images or numbers, normalised, tokens, or features.
    """

    inputs: Tensor | StoredInputs
    labels: Tensor
    unlabelled: Tensor | None = None
    """Further inputs [U, …], not of N, that have no label (``positive-rate`` below 1)."""
    augment: Augment | None = None  # Changes inputs of a batch to train on, and no others

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return a batch of ``rows`` [B]: inputs, labels, and the rows.

        The inputs are changed by `augment` with ``generator``.
        """
        inputs = self.inputs[rows]
        if self.augment:
            inputs = self.augment(inputs, generator)
        return inputs, self.labels[rows], rows

    @property
    def in_memory(self) -> Tensor:
        """The inputs, for callers that need a tensor: features of backbones are never on disk."""
        assert isinstance(self.inputs, Tensor)
        return self.inputs

    def with_unlabelled(self) -> "Samples":
        """Return all N + U samples; those without a label come last, labelled `UNLABELLED` (-1)."""
        if self.unlabelled is None:
            return self
        shape = (len(self.unlabelled), *self.labels.shape[1:])
        no_labels = self.labels.new_full(shape, UNLABELLED)
        inputs = torch.cat([self.in_memory, self.unlabelled])
        labels = torch.cat([self.labels, no_labels])
        return Samples(inputs, labels, augment=self.augment)


def to_device(
    inputs: np.ndarray, labels: np.ndarray, data: ClientData, device: torch.device
) -> Samples:
    """Return samples on the device.

    Images and numbers become floats, normalised by the mean and deviation in ``data``; tokens stay
    as they are. Inputs on the disk stay there, unless some samples have no label.
    """
    labels_N = data.task.tensor(labels).to(device)
    if isinstance(inputs, StoredRows) and bool(data.task.known(labels_N).all()):
        return Samples(StoredInputs(inputs, data, device), labels_N)
    return split_unlabelled(data.task, normalised(inputs, data.mean, data.std, device), labels_N)


def split_unlabelled(task: Task, inputs: Tensor, labels: Tensor) -> Samples:
    """Return samples with labels, and the inputs of all others as their `Samples.unlabelled`.

    A sample has a label if anything is known of it (`Task.known`).
    """
    is_known = task.known(labels)
    if bool(is_known.all()):
        return Samples(inputs, labels)
    return Samples(inputs[is_known], labels[is_known], inputs[~is_known])


def augment_of(named: str, data: ClientData, device: torch.device) -> Augment | None:
    """Return the augmentation that the setting ``augment`` names; None for "none".

    DataError for inputs that are no images.
    """
    kinds = frozenset(names_in(named)) - {"none"}
    if not kinds:
        return None
    if not are_images(data.train_inputs):
        sample = described(data.train_inputs)
        raise DataError(f"augment = {named!r}: only images take it; a sample is {sample}; set none")
    # the pixel value 0 after normalisation
    black_C = -torch.tensor(data.mean, device=device) / torch.tensor(data.std, device=device)
    return Augment(kinds, black_C.view(-1, 1, 1))


def rotated(images: Tensor, angles_B: Tensor) -> Tensor:
    """Return images [B, channels, H, W] turned counter-clockwise by ``angles_B`` [B] in radians.

    Each pixel takes the value of the nearest one; those from outside are 0.
    """
    height, width = images.shape[2:]
    cos_B = angles_B.cos()
    sin_B = angles_B.sin()
    no_shift_B = torch.zeros_like(angles_B)

    # `affine_grid` counts positions from -1 to 1 on either side, so angles need the ratio of sides
    x_B3 = torch.stack([cos_B, -sin_B * height / width, no_shift_B], 1)
    y_B3 = torch.stack([sin_B * width / height, cos_B, no_shift_B], 1)
    turns_B23 = torch.stack([x_B3, y_B3], 1)
    grid_BHW2 = affine_grid(turns_B23, list(images.shape), align_corners=False)
    return grid_sample(images, grid_BHW2, mode="nearest", padding_mode="zeros", align_corners=False)

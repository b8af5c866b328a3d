"""Training images that are changed at random, anew for each batch (setting ``augment``).

Source: the authors' code of FedPLVM flips and turns DomainNet's, by torchvision's ``RandomHorizontalFlip`` and
``RandomRotation(30)``. Here each image of a batch has its own draw, as there, but the whole batch is changed at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from protofl_common.basics.text import names_in
from protofl_common.data import ClientData
from protofl_common.data.raw import DataError, are_images, described

MOST_DEGREES = 30.0


@dataclass(frozen=True)
class Augment:
    """The changes of a batch."""

    kinds: frozenset[str]
    """``flip``: left and right exchanged, for one image in two. ``rotate``: turned by up to 30° to either side, by the
    nearest pixel, black where the image has none."""
    black_C11: Tensor
    """Black after normalisation, [channels, 1, 1]."""

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """[B, channels, H, W] -> the same shape; all randomness comes from ``generator``, of the CPU."""
        many = len(images)
        if "flip" in self.kinds:
            chosen = (torch.rand(many, generator=generator) < 0.5).to(images.device)
            images = torch.where(chosen[:, None, None, None], images.flip(3), images)
        if "rotate" in self.kinds:
            angles = (torch.rand(many, generator=generator) * 2 - 1) * math.radians(MOST_DEGREES)
            images = rotated(images - self.black_C11, angles.to(images.device)) + self.black_C11
        return images


def augment_of(named: str, data: ClientData, device: torch.device) -> Augment | None:
    """Return the augmentation that the setting names, for data as they are stored; None for ``none``.

    DataError where the inputs are no images.
    """
    if not (kinds := frozenset(names_in(named)) - {"none"}):
        return None
    if not are_images(data.train_inputs):
        raise DataError(
            f"augment = {named!r}: only images take it; a sample is {described(data.train_inputs)}; set none"
        )
    black_C = -torch.tensor(data.mean, device=device) / torch.tensor(data.std, device=device)
    return Augment(kinds, black_C.view(-1, 1, 1))


def rotated(images: Tensor, angles_B: Tensor) -> Tensor:
    """Images [B, channels, H, W] turned counter-clockwise by ``angles_B`` [B], radians; 0 where there was nothing."""
    height, width = images.shape[2:]
    cos, sin, none = angles_B.cos(), angles_B.sin(), torch.zeros_like(angles_B)
    rows = torch.stack([cos, -sin * height / width, none], 1), torch.stack([sin * width / height, cos, none], 1)
    grid = affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)

"""Random changes of a batch of images [B, 3, H, W] in [0, 1] that leave their class alone.

Resized crops, turns and smooth warps; every colour, inversion included; other images showing through; blur as of
small images enlarged; noise; erased squares. Everything is drawn from the generator given.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

TURN, SHEAR, SHIFT = math.radians(20), 0.2, 0.15
AREA, ASPECT = (0.35, 1.3), 0.25
"""Of the crop, relative to the image; log of its aspect ratio."""
WARP, WAVES = 0.1, 4
"""Largest shift of a smooth warp, half of the image being 1, and its resolution."""
SEEN_THROUGH, NOISE = 0.6, 0.12
BLURS = {2: 0.12, 4: 0.12, 6: 0.06}
"""Chance of being enlarged from a half, a quarter, a sixth."""


def augmented(images: Tensor, *, flips: bool, strength: float, generator: torch.Generator) -> Tensor:
    """Another batch of the same shape and classes.

    ``flips`` allows mirror images; ``strength`` (0 to 1) scales the chances of what hides the image or inverts it.
    """
    rand = _Draws(len(images), generator)
    images = _recoloured(_moved(images, flips, rand), strength, rand)
    for chance, change in ((0.4, _blended), (0.6, _noisy)):
        rows = rand.rows(chance * strength)
        images[rows] = change(images, rows, generator)
    return _erased(_blurred(images, strength, rand), rand).clamp_(0, 1)


class _Draws:
    """Random numbers for each image of a batch."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count, self.generator = count, generator

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """[B, *shape]."""
        return torch.rand(self.count, *shape, generator=self.generator) * (high - low) + low

    def sign(self, chance: float, *shape: int) -> Tensor:
        """−1 with this chance, else 1, [B, *shape]."""
        return 1 - 2 * (self.uniform(0, 1, *shape) < chance).float()

    def rows(self, chance: float) -> Tensor:
        """int64: the images that have it, each with this chance."""
        return (self.uniform(0, 1) < chance).nonzero().flatten()


def _moved(images: Tensor, flips: bool, rand: _Draws) -> Tensor:
    """The sampling grid is linear in x, y, 1 and the waves, so it is one product with their coefficients."""
    side = rand.uniform(*AREA).sqrt()
    stretch = rand.uniform(-ASPECT, ASPECT).exp()
    turn, shear = rand.uniform(-TURN, TURN), rand.uniform(-SHEAR, SHEAR)
    width, height = side * stretch * (rand.sign(0.5) if flips else 1), side / stretch
    shift = ((1 - side).clamp(min=0) + SHIFT)[:, None, None] * rand.uniform(-1, 1, 1, 2)
    along_x = torch.stack([width * turn.cos(), width * turn.sin()], dim=1)
    along_y = torch.stack([height * (shear - turn.sin()), height * turn.cos()], dim=1)
    warp = rand.uniform(-1, 1, WAVES * WAVES, 2) * rand.uniform(0, WARP, 1, 1)
    coefficients = torch.cat([along_x[:, None], along_y[:, None], shift, warp], dim=1)
    height_, width_ = images.shape[2:]
    grid = (_basis(height_, width_) @ coefficients).view(-1, height_, width_, 2)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


@lru_cache(maxsize=4)
def _basis(height: int, width: int) -> Tensor:
    """[H·W, 3 + WAVES²]: x, y, 1, and products of cosines."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    along_x, along_y = ([(math.pi * k * (axis + 1) / 2).cos() for k in range(WAVES)] for axis in (x, y))
    waves = [of_x * of_y for of_x in along_x for of_y in along_y]
    return torch.stack([x, y, torch.ones_like(x), *[wave / 2 for wave in waves]], dim=2).flatten(0, 1)


def _recoloured(images: Tensor, strength: float, rand: _Draws) -> Tensor:
    """Each image's colours sent through its own 3×3 matrix around grey; up to half are inverted, some made grey."""
    identity = torch.eye(3).expand(rand.count, 3, 3)
    pick = rand.uniform(0, 1, 1, 1)
    grey = torch.full_like(identity, 1 / 3)
    matrix = torch.where(pick < 0.8, identity + rand.uniform(-0.6, 0.6, 3, 3) * (pick > 0.3), grey)
    matrix = matrix * rand.uniform(0.35, 1.1, 1, 1) * rand.sign(0.5 * strength, 1, 1)
    offset = 0.5 + rand.uniform(-0.2, 0.2, 1, 1) + rand.uniform(-0.15, 0.15, 3, 1) - matrix.sum(2, keepdim=True) / 2
    return torch.baddbmm(offset, matrix, images.flatten(2)).view_as(images)


def _blended(images: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Another image of the batch shows through: mixed in, or as a difference (as photographs do in MNIST-M)."""
    rand = _Draws(len(rows), generator)
    share = rand.uniform(0, SEEN_THROUGH, 1, 1, 1)
    own, other = images[rows], images[rows - 1].flip(3) * share
    half = len(rows) // 2
    own[:half] = own[:half] * (1 - share[:half]) + other[:half]
    own[half:] = (own[half:] - other[half:]).abs_()
    return own


def _noisy(images: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    scale = _Draws(len(rows), generator).uniform(0, NOISE, 1, 1, 1)
    return images[rows] + torch.randn(len(rows), *images.shape[1:], generator=generator) * scale


def _blurred(images: Tensor, strength: float, rand: _Draws) -> Tensor:
    """Some images as if enlarged from smaller ones."""
    pick = rand.uniform(0, 1) / strength if strength else rand.uniform(1, 2)
    for factor, chance in BLURS.items():
        rows = ((pick >= 0) & (pick < chance)).nonzero().flatten()
        pick = pick - chance
        if len(rows):
            small = F.adaptive_avg_pool2d(images[rows], (images.shape[2] // factor, images.shape[3] // factor))
            images[rows] = F.interpolate(small, images.shape[2:], mode="bilinear")
    return images


def _erased(images: Tensor, rand: _Draws) -> Tensor:
    """A rectangle of one colour on a quarter of the images."""
    for row in rand.rows(0.25).tolist():
        for_row = torch.rand(7, generator=rand.generator)
        top, left = (int(start * side) for start, side in zip(for_row[:2], images.shape[2:], strict=True))
        tall, wide = (int(side * (0.1 + 0.3 * part)) for part, side in zip(for_row[2:4], images.shape[2:], strict=True))
        images[row, :, top : top + tall, left : left + wide] = for_row[4:].view(3, 1, 1)
    return images

"""``digit-domains``: the ten digits in five looks, made from what the installed packages bring along.

Every domain has `PER_CLASS` images of each digit, 28×28 RGB. The strokes come from scikit-learn's 1,797 scanned
digits, of which no two domains share one, or from matplotlib's fonts; the photographs are scikit-learn's two.
The images are the same on every machine with the same versions of these packages, whatever the run's seed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.digits_strokes import SIDE, Ink, Pencil, pencils
from protofl_common.datasets.raw import Images, Ints, RawData

PER_CLASS = 50
SEED = 20240229

Pixels = NDArray[np.floating[Any]]
"""Floating point [28, 28, 3] in [0, 1] (values outside are clipped at the end)."""


def read(settings: DataSettings) -> RawData:
    """All domains, in the order of `DOMAINS`; the settings change nothing."""
    rng = np.random.default_rng(SEED)
    scans = {"scanned": PER_CLASS, "photo": PER_CLASS, "inverted": PER_CLASS, "coloured": PER_CLASS // 2 - 1}
    pencil_of = pencils(scans, rng)
    labels = np.tile(np.arange(10), PER_CLASS)
    images = [_domain(look, pencil_of[name], labels, rng) for name, look in DOMAINS.items()]
    count = len(labels) * len(DOMAINS)
    return RawData(
        inputs=np.concatenate(images),
        labels=np.tile(labels, len(DOMAINS)),
        domains=np.repeat(np.arange(len(DOMAINS)), len(labels)),
        official=np.zeros(count, dtype=np.uint8),
        classes=tuple(str(digit) for digit in range(10)),
        domain_names=tuple(DOMAINS),
    )


def _domain(look: Look, pencil: Pencil, labels: Ints, rng: np.random.Generator) -> Images:
    """uint8 [N, 3, 28, 28]: one image for each label."""
    inks = [pencil(int(label), rng) for label in labels]
    pixels = np.stack([look(ink, inks, rng) for ink in inks])
    return np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8).transpose(0, 3, 1, 2)


# -- looks: ink [28, 28], the domain's other inks -> pixels [28, 28, 3]

Look = Callable[[Ink, list[Ink], np.random.Generator], Pixels]


def _scanned_look(ink: Ink, others: list[Ink], rng: np.random.Generator) -> Pixels:
    """White strokes on black, as scanned."""
    return _mixed(ink, np.zeros(3), np.ones(3))


def _printed_look(ink: Ink, others: list[Ink], rng: np.random.Generator) -> Pixels:
    """Dark strokes on slightly yellowed paper."""
    paper = np.array([1.0, 0.98, 0.92]) * rng.uniform(0.85, 1.0)
    return _mixed(ink, paper, np.full(3, rng.uniform(0.0, 0.3))) + rng.normal(0, 0.015, (SIDE, SIDE, 1))


def _photo_look(ink: Ink, others: list[Ink], rng: np.random.Generator) -> Pixels:
    """Absolute difference of the strokes and a piece of a photograph, as in MNIST-M (Ganin et al., 2016)."""
    photo = _photographs()[rng.integers(2)]
    top, left = (int(rng.integers(limit - SIDE)) for limit in photo.shape[:2])
    difference: Pixels = np.abs(photo[top : top + SIDE, left : left + SIDE] - ink[..., None])
    return difference


def _inverted_look(ink: Ink, others: list[Ink], rng: np.random.Generator) -> Pixels:
    """Dark strokes on light grey, of changing contrast, under strong noise."""
    ground, contrast = rng.uniform(0.6, 0.95), rng.uniform(0.4, 0.6)
    grey = ground - contrast * ink + rng.normal(0, 0.12, (SIDE, SIDE))
    return np.repeat(grey[..., None], 3, axis=2)


def _coloured_look(ink: Ink, others: list[Ink], rng: np.random.Generator) -> Pixels:
    """A coloured digit on a coloured gradient, between parts of two others, as on house numbers (SVHN)."""
    dark, light = rng.uniform(0.0, 0.5, size=3), rng.uniform(0.6, 1.0, size=3)
    ground, stroke = (dark, light) if rng.random() < 0.5 else (light, dark)
    slope = np.linspace(-0.15, 0.15, SIDE)
    gradient = slope[:, None] * rng.uniform(-1, 1) + slope[None, :] * rng.uniform(-1, 1)
    scene = ink.copy()
    for shift in (-19, 19):
        scene = np.maximum(scene, _shifted(others[rng.integers(len(others))], shift))
    return _mixed(scene, ground, stroke) + gradient[..., None]


DOMAINS: dict[str, Look] = {
    "scanned": _scanned_look,
    "printed": _printed_look,
    "photo": _photo_look,
    "inverted": _inverted_look,
    "coloured": _coloured_look,
}


def _mixed(ink: Ink, ground: NDArray[np.float64], stroke: NDArray[np.float64]) -> Pixels:
    """Colours [3] of the ground and of the stroke, mixed by the ink."""
    return ground + ink[..., None] * (stroke - ground)


def _shifted(ink: Ink, shift: int) -> Ink:
    """The ink moved ``shift`` pixels to the right; what leaves the image is lost."""
    moved = np.zeros_like(ink)
    if shift > 0:
        moved[:, shift:] = ink[:, :-shift]
    else:
        moved[:, :shift] = ink[:, -shift:]
    return moved


@lru_cache(maxsize=1)
def _photographs() -> list[Pixels]:
    """Two photographs, float32 [214, 320, 3] in [0, 1]: at half their size, so that a piece shows some structure."""
    from sklearn.datasets import load_sample_images

    return [image[::2, ::2].astype(np.float32) / 255 for image in load_sample_images().images]

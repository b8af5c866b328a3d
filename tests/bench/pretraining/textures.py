"""Textures for ``scenes``: values in [0, 1] at points of space, mixed between two colours."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]


def _plain(p: Values, rng: np.random.Generator) -> Any:
    return np.zeros(p.shape[:-1])


def _stripes(p: Values, rng: np.random.Generator) -> Any:
    return (np.sin(p[..., 0] * rng.uniform(8, 22)) > rng.uniform(-0.5, 0.5)).astype(float)


def _waves(p: Values, rng: np.random.Generator) -> Any:
    return 0.5 + 0.5 * np.sin(p[..., 0] * rng.uniform(8, 16) + 2 * np.sin(p[..., 1] * rng.uniform(4, 9)))


def _checks(p: Values, rng: np.random.Generator) -> Any:
    return np.floor(p * rng.uniform(2.5, 6)).sum(axis=-1) % 2


def _dots(p: Values, rng: np.random.Generator) -> Any:
    cell = p * rng.uniform(3, 6) % 1 - 0.5
    return (np.sqrt((cell**2).sum(axis=-1)) < rng.uniform(0.3, 0.42)).astype(float)


def _rings(p: Values, rng: np.random.Generator) -> Any:
    return 0.5 + 0.5 * np.sin(np.sqrt((p[..., :2] ** 2).sum(axis=-1)) * rng.uniform(14, 30))


def _lattice(p: Values, rng: np.random.Generator) -> Any:
    cell = np.abs(p * rng.uniform(2.5, 5) % 1 - 0.5)
    return (cell[..., :2].max(axis=-1) > 0.4).astype(float)


def _bricks(p: Values, rng: np.random.Generator) -> Any:
    scale = rng.uniform(4, 7)
    row = p[..., 1] * scale
    column = p[..., 0] * scale / 2 + 0.5 * (np.floor(row) % 2)
    return ((row % 1 < 0.15) | (column % 1 < 0.08)).astype(float)


def _clouds(p: Values, rng: np.random.Generator) -> Any:
    total = np.zeros(p.shape[:-1])
    for _ in range(6):
        total += np.sin(p @ rng.normal(0, 4, 3) + rng.uniform(0, 6.3))
    return np.clip(0.5 + total / 5, 0, 1)


def _grain(p: Values, rng: np.random.Generator) -> Any:
    return rng.uniform(0, 1, p.shape[:-1])


def _fade(p: Values, rng: np.random.Generator) -> Any:
    return np.clip(0.5 + p[..., 1] * rng.uniform(0.5, 1.0), 0, 1)


TEXTURES: tuple[Callable[[Values, np.random.Generator], Any], ...] = (_plain, _stripes, _waves, _checks, _dots, _rings,
    _lattice, _bricks, _clouds, _grain, _fade)  # fmt: skip
SMOOTH = tuple(TEXTURES.index(texture) for texture in (_plain, _clouds, _grain, _fade))
"""Those that make quiet grounds."""


def coloured(texture: int, points: Values, rng: np.random.Generator) -> Values:
    """Colours [..., 3] at ``points`` [..., 3], the texture turned at random and shifted."""
    axes, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    value = TEXTURES[texture](points @ axes + rng.uniform(0, 5, 3), rng)[..., None]
    first, second = rng.uniform(0, 1, 3), rng.uniform(0, 1, 3)
    if np.abs(first - second).max() < 0.4:
        second = 1 - first
    return np.asarray(first + value * (second - first))

"""``fractals``: attractors of iterated function systems, a class being a system (FractalDB; Kataoka et al., ACCV 2020).

A system is 2 to 5 affine maps w(p) = A p + b of the plane with coefficients drawn from U(−1, 1), A shrunk to a norm
of at most `SHRINK` for a clear picture, and kept when that picture covers enough of the image but not all. Points
wander by the chaos game, a map being chosen with probability proportional to |det A|, and leave 2×2 pixels in the
map's colour. Another image of the class has its coefficients a little changed.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.bench.pretraining.corpus import SIDE, Corpus, Pixels

CLASSES = 150
SEED = 2020
"""Of the systems: they are the same for every training seed."""
COVERED = (0.15, 0.6)
"""Part of the image that a system's points reach."""
SHRINK = 0.85
WANDERERS, STEPS, SETTLING = 1200, 22, 8
CHANGE = 0.03
"""Standard deviation of what is added to each coefficient for another image of the class."""

System = NDArray[np.float64]
"""float64 [maps, 2, 3]: A and b side by side."""


def corpus() -> Corpus:
    return Corpus(draw, (CLASSES,), per_class=60, flips=True, strength=0.2, lr=0.05)


def draw(label: int, rng: np.random.Generator) -> tuple[Pixels, tuple[int, ...]]:
    """The class's fractal in colour on a coloured ground."""
    system = systems()[label]
    found = None
    while found is None:
        found = _points(system + rng.normal(0, CHANGE, system.shape), rng)
    points, maps = found
    shades = rng.uniform(0, 1, (len(system), 3))
    ground = rng.uniform(0, 1, 3)
    shades = np.where(np.abs(shades - ground).max(axis=1, keepdims=True) < 0.4, 1 - ground, shades)
    cells = _cells(points, float(rng.uniform(0.85, 1.0)))
    pixels = np.tile(ground, (SIDE * SIDE, 1))
    for step in (0, 1, SIDE, SIDE + 1):
        pixels[np.minimum(cells + step, SIDE * SIDE - 1)] = shades[maps]
    return pixels.reshape(SIDE, SIDE, 3).astype(np.float32), ()


@lru_cache(maxsize=1)
def systems() -> tuple[System, ...]:
    rng = np.random.default_rng(SEED)
    kept: list[System] = []
    while len(kept) < CLASSES:
        system = rng.uniform(-1, 1, (int(rng.integers(2, 6)), 2, 3))
        norms = np.linalg.norm(system[:, :, :2], ord=2, axis=(1, 2))
        system[:, :, :2] *= np.minimum(1, SHRINK / norms)[:, None, None]
        found = _points(system, rng)
        if found is not None and COVERED[0] < len(np.unique(_cells(found[0], 1.0))) / SIDE**2 < COVERED[1]:
            kept.append(system)
    return tuple(kept)


def _points(system: System, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Points [N, 2] of the attractor and the map [N] that each came by; None when they run away."""
    weights = np.abs(np.linalg.det(system[:, :, :2])) + 0.01
    choices = rng.choice(len(system), size=(STEPS, WANDERERS), p=weights / weights.sum())
    place = np.zeros((WANDERERS, 2))
    places = []
    for choice in choices:
        chosen = system[choice]
        place = (chosen[:, :, :2] @ place[:, :, None])[:, :, 0] + chosen[:, :, 2]
        places.append(place)
    points = np.concatenate(places[SETTLING:])
    if not np.isfinite(points).all() or np.abs(points).max() > 1e3:
        return None
    return points, choices[SETTLING:].ravel()


def _cells(points: NDArray[Any], fill: float) -> NDArray[Any]:
    """int64 [N]: the pixel of each point, the middle 98 % of the points filling ``fill`` of the image."""
    low, high = np.quantile(points, [0.01, 0.99], axis=0)
    middle, reach = (low + high) / 2, max(float((high - low).max()) / 2, 1e-6)
    place = ((points - middle) / reach * fill + 1) / 2 * SIDE
    column, row = np.clip(place.astype(np.int64), 0, SIDE - 1).T
    return np.asarray(row * SIDE + column)

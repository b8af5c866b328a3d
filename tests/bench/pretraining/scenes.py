"""``scenes``: solids put together from one or two parts, textured and lit, before a dimmer ground.

A class is such a solid; a second label is its texture. Another image of the class shows it from another side, with
its parts a little changed, under another light and among pieces of clutter.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.bench.pretraining.corpus import SIDE, Corpus, Pixels
from tests.bench.pretraining.solids import FORMS, Part, march, normals, rotation
from tests.bench.pretraining.textures import SMOOTH, TEXTURES, coloured

CLASSES = 80
SEED = 1905
"""Of the solids: they are the same for every training seed."""


def corpus() -> Corpus:
    return Corpus(draw, (CLASSES, len(TEXTURES)), per_class=100, flips=True, strength=0.4)


def draw(label: int, rng: np.random.Generator) -> tuple[Pixels, tuple[int, ...]]:
    """The solid ``label`` in a texture of its own, which is the other label."""
    parts = tuple(_changed(part, rng) for part in solids()[label])
    view = rotation(rng.uniform(-0.7, 0.7), rng.uniform(0, 0.7), rng.normal(0, 0.1))
    scale, shift = rng.uniform(0.75, 1.1) * _reach(parts), rng.uniform(-0.15, 0.15, 2)
    plane = (_plane() - shift) * scale
    start = np.concatenate([plane, np.full((len(plane), 1), 2.0)], axis=1).astype(np.float32) @ view
    points, hit = march(parts, start, np.asarray([0, 0, -1], dtype=np.float32) @ view)
    texture = int(rng.integers(len(TEXTURES)))
    pixels = _ground(rng)
    seen = points[hit]
    pixels[hit] = coloured(texture, seen, rng) * _light(normals(parts, seen), view, rng)
    return pixels.reshape(SIDE, SIDE, 3).astype(np.float32), (texture,)


@lru_cache(maxsize=1)
def solids() -> tuple[tuple[Part, ...], ...]:
    """The parts of each class: every form alone, then pairs."""
    rng = np.random.default_rng(SEED)
    forms: list[tuple[int, ...]] = [(form,) for form in range(len(FORMS))]
    forms += [tuple(rng.integers(len(FORMS), size=2).tolist()) for _ in range(CLASSES - len(forms))]
    return tuple(tuple(_part(form, number, rng) for number, form in enumerate(pair)) for pair in forms)


def _part(form: int, number: int, rng: np.random.Generator) -> Part:
    """The first part is in the middle and the largest."""
    size = rng.uniform(0.15, 0.7, 3) if number == 0 else rng.uniform(0.08, 0.45, 3)
    place = np.zeros(3) if number == 0 else rng.uniform(-0.6, 0.6, 3)
    quarter = np.pi / 2
    turn = rotation(*(quarter * rng.integers(0, 2, 3) + rng.choice([0, 0, 0.4], 3)))
    return Part(form, size.astype(np.float32), place.astype(np.float32), turn)


def _reach(parts: tuple[Part, ...]) -> float:
    """About the distance of the solid's farthest point from the middle."""
    return max(float(np.linalg.norm(part.place)) + 0.8 * float(np.linalg.norm(part.size)) for part in parts)


def _changed(part: Part, rng: np.random.Generator) -> Part:
    size = part.size * np.exp(rng.normal(0, 0.1, 3))
    place = part.place + rng.normal(0, 0.04, 3)
    return Part(part.form, size.astype(np.float32), place.astype(np.float32), part.turn)


def _light(outwards: NDArray[Any], view: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Brightness [N, 1] of the surface: ambient, diffuse, and some gloss."""
    towards = rng.normal(size=3) + np.array([0, 1, 1.5])
    towards = towards / np.linalg.norm(towards) @ view
    facing = np.clip(outwards @ towards, 0, 1)
    ambient = rng.uniform(0.2, 0.6)
    brightness = ambient + (1.1 - ambient) * facing + rng.uniform(0, 0.5) * facing**20
    return np.asarray(brightness[:, None])


def _ground(rng: np.random.Generator) -> NDArray[np.float64]:
    """Pixels [64·64, 3]: a smooth texture of little contrast, or sometimes any, and up to two plain rectangles."""
    plane = np.concatenate([_plane(), np.zeros((SIDE * SIDE, 1))], axis=1)
    texture = rng.choice(SMOOTH) if rng.random() < 0.75 else rng.integers(len(TEXTURES))
    pixels = coloured(int(texture), plane, rng)
    mean = pixels.mean(axis=0)
    pixels = mean + (pixels - mean) * rng.uniform(0.1, 0.5)
    for _ in range(int(rng.integers(0, 3))):
        turned = (plane - rng.uniform(-1, 1, 3)) @ rotation(0, 0, rng.uniform(0, 3))
        pixels[(np.abs(turned[:, :2]) < rng.uniform(0.05, 0.4, 2)).all(axis=1)] = rng.uniform(0, 1, 3)
    return np.asarray(pixels)


@lru_cache(maxsize=1)
def _plane() -> NDArray[np.float64]:
    """[64·64, 2]: x to the right and y upwards in [−1, 1]."""
    steps = (np.arange(SIDE) + 0.5) / SIDE * 2 - 1
    y, x = np.meshgrid(-steps, steps, indexing="ij")
    return np.stack([x.ravel(), y.ravel()], axis=1)

"""Solids for ``scenes``, given by signed distances, and the march of parallel rays to their surface."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.floating[Any]]
"""float32 [..., 3]."""
MARCH, TOUCH, FAR = 22, 0.015, 4.0
"""Most steps of a ray, the distance that counts as a hit, and the one that counts as none."""


def _length(*parts: NDArray[Any]) -> Any:
    return np.sqrt(sum(part * part for part in parts))


# -- forms: points [..., 3] and sizes [3] -> signed distances [...], negative inside


def _sphere(p: Points, size: NDArray[Any]) -> Any:
    return _length(p[..., 0], p[..., 1], p[..., 2]) - size[0]


def _box(p: Points, size: NDArray[Any]) -> Any:
    q = np.abs(p) - size
    outside = np.maximum(q, 0)
    return _length(outside[..., 0], outside[..., 1], outside[..., 2]) + np.minimum(q.max(axis=-1), 0)


def _cylinder(p: Points, size: NDArray[Any]) -> Any:
    return np.maximum(_length(p[..., 0], p[..., 2]) - size[0], np.abs(p[..., 1]) - size[1])


def _cone(p: Points, size: NDArray[Any]) -> Any:
    slope = size[0] / (2 * size[1])
    side = (_length(p[..., 0], p[..., 2]) - slope * (size[1] - p[..., 1])) / np.float32(np.hypot(1, slope))
    return np.maximum(side, np.abs(p[..., 1]) - size[1])


def _torus(p: Points, size: NDArray[Any]) -> Any:
    ring = _length(p[..., 0], p[..., 1]) - size[0]
    return _length(ring, p[..., 2]) - size[1] * np.float32(0.4)


def _capsule(p: Points, size: NDArray[Any]) -> Any:
    along = p[..., 1] - np.clip(p[..., 1], -size[1], size[1])
    return _length(p[..., 0], along, p[..., 2]) - size[0] * np.float32(0.5)


def _octahedron(p: Points, size: NDArray[Any]) -> Any:
    return ((np.abs(p) / size).sum(axis=-1) - 1) * np.float32(size.min() / np.sqrt(3))


FORMS: tuple[Callable[[Points, NDArray[Any]], Any], ...] = (_sphere, _box, _cylinder, _cone, _torus, _capsule,
    _octahedron)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A form with its three sizes, where it is and how it is turned (a rotation matrix [3, 3])."""

    form: int
    size: NDArray[np.float32]
    place: NDArray[np.float32]
    turn: NDArray[np.float32]


def distance(parts: tuple[Part, ...], points: Points) -> NDArray[np.float32]:
    """Signed distance to the union of ``parts``, [...]."""
    nearest = np.full(points.shape[:-1], FAR, dtype=np.float32)
    for part in parts:
        np.minimum(nearest, FORMS[part.form]((points - part.place) @ part.turn, part.size), out=nearest)
    return nearest


def march(parts: tuple[Part, ...], start: Points, direction: NDArray[np.float32]) -> tuple[Points, NDArray[np.bool_]]:
    """Where parallel rays from ``start`` [N, 3] end, and whether they hit; ``direction`` has length 1."""
    points = start.copy()
    travelled = np.zeros(len(start), dtype=np.float32)
    open_ = np.arange(len(start))
    hit = np.zeros(len(start), dtype=bool)
    for _ in range(MARCH):
        step = distance(parts, points[open_])
        hit[open_] = step < TOUCH
        travelled[open_] += step
        points[open_] += step[:, None] * direction
        open_ = open_[(step >= TOUCH) & (travelled[open_] < FAR)]
        if not len(open_):
            break
    return points, hit


def normals(parts: tuple[Part, ...], points: Points) -> Points:
    """Unit vectors that point outwards, by forward differences."""
    middle = distance(parts, points)
    step = np.eye(3, dtype=np.float32) * np.float32(0.01)
    slope = np.stack([distance(parts, points + step[axis]) - middle for axis in range(3)], axis=-1)
    return np.asarray(slope / np.maximum(np.linalg.norm(slope, axis=-1, keepdims=True), 1e-6), dtype=np.float32)


def rotation(yaw: float, pitch: float, roll: float) -> NDArray[np.float32]:
    """About the vertical axis, then the horizontal one, then the line of sight (radians)."""
    (cy, sy), (cp, sp), (cr, sr) = ((np.cos(angle), np.sin(angle)) for angle in (yaw, pitch, roll))
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    about_x = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    about_z = np.array([[cr, -sr, 0], [sr, cr, 0], [0, 0, 1]])
    return np.asarray(about_z @ about_x @ about_y, dtype=np.float32)

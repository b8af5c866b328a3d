"""What a receiver accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts."""

    num_classes: int
    feature_dim: int
    max_norm: float = math.inf
    weights: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Name -> (dtype, shape) of every array of the model, where weights are exchanged."""
    max_per_class: int = 1000
    """Prototypes of one class in one message, where several are allowed at all."""
    backbones: int = 0
    """K, the frozen backbones that an insight compares."""

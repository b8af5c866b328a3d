"""Limits of what a receiver accepts, and the error for the rest."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from protofl_common.basics.text import printable

Template = Mapping[str, tuple[str, tuple[int, ...]]]  # name of an array -> (dtype, shape)


@dataclass(frozen=True)
class Limits:
    num_classes: int
    feature_dim: int
    max_norm: float = math.inf
    weights: Mapping[str, Template] = field(default_factory=dict)
    """Declared entry -> the arrays that it must hold, where weights are exchanged."""
    max_per_class: int = 1000  # vectors of one class in one message, where several are allowed at all
    backbones: int = 0  # K, the frozen backbones that statistics compare
    frozen_dim: int = 0  # the features of all frozen backbones together
    noise: float = 0.0
    """How far noise may move a sum of class moments, of features of length 1; 0 where they are exact."""
    longest: float = math.inf  # of the features whose moments have noise
    samples: float = 1.0  # of which these moments are


class RefusedMessage(ValueError):
    """A message that the catalog does not declare so; the text, of bounded length, says what is wrong."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))

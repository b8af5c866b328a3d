"""What an algorithm exchanges: named entries, declared once per direction in its row of the catalog.

The wire code (`wire/payloads.py`) packs, checks and unpacks by this declaration alone: what is not declared cannot
be sent and is not accepted. Which clients must have equal models follows from the declared parts of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Vectors:
    """Vectors of classes, such as prototypes: [P, W] with labels [P]."""

    width: Literal["features", "classes", "backbones"] = "features"
    """W: ``feature-dim``, the number of classes (mean logits), or of the features of all frozen backbones together."""
    counts: bool = False
    """How many samples stand behind each vector, [P], travels too. Some papers promise not to reveal it."""
    several: bool = False
    """A class may have several vectors, up to ``max-prototypes-per-class``."""
    probabilities: bool = False
    """Each vector is one of class probabilities: no number is below 0, and their sum is 1."""


@dataclass(frozen=True)
class VectorSets:
    """The vectors of every client, one set each, without counts; only a server can send them."""


@dataclass(frozen=True)
class Weights:
    """Parameters and buffers of a module: of its layers, those whose names begin with one of ``parts``."""

    of: str = "model"
    """The attribute of the client's algorithm that is the module."""
    parts: tuple[str, ...] = ("",)
    """``("body.",)``, ``("head.",)``; the default is all of it."""
    without_last: int = 0
    """Layers with weights, counted from the end, that are left out."""

    @property
    def needs_one_architecture(self) -> bool:
        """Whether clients can only share this if their private models have equal bodies."""
        return self.of == "model" and any("body.".startswith(part) or part.startswith("body.") for part in self.parts)


@dataclass(frozen=True)
class Update(Weights):
    """What became of weights in a round: the change of parameters, and buffers as they are now.

    A matrix may travel as two factors where these are fewer numbers (`low_rank.py`); the receiver gets their product.
    """


@dataclass(frozen=True)
class Counts:
    """How many training samples there are of each class: [C], 0 for a class without any."""


@dataclass(frozen=True)
class Statistics:
    """What a client says of its data for the report, after the last round only (`wire/statistics.py`)."""

    level: str


Entry = Vectors | VectorSets | Weights | Counts | Statistics
Declared = Mapping[str, Entry]
"""The entries of one direction, by name."""


@dataclass(frozen=True)
class Exchange:
    """Both directions of a round."""

    down: Declared = field(default_factory=dict)
    up: Declared = field(default_factory=dict)

    @property
    def needs_one_architecture(self) -> bool:
        """Whether all clients must have equal bodies."""
        entries = [*self.down.values(), *self.up.values()]
        return any(isinstance(entry, Weights) and entry.needs_one_architecture for entry in entries)


def statistics_declared(level: str) -> Declared:
    """What a reply to the final evaluation may hold: statistics of a level of ``insight``."""
    return {} if level == "none" else {"insight": Statistics(level)}

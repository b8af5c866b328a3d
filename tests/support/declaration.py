"""What an independent script declares at its top, by hand: all that a client may send."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Declared:
    """The upload after training, beside the report."""

    prototypes: tuple[str, ...] = ()
    """Arrays of the record of vectors of classes; () for no such record."""
    record: str = "prototypes"
    """Its name."""
    probabilities: bool = False
    """Its vectors are class probabilities, [P, C], where those of others are [P, D]."""
    weights: bool = False
    label_counts: bool = False
    """The record ``label_counts``: training samples of each class."""
    several: bool = False
    """A class may have several prototypes."""
    frozen: bool = False
    """Its prototypes are of the inputs of its model, which are features of frozen backbones."""
    trains: bool = True
    """Clients train a model, or have one to keep."""
    of: str = "model"
    """Whose weights: the attribute of the client's algorithm that is the module."""
    since: str = ""
    """The attribute that has these weights as they were when the round began.

    If there is one, what travels is their change since then, a matrix perhaps as two factors.
    """
    keeps: tuple[str, ...] = ()
    """What else a client keeps for its next round, beside its model."""
    own: str = "model"
    """The client's own model, which is evaluated and kept: the attribute of its algorithm."""
    beside: dict[str, str] = field(default_factory=dict)
    """Further records of weights: the name of each, and the attribute that is the module."""
    stays: tuple[str, ...] = ()
    """Prefixes of names of weights that never leave the client."""
    losses: tuple[str, ...] = ("cross-entropy",)
    minimised: tuple[str, ...] = ()
    """Those that the defaults minimise once there are prototypes; (): all."""
    acts: dict[str, Any] = field(default_factory=dict)
    """Another value for each setting that acts where all else is at its default.

    See `test_settings_act.py`.
    """

    @property
    def records(self) -> set[str]:
        """Return the names of the array records of the upload."""
        names = set(self.beside)
        if self.prototypes:
            names.add(self.record)
        if self.weights:
            names.add("weights")
        if self.label_counts:
            names.add("label_counts")
        return names

    @property
    def tells_classes(self) -> bool:
        """True if the upload shows which classes a client has."""
        return bool(self.prototypes) or self.label_counts or "moments" in self.beside

    @property
    def averages_models(self) -> bool:
        """True if whole models, or their bodies, are averaged: clients need one architecture."""
        sends_model = self.of == "model" and "body." not in self.stays
        return (self.weights or self.frozen) and sends_model

    @property
    def keeps_model(self) -> bool:
        """True if a client must keep its model, since nobody sends it all of it again."""
        if not self.trains:
            return False
        return not self.averages_models or self.own != self.of or bool(self.stays)


PLAIN = ("means", "labels")
COUNTED = (*PLAIN, "counts")

"""The exchange of an algorithm: named entries, declared once per direction in its row of the catalog.

Which clients must have equal models follows from the declared parts of weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from protofl_common.basics.text import printable

Template = Mapping[str, tuple[str, tuple[int, ...]]]  # name of an array -> (dtype, shape)


class RefusedMessage(ValueError):
    """A message that the catalog does not declare so; the text, of bounded length, says what is wrong."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


@dataclass(frozen=True)
class Limits:
    """Limits of a receiver, for the entries that are declared; a sender has none."""

    num_classes: int = 0
    feature_dim: int = 0
    max_norm: float = math.inf
    weights: Mapping[str, Template] = field(default_factory=dict)  # Declared entry of weights -> its arrays
    max_per_class: int = 1000  # vectors of one class in one message, where several are allowed at all
    frozen_dim: int = 0  # the features of all frozen backbones together
    noise: float = 0.0  # how far it may move a sum of class moments, of features of length 1; 0: they are exact
    longest: float = math.inf  # of the features whose moments have noise
    samples: float = 1.0  # of which these moments are


@dataclass(frozen=True)
class Entry:
    """An entry describes itself; `wire/payloads.py` packs, checks and sums each kind."""

    of_classes: ClassVar[bool] = False  # it shows which classes a client has: noised or refused under dp
    of_each_client: ClassVar[bool] = False  # it shows what single clients have sent
    of_all: ClassVar[bool] = False  # a part is of all classes together, of which none can be left out once it has noise

    @property
    def of_frozen(self) -> bool:
        """Return whether it is made of the features of frozen backbones, which then must be there."""
        return False

    @property
    def words(self) -> str:
        """The entry in a sentence for a site's operator."""
        return ""

    def claims(self, value: Any) -> Any:
        """Return what of a value says how many samples a site has, and of which classes."""
        return value


@dataclass(frozen=True)
class Vectors(Entry):
    """Vectors of classes, such as prototypes: [P, W] with labels [P]."""

    of_classes = True
    width: Literal["features", "classes", "backbones"] = "features"  # W: D, C (mean logits), or all frozen features
    counts: bool = False  # the number of samples behind each vector, [P], travels too; some papers do not reveal it
    several: bool = False  # a class may have several vectors, up to ``max-prototypes-per-class``
    probabilities: bool = False  # each vector is one of class probabilities: no number is below 0, and their sum is 1

    @property
    def of_frozen(self) -> bool:
        return self.width == "backbones"

    @property
    def words(self) -> str:
        vector = "mean output" if self.width == "classes" else "prototype"
        kind = f"several {vector}s of each class" if self.several else f"a {vector} of each class"
        kind += ", of frozen features" if self.width == "backbones" else ""
        return f"{kind}, with the number of samples behind it" if self.counts else kind


@dataclass(frozen=True)
class VectorSets(Entry):
    """The vectors of every client, one set each, without counts; only a server can send them."""

    words = "every client's prototypes"
    of_each_client = True


@dataclass(frozen=True)
class Weights(Entry):
    """Parameters and buffers of a module: of its layers, those whose names begin with one of ``parts``."""

    of: str = "model"  # the attribute of the client's algorithm that is the module
    parts: tuple[str, ...] = ("",)  # ``("body.",)``, ``("head.",)``; the default is all of it
    without_last: int = 0  # layers with weights, counted from the end, that are left out
    normalisation: bool = True  # False leaves out normalisation layers, with their statistics (FedBN)
    meaning: str = ""  # what the module is to a site's operator, where its name does not say it: "its control variate"

    @property
    def words(self) -> str:
        names = " and ".join(part.strip(".") for part in self.parts)
        parts = f"the {names} weights" if names else "all weights"
        model = "model" if self.of == "model" else f"{self.of} model"
        left_out = ["its last layers"] if self.without_last else []
        left_out += [] if self.normalisation else ["its normalisation layers"]
        return self.meaning or f"{parts} of the {model}{' but ' if left_out else ''}{' and '.join(left_out)}"


@dataclass(frozen=True)
class Update(Weights):
    """The change of weights in a round, and buffers as they are; two factors may stand for a matrix (`low_rank.py`)."""

    @property
    def words(self) -> str:
        return f"the changes of {super().words}"


@dataclass(frozen=True)
class Moments(Weights):
    """Class moments of frozen features (`maths/gaussian.py`): shares of the classes, class means, second moments."""

    of_classes = True
    of_all = True
    of_frozen = True
    words = "the share of each class, its mean of frozen features, and their second moments"
    of: str = "moments"

    def claims(self, value: Any) -> Any:
        return value["shares"]


@dataclass(frozen=True)
class Counts(Entry):
    """How many training samples there are of each class: [C], 0 for a class without any."""

    of_classes = True
    words = "how many samples of each class it has"


Declared = Mapping[str, Entry]  # the entries of one direction, by name


@dataclass(frozen=True)
class Exchange:
    down: Declared = field(default_factory=dict)
    up: Declared = field(default_factory=dict)

    def __post_init__(self) -> None:
        if odd := [name for name, entry in self.up.items() if entry.of_each_client]:
            raise ValueError(f"up: {odd[0]}: only a server can send every client's prototypes; declare Vectors")

    @property
    def needs_one_architecture(self) -> bool:
        """Return whether all clients must have equal bodies: they share weights of these."""
        entries = [*weights_in(self.down).values(), *weights_in(self.up).values()]
        parts = [part for entry in entries if entry.of == "model" for part in entry.parts]
        return any("body.".startswith(part) or part.startswith("body.") for part in parts)


def weights_in(declared: Declared) -> dict[str, Weights]:
    return {name: entry for name, entry in declared.items() if isinstance(entry, Weights)}


def vectors_in(declared: Declared) -> dict[str, Vectors]:
    return {name: entry for name, entry in declared.items() if isinstance(entry, Vectors)}

"""The exchange of an algorithm: named entries, declared once per direction in the catalog.

Which clients must have equal models follows from the declared parts of weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from protofl_common.basics.text import printable

VECTORS = "your vectors"
"""What a client brings in the place of features of frozen backbones, to its operator."""
ArrayType = tuple[str, tuple[int, ...]]  # (dtype, shape)
Template = Mapping[str, ArrayType]  # name of an array -> what it is


class RefusedMessage(ValueError):
    """A message is not as the catalog declares it; the text, of bounded length, says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


@dataclass(frozen=True)
class Limits:
    """Limits of a receiver, for the entries that are declared; a sender has none."""

    num_classes: int = 0
    feature_dim: int = 0
    max_norm: float = math.inf
    weights: Mapping[str, Template] = field(default_factory=dict)  # entry of weights -> its arrays
    max_per_class: int = 1000  # vectors of one class in a message, where several are allowed at all
    classes_of_a_sample: int = 1  # how many it belongs to at most
    frozen_dim: int = 0  # the features of all frozen backbones together, or of a vector

    # Class moments with noise for differential privacy.
    # how far it may move a sum of moments of features of length 1; 0: no noise
    moment_noise: float = 0.0
    max_feature_norm: float = math.inf  # the greatest length of the features
    samples: float = 1.0  # the number of samples behind the moments


@dataclass(frozen=True)
class Entry:
    """One kind of thing that travels, described; `wire/payloads.py` packs, checks and sums it."""

    shows_classes: ClassVar[bool] = False  # shows a client's classes: noised or refused under dp
    shows_single_clients: ClassVar[bool] = False  # shows what single clients have sent
    are_parameters: ClassVar[bool] = False  # a client that gets them trains them, or with them
    # has a part of all classes: with noise, none can be left out
    joins_all_classes: ClassVar[bool] = False
    noise_adds_up: ClassVar[bool] = False  # what is sent are noisy sums, and nothing made of them

    # of what it is made where it is `of_features`
    features: str = field(default="frozen features", kw_only=True)

    @property
    def of_features(self) -> bool:
        """Whether the entry is made of features that no training changes.

        They are those of frozen backbones, or vectors that the clients bring.
        """
        return False

    @property
    def words(self) -> str:
        """The entry in a sentence for a site's operator."""
        return ""

    def class_claims(self, value: Any) -> Any:
        """Return the part of ``value`` that tells which classes its sender has: here all of it.

        That is prototypes, or a tensor with a number for each class. The server compares it with
        the classes that the site has named in its introduction (`check_claims` in
        `server_app/run/replies.py`).
        """
        return value


@dataclass(frozen=True)
class Vectors(Entry):
    """Vectors of classes, such as prototypes: [P, W] with labels [P]."""

    shows_classes = True
    # W: D, C (mean logits), or all frozen features.
    width: Literal["features", "classes", "backbones"] = "features"
    counts: bool = False  # the samples behind each vector, [P], travel too; some papers hide them
    several: bool = False  # a class may have several vectors, up to ``max-prototypes-per-class``
    probabilities: bool = False  # each vector is one of class probabilities: none below 0, sum 1

    @property
    def of_features(self) -> bool:
        return self.width == "backbones"

    @property
    def words(self) -> str:
        vector = "mean output" if self.width == "classes" else "prototype"
        words = f"several {vector}s of each class" if self.several else f"a {vector} of each class"
        if self.width == "backbones":
            words += f", of {self.features}"
        if self.counts:
            words += ", with the number of samples behind it"
        return words


@dataclass(frozen=True)
class VectorSets(Entry):
    """The vectors of every client, one set each, without counts; only a server can send them."""

    words = "every client's prototypes"
    shows_single_clients = True


@dataclass(frozen=True)
class Weights(Entry):
    """Parameters and buffers of a module whose names begin with one of ``parts``."""

    are_parameters = True
    of: str = "model"  # the attribute of the client's algorithm that is the module
    parts: tuple[str, ...] = ("",)  # ``("body.",)``, ``("head.",)``; the default is all of it
    without_last: int = 0  # layers with weights, counted from the end, that are left out
    normalisation: bool = True  # False leaves out normalisation layers and statistics (FedBN)
    meaning: str = ""  # words for an operator where ``of`` says too little: "its control variate"

    @property
    def words(self) -> str:
        if self.meaning:
            return self.meaning
        names = " and ".join(part.strip(".") for part in self.parts)  # "": all of the module
        parts = f"the {names} weights" if names else "all weights"
        model = "model" if self.of == "model" else f"{self.of} model"

        left_out = []
        if self.without_last:
            left_out.append("its last layers")
        if not self.normalisation:
            left_out.append("its normalisation layers")
        but = f" but {' and '.join(left_out)}" if left_out else ""
        return f"{parts} of the {model}{but}"


@dataclass(frozen=True)
class Update(Weights):
    """The change of weights in a round, and buffers as they are.

    Two factors may stand for a matrix (`maths/low_rank.py`).
    """

    @property
    def words(self) -> str:
        return f"the changes of {super().words}"


@dataclass(frozen=True)
class Moments(Weights):
    """Class moments of features: shares of the classes, class means, second moments.

    See `maths/gaussian.py`.
    """

    shows_classes = True
    joins_all_classes = True
    are_parameters = False
    noise_adds_up = True
    of_features = True
    of: str = "moments"

    @property
    def words(self) -> str:
        parts = "the share of each class, its mean, and their second moments"
        return f"class moments of {self.features}: {parts}"

    def class_claims(self, value: Any) -> Any:
        return value["shares"]


@dataclass(frozen=True)
class Counts(Entry):
    """How many training samples there are of each class: [C], 0 for a class without any."""

    shows_classes = True
    words = "how many samples of each class it has"


Declared = Mapping[str, Entry]  # the entries of one direction, by name


@dataclass(frozen=True)
class Exchange:
    """What an algorithm's server sends ``down`` to its clients, and what they send ``up``."""

    down: Declared = field(default_factory=dict)
    up: Declared = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError if an entry is declared for uploads that only a server can send."""
        for name, entry in self.up.items():
            if entry.shows_single_clients:
                raise ValueError(
                    f"up: {name}: only a server can send every client's prototypes; declare Vectors"
                )

    @property
    def sends_weights(self) -> bool:
        """Whether the server sends parameters to the clients.

        A malicious server can choose them so that what training makes of them shows single samples,
        even in a secure sum.
        """
        return any(entry.are_parameters for entry in self.down.values())

    def with_vectors(self) -> "Exchange":
        """Return this exchange in words for the operator of a site that brings its own vectors.

        These take the place of the features of frozen backbones; what travels is the same.
        """
        up = {}
        for name, entry in self.up.items():
            up[name] = replace(entry, features=VECTORS) if entry.of_features else entry
        return replace(self, up=up)

    @property
    def needs_one_architecture(self) -> bool:
        """True if weights of the model's body travel, so that all clients need the same network.

        The names of an entry's weights begin with one of its ``parts``. So "" stands for the whole
        model, including the body, and "body.stem." for a part of the body.
        """
        for entry in (*weights_in(self.down).values(), *weights_in(self.up).values()):
            if entry.of != "model":
                continue
            for part in entry.parts:
                includes_body = "body.".startswith(part)
                is_in_body = part.startswith("body.")
                if includes_body or is_in_body:
                    return True
        return False


def weights_in(declared: Declared) -> dict[str, Weights]:
    return {name: entry for name, entry in declared.items() if isinstance(entry, Weights)}


def vectors_in(declared: Declared) -> dict[str, Vectors]:
    return {name: entry for name, entry in declared.items() if isinstance(entry, Vectors)}

"""A trained model as a file: weights and prototypes as safetensors, and a small JSON card that says what they are."""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from protofl_common.basics.files import TensorFileError, write_text
from protofl_common.basics.tensorfile import read_tensors, write_tensors
from protofl_common.basics.text import LONGEST_NAME, printable
from protofl_common.config.architectures import ARCHITECTURES, PROJECTION
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import LIBRARY_NETWORK
from protofl_common.maths.prototypes import Prototypes
from protofl_common.models.build import build_model, with_group_norm
from protofl_common.models.split import SplitModel
from protofl_common.runs.folder import CARD, KINDS, MOST_NUMBERS, WEIGHTS

FORMAT = "protofl-model-2"
LARGEST = 2**24  # of a whole number on a card


@dataclass(frozen=True)
class ModelCard:
    """All that is not a tensor."""

    run: str
    flower_run: str
    site: str
    domain: str
    algorithm: str  # as the setting ``algo`` names it
    round: int  # after which it was left
    arch: str
    input_shape: tuple[int, ...]  # of a sample: (channels, H, W), (features,), (channels, steps), (tokens,)
    input_type: str  # of its numbers, as NumPy calls it: ``uint8`` for images, ``int64`` for tokens, else ``float32``
    mean: tuple[float, ...]
    std: tuple[float, ...]  # per channel or feature, pixels in [0, 1]; the model gets (x − mean) / std; () for tokens
    backbones: tuple[str, ...]  # frozen backbones in front of the model, which then is given their features
    features_in: int  # how many these are; 0 without backbones
    feature_dim: int  # D
    classes: tuple[str, ...]  # names in label order
    inference: str  # how it predicts unless told otherwise: ``head`` or ``prototype``
    similarity: str  # how it compares with prototypes: ``l2``, or ``cosine``
    accuracy: dict[str, float]  # of each way to predict, on the site's test samples, after that round
    test_samples: int
    temperature: float  # T of the probabilities by prototype, see `calibration`
    calibrated_on: str  # the data that choose ``inference``, T, the limit of unknown inputs: ``validation``, ``test``
    chosen_on: str  # the data that chose this round as the best: ``validation``, ``test``; "": it is the run's last
    fill: tuple[float, ...] = ()  # what stands in the place of missing values, per feature; () where none may miss
    columns: tuple[str, ...] = ()  # of a table, in the order of its features: ``age``, ``sex:f|m``


@dataclass(frozen=True)
class TrainedModel:
    """The model that a site has after a run."""

    card: ModelCard
    weights: dict[str, Tensor]  # state dict of the `SplitModel`
    prototypes: Prototypes | None  # those that predict; None where the algorithm has none
    distances: Tensor
    """[n] float32, ascending: of the site's validation samples, or test samples where it has none, from their nearest
    prototypes; empty without prototypes."""

    def build(self) -> SplitModel:
        """The model, on the CPU, ready to predict; SettingsError if the weights are not of the network on the card."""
        try:
            arch = self.card.arch
            if arch in (*ARCHITECTURES, PROJECTION) or LIBRARY_NETWORK.fullmatch(arch):
                # before it takes memory that the weights do not need
                with torch.device("meta"):
                    self._untrained().load_state_dict(self.weights, assign=True)
            model = self._untrained()
            model.load_state_dict(self.weights)
        except (ValueError, RuntimeError) as error:
            raise SettingsError(f"the weights are not of the network on the model's card ({error})") from error
        return model.eval()

    def _untrained(self) -> SplitModel:
        card = self.card
        shape, classes = (card.features_in,) if card.backbones else card.input_shape, len(card.classes)
        model = build_model(card.arch, input_shape=shape, num_classes=classes, feature_dim=card.feature_dim, seed=0)
        replaced = _has_statistics(model.state_dict()) and not _has_statistics(self.weights)
        return with_group_norm(model) if replaced else model

    def write(self, file: Path) -> None:
        """Replace ``file`` in one step; TensorFileError leaves it as it was."""
        tensors = {f"model.{name}": value.cpu() for name, value in self.weights.items()}
        tensors["distances"] = self.distances
        if self.prototypes is not None:
            tensors["prototypes.means"] = self.prototypes.means.cpu()
            tensors["prototypes.labels"] = self.prototypes.labels.cpu()
        write_tensors(file, tensors, {"format": FORMAT, "card": json.dumps(dataclasses.asdict(self.card))})

    def export(self, folder: Path, unknown_above: float) -> None:
        """Both files into ``folder``; an input farther than ``unknown_above`` from every prototype is unknown."""
        self.write(folder / WEIGHTS)
        facts: dict[str, Any] = {"unknown-above": unknown_above if math.isfinite(unknown_above) else None}
        facts |= {key.replace("_", "-"): value for key, value in dataclasses.asdict(self.card).items()}
        write_text(folder / CARD, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, file: Path) -> Self:
        """The model in a file; SettingsError if there is none, if it is damaged, or of another version."""
        try:
            tensors, facts = read_tensors(file, torch.device("cpu"))
        except TensorFileError as error:
            raise SettingsError(str(error)) from error
        if facts.get("format") != FORMAT:
            raise SettingsError(f"{file} is no model of this version ({FORMAT})")
        try:
            card = _card(json.loads(facts["card"]))
        except (ValueError, KeyError) as error:
            raise SettingsError(f"{file}: its card is not one of a model ({error})") from error
        weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        prototypes = None
        if "prototypes.means" in tensors:
            prototypes = Prototypes(tensors["prototypes.means"], tensors.get("prototypes.labels", torch.empty(0)))
            if not _fits(prototypes, card):
                raise SettingsError(f"{file}: its prototypes are not of the model on its card")
        return cls(card, weights, prototypes, tensors.get("distances", torch.empty(0)))


def _has_statistics(weights: Iterable[str]) -> bool:
    return any(name.endswith("running_var") for name in weights)


def _fits(prototypes: Prototypes, card: ModelCard) -> bool:
    labels = prototypes.labels
    whole = labels.dtype == torch.int64 and prototypes.means.shape == (len(labels), card.feature_dim) and len(labels)
    return bool(whole and labels.min() >= 0 and labels.max() < len(card.classes))


def _card(facts: Any) -> ModelCard:
    """A card that a stranger may have written; ValueError names what is wrong with it."""
    kinds = get_type_hints(ModelCard)
    facts = {"fill": [], "columns": []} | facts if isinstance(facts, dict) else facts  # cards of before have none
    if not isinstance(facts, dict) or facts.keys() != kinds.keys():
        raise ValueError("not the entries of a card")
    choices: dict[str, tuple[str, ...]] = {"inference": KINDS, "similarity": ("l2", "cosine")}
    choices |= {"input_type": ("uint8", "int64", "float32"), "calibrated_on": ("validation", "test")}
    choices |= {"chosen_on": ("", "validation", "test")}
    for name, value in facts.items():
        if not _is(value, kinds[name]) or value not in choices.get(name, (value,)):
            raise ValueError(f"{name} = {printable(repr(value))}")
    means = len(facts["mean"])
    fitting = means == len(facts["std"]) and len(facts["fill"]) in (0, means)
    if not fitting or math.prod(facts["input_shape"]) > MOST_NUMBERS:
        raise ValueError("its input_shape is too large, or it has not as many means as deviations")
    return ModelCard(**facts | {name: tuple(value) for name, value in facts.items() if isinstance(value, list)})


def _is(value: Any, kind: Any) -> bool:
    """Return whether a value of a JSON file is of a type of `ModelCard`, of bounded size and fit for a terminal."""
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(_is(entry, get_args(kind)[0]) for entry in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is(entry, str) and _is(value[entry], float) for entry in value)
    if kind is str:
        return isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable()
    if kind is int:
        return type(value) is int and 0 <= value <= LARGEST
    return type(value) in (int, float) and math.isfinite(value)

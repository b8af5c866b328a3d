"""A trained model as a file: weights and prototypes as safetensors, and a small JSON card that says what they are."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from protofl_common.basics.files import TensorFileError, write_text
from protofl_common.basics.tensorfile import read_tensors, write_tensors
from protofl_common.basics.text import LONGEST_NAME, printable
from protofl_common.config.architectures import ARCHITECTURES
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import LIBRARY_NETWORK
from protofl_common.maths.prototypes import Prototypes
from protofl_common.models.build import build_model, with_group_norm
from protofl_common.models.split import SplitModel
from protofl_common.runs.folder import CARD, MOST_NUMBERS, WEIGHTS

FORMAT = "protofl-model-2"
Text = Annotated[str, Field(max_length=LONGEST_NAME, pattern=r"^[[^\p{C}\p{Z}] ]*$")]  # no control characters
Whole = Annotated[int, Field(ge=0, le=2**24)]


@dataclass(frozen=True)
class ModelCard:
    """All that is not a tensor. Of a card that a stranger may have written nothing else is read, nor of other types."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    run: Text
    flower_run: Text
    site: Text
    domain: Text
    algorithm: Text  # as the setting ``algo`` names it
    round: Whole  # after which it was left
    arch: Text
    input_shape: tuple[Whole, ...]  # of a sample: (channels, H, W), (features,), (channels, steps), (tokens,)
    input_type: Annotated[str, Field(pattern="^(uint8|int64|float32)$")]  # of images, of tokens, of other numbers
    mean: tuple[float, ...]
    std: tuple[float, ...]  # per channel or feature, pixels in [0, 1]; the model gets (x − mean) / std; () for tokens
    backbones: tuple[Text, ...]  # frozen backbones in front of the model, which then is given their features
    features_in: Whole  # how many these are; 0 without backbones
    feature_dim: Annotated[Whole, Field(gt=0)]  # D
    classes: Annotated[tuple[Text, ...], Field(min_length=1)]  # names in label order
    inference: Annotated[str, Field(pattern="^(head|prototype)$")]  # how it predicts unless told otherwise
    similarity: Annotated[str, Field(pattern="^(l2|cosine)$")]  # how it compares with prototypes
    accuracy: dict[Text, float]  # of each way to predict, on the site's test samples, after that round
    test_samples: Whole
    temperature: float  # T of the probabilities by prototype, see `fit_temperature`
    calibrated_on: Annotated[str, Field(pattern="^(validation|test)$")]
    """The data that choose ``inference``, T and the limit of unknown inputs."""
    chosen_on: Annotated[str, Field(pattern="^(validation|test)?$")]
    """The data that chose this round as the best; "": it is the run's last."""
    fill: tuple[float, ...] = ()  # what stands in the place of missing values, per feature; () where none may miss
    columns: tuple[Text, ...] = ()  # of a table, in the order of its features: ``age``, ``sex:f|m``; of texts, joined


@dataclass(frozen=True)
class TrainedModel:
    """The model that a site has after a run."""

    card: ModelCard
    weights: dict[str, Tensor]  # state dict of the `SplitModel`
    prototypes: Prototypes | None  # those that predict; None where the algorithm has none
    distances: Tensor  # [n] float32, ascending: of validation samples, or tests, from their nearest prototypes

    def build(self) -> SplitModel:
        """The model, on the CPU, ready to predict; SettingsError if the weights are not of the network on the card."""
        try:
            arch = self.card.arch
            if arch in ARCHITECTURES or LIBRARY_NETWORK.fullmatch(arch):
                with torch.device("meta"):  # before it takes memory that the weights do not need
                    self._untrained().load_state_dict(self.weights, assign=True)
            model = self._untrained()
            model.load_state_dict(self.weights)
        except (ValueError, RuntimeError, IndexError) as error:  # the last where a card has no input_shape
            raise SettingsError(f"the weights are not of the network on the model's card ({error})") from error
        return model.eval()

    def _untrained(self) -> SplitModel:
        card = self.card
        shape, classes = (card.features_in,) if card.backbones else card.input_shape, len(card.classes)
        model = build_model(card.arch, input_shape=shape, num_classes=classes, feature_dim=card.feature_dim, seed=0)
        statistics = {name for name in model.state_dict() if name.endswith("running_var")}
        return with_group_norm(model) if statistics and not statistics & self.weights.keys() else model

    def write(self, file: Path, *, durable: bool = True) -> None:
        """Replace ``file`` in one step, as `replacing` does; TensorFileError leaves it as it was."""
        tensors = {f"model.{name}": value.cpu() for name, value in self.weights.items()}
        tensors["distances"] = self.distances
        if self.prototypes is not None:
            tensors["prototypes.means"] = self.prototypes.means.cpu()
            tensors["prototypes.labels"] = self.prototypes.labels.cpu()
        facts = {"format": FORMAT, "card": json.dumps(dataclasses.asdict(self.card))}
        write_tensors(file, tensors, facts, durable=durable)

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
            card = TypeAdapter(ModelCard).validate_json(facts.get("card", ""))
        except ValidationError as error:
            problem = error.errors()[0]
            value = "" if problem["type"] == "missing" else f" = {problem['input']!r}"
            which = printable(f"{''.join(map(str, problem['loc'][:1]))}{value}: {problem['msg']}")
            raise SettingsError(f"{file}: its card is not one of a model ({which})") from error
        if len(card.std) != len(card.mean) or len(card.fill) not in (0, len(card.mean)):
            raise SettingsError(f"{file}: its card has not as many deviations, or values to fill in, as means")
        if math.prod(card.input_shape) > MOST_NUMBERS:
            raise SettingsError(f"{file}: its card has a too large input_shape, {list(card.input_shape)}")
        weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        prototypes = None
        if "prototypes.means" in tensors:
            prototypes = Prototypes(tensors["prototypes.means"], tensors.get("prototypes.labels", torch.empty(0)))
            labels, shape = prototypes.labels, (len(prototypes), card.feature_dim)
            of_classes = labels.dtype == torch.int64 and set(labels.flatten().tolist()) <= {*range(len(card.classes))}
            if not (of_classes and labels.ndim == 1 and len(labels) and prototypes.means.shape == shape):
                raise SettingsError(f"{file}: its prototypes are not of the model on its card")
        return cls(card, weights, prototypes, tensors.get("distances", torch.empty(0)))

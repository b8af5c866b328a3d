"""A trained model as a file: tensors as safetensors, and a small card that says what they are."""

import dataclasses
import json
import math
from collections.abc import Mapping
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
from protofl_common.tasks import Task, task_of

FORMAT = "protofl-model-2"
# Without control characters.
Text = Annotated[str, Field(max_length=LONGEST_NAME, pattern=r"^[[^\p{C}\p{Z}] ]*$")]
Whole = Annotated[int, Field(ge=0, le=2**24)]


@dataclass(frozen=True)
class ModelCard:
    """All that a file has of a trained model beside its tensors.

    A stranger may have written it: a card with other keys, or values of other types, is refused.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    run: Text
    flower_run: Text
    site: Text
    domain: Text
    algorithm: Text  # as the setting ``algo`` names it
    round: Whole  # after which it was left
    arch: Text

    # Of a sample: (channels, H, W), (features,), (channels, steps), (tokens,).
    input_shape: tuple[Whole, ...]
    # Of images, of tokens, of other numbers.
    input_type: Annotated[str, Field(pattern="^(uint8|int64|float32)$")]
    # Per channel or feature, of pixels in [0, 1]; the model gets (x − mean) / std; () for tokens.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    backbones: tuple[Text, ...]  # frozen, in front of the model, which is given their features
    features_in: Whole  # how many these features are; 0 without backbones
    feature_dim: Annotated[Whole, Field(gt=0)]  # D
    classes: Annotated[tuple[Text, ...], Field(min_length=1)]  # names in label order

    # How it predicts unless told otherwise.
    inference: Annotated[str, Field(pattern="^(head|prototype)$")]
    # How it compares with prototypes.
    similarity: Annotated[str, Field(pattern="^(l2|cosine)$")]
    accuracy: dict[Text, float]  # of each way to predict, on the site's test samples of that round
    test_samples: Whole
    temperature: float  # T of the probabilities by prototype, see `Task.temperature`
    # The data that choose ``inference``, T and the limit of unknown inputs.
    calibrated_on: Annotated[str, Field(pattern="^(validation|test)$")]
    # The data that chose this round as the best; "": it is the run's last.
    chosen_on: Annotated[str, Field(pattern="^(validation|test)?$")]

    # What stands in the place of missing values, per feature; () where none may miss.
    fill: tuple[float, ...] = ()
    # Of a table, in the order of its features: ``age``, ``sex:f|m``; of texts, joined.
    columns: tuple[Text, ...] = ()

    # Whether a sample has one label or several, as the setting ``task`` says.
    task_kind: Annotated[str, Field(pattern="^(single-label|multi-label)$")] = "single-label"

    @property
    def task(self) -> Task:
        return task_of(self.classes, self.task_kind)


@dataclass(frozen=True)
class TrainedModel:
    """The model that a site has after a run."""

    card: ModelCard
    weights: dict[str, Tensor]  # state dict of the `SplitModel`
    prototypes: Prototypes | None  # those that predict; None where the algorithm has none
    # [n] float32, ascending: of validation samples, or tests, from their nearest prototypes.
    distances: Tensor

    def build(self) -> SplitModel:
        """Return the model, on the CPU, ready to predict.

        SettingsError if the weights are not of the network on the card.
        """
        arch = self.card.arch
        try:
            if arch in ARCHITECTURES or LIBRARY_NETWORK.fullmatch(arch):
                # a stranger's card may ask for a huge network: tried first without memory
                with torch.device("meta"):
                    self._untrained().load_state_dict(self.weights, assign=True)
            model = self._untrained()
            model.load_state_dict(self.weights)
        except (ValueError, RuntimeError, IndexError) as error:  # IndexError: input_shape is ()
            raise SettingsError(
                f"the weights are not of the network on the model's card ({error})"
            ) from error
        return model.eval()

    def _untrained(self) -> SplitModel:
        """Build the network on the card, with the layers that the weights belong to."""
        card = self.card
        model = build_model(
            card.arch,
            input_shape=(card.features_in,) if card.backbones else card.input_shape,
            num_classes=card.task.num_outputs,
            feature_dim=card.feature_dim,
            seed=0,  # any would do: all weights are replaced
        )
        # GroupNorm has no running statistics: it was in the place of BatchNorm if these weights
        # lack them
        statistics = {name for name in model.state_dict() if name.endswith("running_var")}
        if statistics and statistics.isdisjoint(self.weights):
            model = with_group_norm(model)
        return model

    def write(self, file: Path, *, durable: bool = True) -> None:
        """Write the model to ``file`` in one step, as `replacing` does.

        A power cut may undo what is not ``durable``. TensorFileError if it cannot be written.
        """
        tensors = {f"model.{name}": value.cpu() for name, value in self.weights.items()}
        tensors["distances"] = self.distances
        if self.prototypes is not None:
            tensors["prototypes.means"] = self.prototypes.means.cpu()
            tensors["prototypes.labels"] = self.prototypes.labels.cpu()
        facts = {"format": FORMAT, "card": json.dumps(dataclasses.asdict(self.card))}
        write_tensors(file, tensors, facts, durable=durable)

    def export(self, folder: Path, unknown_above: float) -> None:
        """Write the model, and its card as JSON, into ``folder``.

        The card has the limit ``unknown_above`` too: an input farther than that from every
        prototype is unknown. ∞, without a limit, is written as null.
        """
        self.write(folder / WEIGHTS)
        limit = unknown_above if math.isfinite(unknown_above) else None
        facts: dict[str, Any] = {"unknown-above": limit}
        for key, value in dataclasses.asdict(self.card).items():
            facts[key.replace("_", "-")] = value
        write_text(folder / CARD, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a model; SettingsError if there is none, or it is damaged or of another version."""
        try:
            tensors, facts = read_tensors(file, torch.device("cpu"))
        except TensorFileError as error:
            raise SettingsError(str(error)) from error
        if facts.get("format") != FORMAT:
            raise SettingsError(f"{file} is no model of this version ({FORMAT})")
        card = _card_in(file, facts.get("card", ""))
        weights = {}
        for name, value in tensors.items():
            if name.startswith("model."):
                weights[name.removeprefix("model.")] = value
        prototypes = None
        if "prototypes.means" in tensors:
            prototypes = _prototypes_in(file, tensors, card)
        return cls(card, weights, prototypes, tensors.get("distances", torch.empty(0)))


def _card_in(file: Path, text: str) -> ModelCard:
    """Read the card of a file from JSON; SettingsError for one that no model can have."""
    try:
        card = TypeAdapter(ModelCard).validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        key = "".join(map(str, problem["loc"][:1]))  # "" where it is about the whole text
        value = "" if problem["type"] == "missing" else f" = {problem['input']!r}"
        reason = printable(f"{key}{value}: {problem['msg']}")
        raise SettingsError(f"{file}: its card is not one of a model ({reason})") from error

    if len(card.std) != len(card.mean) or len(card.fill) not in (0, len(card.mean)):
        raise SettingsError(
            f"{file}: its card has not as many deviations, or values to fill in, as means"
        )
    if math.prod(card.input_shape) > MOST_NUMBERS:
        raise SettingsError(
            f"{file}: its card has a too large input_shape, {list(card.input_shape)}"
        )
    return card


def _prototypes_in(file: Path, tensors: Mapping[str, Tensor], card: ModelCard) -> Prototypes:
    """Return the prototypes among a file's ``tensors``, which have ``prototypes.means``.

    SettingsError where they have no labels, or do not fit the model on the card.
    """
    means = tensors["prototypes.means"]
    labels = tensors.get("prototypes.labels", torch.empty(0))  # missing ones are refused below
    is_list = labels.dtype == torch.int64 and labels.ndim == 1 and len(labels) > 0
    are_of_classes = is_list and set(labels.tolist()) <= set(range(card.task.num_classes))
    if not are_of_classes or means.shape != (len(labels), card.feature_dim):
        raise SettingsError(f"{file}: its prototypes do not fit the model on its card")
    return Prototypes(means, labels)

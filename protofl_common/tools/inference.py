"""A model that a run has left at a site, outside of any federation.

It predicts by its head or by prototypes, and can be exported as ONNX.
"""

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from protofl_common.backbones.features import extract_features
from protofl_common.config.backbones import is_allowed
from protofl_common.config.lists import names_in
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allowing
from protofl_common.data.objects import inputs_for
from protofl_common.data.raw import Inputs, filled, normalised
from protofl_common.maths.prototypes import distances, unknown_above
from protofl_common.models.trained import TrainedModel
from protofl_common.runs.folder import CARD, WEIGHTS
from protofl_common.tasks.metrics import KINDS, LARGEST_SCORE
from protofl_common.tools import UNKNOWN_SHARE

ONNX = "model.onnx"
BATCH_SIZE = 256  # inputs that are predicted at a time
OPSET = 18  # The version of ONNX's operators


@dataclass(frozen=True)
class Prediction:
    """What a model says of one sample."""

    label: int | list[int]  # Index of the class; of several labels, 1 for each that holds, or 0
    name: str  # Of several labels those that hold, with commas
    probability: float  # Of several labels that of the least certain one
    nearest: str | None = None  # What the nearest prototypes predict; the head need not agree
    distance: float | None = None  # From the nearest of all prototypes
    unknown: bool = False  # Farther from every prototype than nearly all samples of the site are
    # Of each of several labels; None where it is not known, for lack of prototypes of the label
    probabilities: dict[str, float | None] = field(default_factory=dict)


Outputs = tuple[dict[str, Tensor], Tensor | None]
"""On the CPU: scores [N, C] by "head" and "prototype", and distances [N, P] from each prototype.

Without prototypes there are no such scores, and the distances are None.
"""


class Predictor:
    """A model in use: ``Predictor.load("model").predict(inputs)[0].name``.

    ``threshold`` is the distance above which a sample is unknown; without it the distance above
    which 5 % of the site's own samples are. ``allow`` names frozen backbones that the model may
    read or download beside the embedded ones; SettingsError for another.
    """

    def __init__(
        self,
        trained: TrainedModel,
        threshold: float | None = None,
        device: str = "cpu",
        allow: str = "",
    ) -> None:
        """Build the model on its device; SettingsError for a backbone that is not allowed."""
        self.card = trained.card
        for name in self.card.backbones:
            if not is_allowed(name, allow):
                raise SettingsError(
                    f"the model of {self.card.site} asks for the backbone {name}; "
                    f"give --allow-backbones {name} to let it"
                )
        self.device = torch.device(device)
        self.model = trained.build().to(self.device)
        self.prototypes = trained.prototypes
        if self.prototypes is not None:
            self.prototypes = self.prototypes.to(self.device)
        if threshold is None:
            threshold = unknown_above(trained.distances, UNKNOWN_SHARE)
        self.threshold = threshold
        possible = KINDS if self.prototypes is not None else ("head",)
        # ways to predict by which the site has measured the model
        self.inferences = tuple(name for name in possible if name in self.card.accuracy)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str = "cpu",
        allow_backbones: str = "",
        allow_python: str = "",
    ) -> Self:
        """Load an exported model: a folder with ``model.safetensors`` and ``model.json``.

        ``allow_backbones`` and ``allow_python`` name, with commas, frozen backbones and Python
        modules that the model may load, as those options of ``protofl predict`` do.

        SettingsError for files that are missing or do not fit each other, a backbone or module that
        is not allowed, and a device that this machine lacks.
        """
        folder = Path(folder)
        try:
            torch.empty(0, device=device)  # for its error
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise SettingsError(f"device = {device!r}: not usable here ({reason})") from error
        trained = TrainedModel.read(folder / WEIGHTS)
        try:
            limit = json.loads((folder / CARD).read_text(encoding="utf-8"))["unknown-above"]
            threshold = float("inf") if limit is None else float(limit)  # null: none is unknown
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(f"{folder / CARD} cannot be read ({error})") from error
        with allowing(names_in(allow_python)):
            return cls(trained, threshold, device, allow_backbones)

    def chosen_inference(self, by: str | None) -> str:
        """Return how to predict, "head" or "prototype": ``by``, or without it as the card says.

        SettingsError where the model cannot predict so.
        """
        by = by or self.card.inference
        if by not in self.inferences:
            ways = " or ".join(self.inferences)
            raise SettingsError(f"by = {by!r}: this model predicts by {ways}")
        return by

    def predict(self, inputs: Any, by: str | None = None) -> list[Prediction]:
        """Predict for inputs [N, …] that are not normalised, or a data frame with their columns.

        ``by`` "head" or "prototype"; None: as the model's card says. SettingsError if the model
        cannot predict so; DataError for inputs that do not fit the model.
        """
        by = self.chosen_inference(by)
        predictions: list[Prediction] = []
        for batch in self._batches(inputs):
            predictions += self._predictions(batch, by)
        return predictions

    def scores(self, inputs: Any) -> dict[str, Tensor]:
        """Return the scores by which the model predicts N inputs of C classes: [N, C], on the CPU.

        For "head" they are its logits, for "prototype" −d²/T, with d the distance from the nearest
        prototype of the class and T the card's temperature; −∞ for a class without prototypes.
        For a task of L labels they are [N, L], above 0 where the label is predicted, and ±∞ where
        there are no prototypes of the samples with the label, or of those without it.
        """
        batches = [self._outputs(batch)[0] for batch in self._batches(inputs)]
        return {name: torch.cat([scores[name] for scores in batches]) for name in self.inferences}

    @torch.inference_mode()
    def features(self, inputs: Any) -> Tensor:
        """Return D features of each of N inputs, [N, D], from which head and prototypes predict."""
        batches = self._batches(inputs)
        return torch.cat([self.model.body(self.values(batch)).cpu() for batch in batches])

    def _batches(self, inputs: Any) -> Iterator[Inputs]:
        """Yield the inputs in batches of at most `BATCH_SIZE`.

        Without inputs there is one empty batch, so that the results [0, C] know the number of
        classes.
        """
        inputs = inputs_for(self.card, inputs)
        for start in range(0, max(1, len(inputs)), BATCH_SIZE):
            yield inputs[start : start + BATCH_SIZE]

    def outputs(self, inputs: Any) -> Outputs:
        """Return scores and distances for a batch of N inputs [N, …] that are not normalised."""
        return self._outputs(inputs_for(self.card, inputs))

    @torch.inference_mode()
    def _outputs(self, inputs: Inputs) -> Outputs:
        """Return the `outputs` of inputs that have been checked."""
        features_ND = self.model.body(self.values(inputs))
        scores = {"head": self.model.head(features_ND).cpu()}
        prototypes = self.prototypes
        if prototypes is None:
            return scores, None
        distances_NP = distances(features_ND, prototypes, self.card.similarity).cpu()
        scores_NO = self.card.task.scores(distances_NP, prototypes.labels.cpu())
        is_finite_NO = scores_NO.abs() < LARGEST_SCORE
        infinite_NO = scores_NO.sign() * math.inf
        scores["prototype"] = (scores_NO / self.card.temperature).where(is_finite_NO, infinite_NO)
        return scores, distances_NP

    def values(self, inputs: Inputs) -> Tensor:
        """Return what the network takes for inputs [N, …], on its device.

        That is the inputs normalised, or their features of the card's frozen backbones; missing
        values are filled first.
        """
        card = self.card
        inputs = filled(inputs, card.fill)
        if card.backbones:
            return extract_features(inputs, card.backbones, self.device).to(self.device)
        return normalised(inputs, card.mean, card.std, self.device)

    def _predictions(self, batch: Inputs, by: str) -> list[Prediction]:
        """Predict one batch of inputs ``by`` "head" or "prototype"."""
        task = self.card.task
        scores, distances_NP = self._outputs(batch)
        labels_N = task.predicted(scores[by])
        names_of_nearest: list[str | None] = [None] * len(batch)
        shortest: list[float | None] = [None] * len(batch)  # distance from any prototype
        if self.prototypes is not None and distances_NP is not None:
            nearest_N = task.nearest(distances_NP, self.prototypes.labels.cpu())
            names_of_nearest = [*task.names(nearest_N)]
            shortest = distances_NP.amin(1).tolist()
            if by == "prototype":
                labels_N = nearest_N

        columns = (
            labels_N.tolist(),
            task.names(labels_N),
            task.probabilities(scores[by], labels_N).tolist(),
            names_of_nearest,
            shortest,
            task.of_each(scores[by]),
        )
        predictions = []
        for label, name, probability, nearest, distance, of_each in zip(*columns, strict=True):
            # "not <=" where ">" would be false for a distance of NaN, which is unknown, too
            unknown = distance is not None and not distance <= self.threshold
            predictions.append(
                Prediction(label, name, probability, nearest, distance, unknown, of_each)
            )
        return predictions


class _ModelForOnnx(nn.Module):
    """The model with the normalisation of its inputs before it, and distances behind it."""

    def __init__(self, trained: TrainedModel) -> None:
        """Take the network, its prototypes, and from its card how inputs are normalised."""
        super().__init__()
        card = trained.card
        self.model = trained.build()
        self.prototypes = trained.prototypes
        # of inputs [N, channels, height, width] the second axis: (-1, 1, 1)
        per_channel = (-1, *(1,) * (len(card.input_shape) - 1))
        self.mean = torch.tensor(card.mean).view(per_channel)
        self.std = torch.tensor(card.std).view(per_channel)
        self.fill = torch.tensor(card.fill).view(per_channel)
        self.scale = 255 if card.input_type == "uint8" else 1  # bytes are scaled to [0, 1] first
        self.similarity = card.similarity

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return logits [N, C] of N inputs and, where there are P prototypes, distances [N, P].

        ``inputs`` [N, …] are not normalised.
        """
        if len(self.fill):  # empty where no value can be missing
            inputs = torch.where(inputs.isnan(), self.fill, inputs)
        if len(self.mean):  # empty where nothing is to be normalised, as with tokens
            inputs = (inputs / self.scale - self.mean) / self.std
        features_ND = self.model.body(inputs)
        logits = self.model.head(features_ND)
        if self.prototypes is None:
            return (logits,)

        # Distances as in `maths/prototypes.py`, but for ``cdist``, which no exporter knows
        means_PD = self.prototypes.means
        if self.similarity == "cosine":
            features_ND = normalize(features_ND, dim=1)
            means_PD = normalize(means_PD, dim=1)
        differences_NPD = features_ND[:, None] - means_PD
        return logits, differences_NPD.square().sum(2).sqrt()


def write_onnx(trained: TrainedModel, file: Path) -> None:
    """Write the model as ONNX, for programs without PyTorch.

    Input   ``inputs`` [N, …] as the data set stores them, not normalised: float32, pixels in
            [0, 255]; tokens int64
    Outputs ``logits`` [N, C] of the head, and, where the model has prototypes, ``distances`` [N, P]
            from them

    SettingsError without the packages of ONNX, and for a model behind frozen backbones.
    """
    card = trained.card
    if card.backbones:
        raise SettingsError(
            "--onnx: "
            f"{card.site}'s model has frozen backbones in front of it, which are not exported"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    dtype = torch.float32 if card.mean else torch.int64  # tokens are not normalised
    example = torch.zeros(2, *card.input_shape, dtype=dtype)  # of 1 input its number would be fixed
    outputs = ["logits"]
    if trained.prototypes is not None:
        outputs.append("distances")
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(
                _ModelForOnnx(trained).eval(),
                (example,),
                str(file),
                opset_version=OPSET,
                dynamo=True,
                external_data=False,
                verbose=False,
                input_names=["inputs"],
                output_names=outputs,
                dynamic_shapes={"inputs": {0: torch.export.Dim("N", min=1)}},
            )
    except ImportError as error:
        raise SettingsError(
            f"--onnx: {error.name} is not installed; pip install 'protofl[onnx]'"
        ) from error

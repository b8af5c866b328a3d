"""A model that a run has left at a site, outside of any federation: predictions by head or prototypes, and ONNX."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from protofl_common.backbones.features import extract_features
from protofl_common.basics.text import names_in
from protofl_common.config.backbones import is_allowed
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allowing
from protofl_common.data.raw import DataError, Inputs, filled, normalised
from protofl_common.maths.prototypes import class_scores, distances, unknown_above
from protofl_common.models.trained import TrainedModel
from protofl_common.runs.folder import CARD, KINDS, WEIGHTS
from protofl_common.tools import UNKNOWN_SHARE

ONNX, OPSET = "model.onnx", 18


@dataclass(frozen=True)
class Prediction:
    label: int  # index of the class
    name: str
    probability: float
    nearest: str | None = None  # class of the nearest prototype, with which the head need not agree
    distance: float | None = None  # from it
    unknown: bool = False  # farther from every prototype than the samples of the site are


Outputs = tuple[dict[str, Tensor], Tensor | None]
"""On the CPU: scores [N, C] for each way to predict, and distances [N, P] from each prototype, where there are any."""


class Predictor:
    """A model in use: ``Predictor.load("model").predict(inputs)[0].name``.

    ``threshold``: the distance above which a sample is unknown; None: as 5 % of the site's own samples are.
    ``allow``: frozen backbones that it may read or download, beside the embedded ones; SettingsError for another.
    """

    def __init__(
        self,
        trained: TrainedModel,
        threshold: float | None = None,
        device: str = "cpu",
        allow: str = "",
    ) -> None:
        self.card = trained.card
        if odd := [name for name in self.card.backbones if not is_allowed(name, allow)]:
            asks = f"the model of {self.card.site} asks for the backbone {odd[0]}"
            raise SettingsError(f"{asks}; give --allow-backbones {odd[0]} to let it")
        self.device = torch.device(device)
        self.model = trained.build().to(self.device)
        self.prototypes = None if trained.prototypes is None else trained.prototypes.to(self.device)
        self.threshold = (
            unknown_above(trained.distances, UNKNOWN_SHARE) if threshold is None else threshold
        )
        ways = KINDS if self.prototypes is not None else ("head",)
        self.inferences = tuple(way for way in ways if way in self.card.accuracy)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str = "cpu",
        allow_backbones: str = "",
        allow_python: str = "",
    ) -> Self:
        """From an exported model: a folder with ``model.safetensors`` and ``model.json``.

        ``allow_backbones`` and ``allow_python`` are those options of ``protofl predict``: names with commas.

        SettingsError for parts that are missing or do not fit, and for a backbone, module or device that is refused.
        """
        folder = Path(folder)
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise SettingsError(
                f"device = {device!r}: not usable here ({str(error).splitlines()[0]})"
            ) from error
        trained = TrainedModel.read(folder / WEIGHTS)
        try:
            limit = json.loads((folder / CARD).read_text(encoding="utf-8"))["unknown-above"]
            threshold = float("inf") if limit is None else float(limit)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(f"{folder / CARD} cannot be read ({error})") from error
        with allowing(names_in(allow_python)):
            return cls(trained, threshold, device, allow_backbones)

    def way(self, by: str | None) -> str:
        """``by`` where this model predicts so, its own way for none; SettingsError for another."""
        by = by or self.card.inference
        if by not in self.inferences:
            raise SettingsError(
                f"by = {by!r}: this model predicts by {' or '.join(self.inferences)}"
            )
        return by

    def predict(
        self, inputs: Inputs, by: str | None = None, batch_size: int = 256
    ) -> list[Prediction]:
        """Predictions for inputs [N, …], not normalised; SettingsError or DataError where these do not fit."""
        by = self.way(by)
        return [
            prediction
            for outputs in self._batches(inputs, batch_size)
            for prediction in self._read(*outputs, by)
        ]

    def scores(self, inputs: Inputs, batch_size: int = 256) -> dict[str, Tensor]:
        """For each way [N, C], on the CPU: logits; −d²/T from each class's nearest prototype, −∞ for none."""
        parts = [scores for scores, _ in self._batches(inputs, batch_size)]
        return {way: torch.cat([part[way] for part in parts]) for way in self.inferences}

    def _batches(self, inputs: Inputs, size: int) -> Iterator[Outputs]:
        return (
            self.outputs(inputs[start : start + size])
            for start in range(0, max(1, len(inputs)), size)
        )

    @torch.inference_mode()
    def outputs(self, inputs: Inputs) -> Outputs:
        features, prototypes = self.model.body(self.values(inputs)), self.prototypes
        scores = {"head": self.model.head(features).cpu()}
        if prototypes is None:
            return scores, None
        distances_NP = distances(features, prototypes, self.card.similarity).cpu()
        of_classes = class_scores(distances_NP, prototypes.labels.cpu(), len(self.card.classes))
        return scores | {"prototype": of_classes / self.card.temperature}, distances_NP

    def values(self, inputs: Inputs) -> Tensor:
        """Return the model's input: inputs [N, …] normalised, or features of frozen backbones."""
        card = self.card
        casting: Literal["no", "same_kind"] = "no" if card.input_type == "uint8" else "same_kind"
        if (
            not np.can_cast(inputs.dtype, card.input_type, casting)
            or inputs.shape[1:] != card.input_shape
        ):
            wanted = f"{card.input_type} [N, *{list(card.input_shape)}]"
            raise DataError(f"inputs are {inputs.dtype} {list(inputs.shape)}, not {wanted}")
        inputs = filled(inputs.astype(card.input_type, copy=False), card.fill)
        if card.backbones:
            return extract_features(inputs, card.backbones, self.device).to(self.device)
        return normalised(inputs, card.mean, card.std, self.device)

    def _read(
        self, scores_of: dict[str, Tensor], distances_NP: Tensor | None, by: str
    ) -> list[Prediction]:
        scores, names = scores_of[by], self.card.classes
        labels = scores.argmax(1)
        near: list[tuple[str | None, float | None, bool]] = [(None, None, False)] * len(labels)
        if self.prototypes is not None and distances_NP is not None:
            nearest = self.prototypes.labels.cpu()[distances_NP.argmin(1)]
            labels = nearest if by == "prototype" else labels
            pairs = zip(nearest.tolist(), distances_NP.amin(1).tolist(), strict=True)
            near = [
                (names[label], distance, distance > self.threshold) for label, distance in pairs
            ]
        rows = zip(
            labels.tolist(),
            scores.softmax(1).gather(1, labels[:, None])[:, 0].tolist(),
            near,
            strict=True,
        )
        return [Prediction(label, names[label], share, *nearest) for label, share, nearest in rows]


class _Whole(nn.Module):
    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        card, self.model, self.prototypes = trained.card, trained.build(), trained.prototypes
        per_channel = (-1, *(1,) * (len(card.input_shape) - 1))
        self.mean, self.std, self.fill = (
            torch.tensor(of).view(per_channel) for of in (card.mean, card.std, card.fill)
        )
        self.scale, self.similarity = 255 if card.input_type == "uint8" else 1, card.similarity

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        inputs = torch.where(inputs.isnan(), self.fill, inputs) if len(self.fill) else inputs
        features = self.model.body(
            (inputs / self.scale - self.mean) / self.std if len(self.mean) else inputs
        )
        logits = self.model.head(features)
        if self.prototypes is None:
            return (logits,)
        means_PD = (
            self.prototypes.means
        )  # distances as in `maths/prototypes.py`, whose ``cdist`` no exporter knows
        if self.similarity == "cosine":
            features, means_PD = normalize(features, dim=1), normalize(means_PD, dim=1)
        return logits, (features[:, None] - means_PD).square().sum(2).sqrt()


def write_onnx(trained: TrainedModel, file: Path) -> None:
    """Write ONNX, for programs without PyTorch; SettingsError without its packages, and behind frozen backbones.

    Input   ``inputs`` [N, …] as the data set stores them, not normalised: float32, pixels in [0, 255]; tokens int64
    Outputs ``logits`` [N, C] of the head, and, where the model has prototypes, ``distances`` [N, P] from them
    """
    card = trained.card
    if card.backbones:
        raise SettingsError(
            f"--onnx: {card.site}'s model has frozen backbones in front of it, which are not exported"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    example = torch.zeros(2, *card.input_shape, dtype=torch.float32 if card.mean else torch.int64)
    names = ["logits"] if trained.prototypes is None else ["logits", "distances"]
    shapes = {"inputs": {0: torch.export.Dim("N", min=1)}}
    how: dict[str, Any] = {
        "opset_version": OPSET,
        "dynamo": True,
        "external_data": False,
        "verbose": False,
    }
    how |= {"input_names": ["inputs"], "output_names": names, "dynamic_shapes": shapes}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(_Whole(trained).eval(), (example,), str(file), **how)
    except ImportError as error:
        raise SettingsError(
            f"--onnx: {error.name} is not installed; pip install 'protofl[onnx]'"
        ) from error

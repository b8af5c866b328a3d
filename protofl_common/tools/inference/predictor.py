"""Predicting with a trained model, by its head or by the nearest prototype; and image files as it wants them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protofl_common.backbones.extract import extract_features
from protofl_common.datasets.folders import read_image
from protofl_common.datasets.images import normalised
from protofl_common.datasets.raw import Images
from protofl_common.models.calibration import class_scores, unknown_above
from protofl_common.models.trained import CARD, WEIGHTS, ModelCard, TrainedModel
from protofl_common.options import SettingsError
from protofl_common.prototypes import distances
from protofl_common.tools import UNKNOWN_SHARE


@dataclass(frozen=True)
class Prediction:
    """What is said of an image."""

    label: int
    """Index of the class."""
    name: str
    """Its name."""
    probability: float
    nearest: str | None = None
    """Class of the nearest prototype, which the head need not agree with; None without prototypes."""
    distance: float | None = None
    """From it."""
    unknown: bool = False
    """Farther from every prototype than the images of the site are."""


@dataclass(frozen=True)
class Outputs:
    """Of N images, on the CPU."""

    logits_NC: Tensor
    """Of the head."""
    distances_NP: Tensor | None
    """From each prototype."""


class Predictor:
    """A model in use.

    Parameters
    ----------
    trained
        The model.
    threshold
        Distance above which an image is unknown; None: as 5 % of the site's own test images are.
    device
        Where it computes.

    Example
    -------
    >>> predictor = Predictor.load("model")                    # doctest: +SKIP
    >>> predictor.predict(images)[0].name                      # doctest: +SKIP
    'zebra'
    """

    def __init__(self, trained: TrainedModel, threshold: float | None = None, device: str = "cpu") -> None:
        self.card = trained.card
        self.device = torch.device(device)
        self.model = trained.build().to(self.device)
        self.prototypes = None if trained.prototypes is None else trained.prototypes.to(self.device)
        self.threshold = unknown_above(trained.distances, UNKNOWN_SHARE) if threshold is None else threshold

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> Predictor:
        """From an exported model: a folder with ``model.safetensors`` and ``model.json``.

        Raises
        ------
        SettingsError
            If it is not all there.
        """
        folder = Path(folder)
        trained = TrainedModel.read(folder / WEIGHTS)
        try:
            limit = json.loads((folder / CARD).read_text(encoding="utf-8"))["unknown-above"]
        except (OSError, ValueError, KeyError) as error:
            raise SettingsError(f"{folder / CARD} cannot be read ({error})") from error
        return cls(trained, float("inf") if limit is None else float(limit), device)

    @property
    def inferences(self) -> tuple[str, ...]:
        """The ways in which this model can predict."""
        return tuple(self.card.accuracy)

    def predict(self, images: Images, by: str | None = None, batch_size: int = 256) -> list[Prediction]:
        """Predictions for images uint8 [N, channels, H, W], of the model's own size; ``by``: head or prototype.

        Raises
        ------
        SettingsError
            If this model cannot predict that way.
        ValueError
            If the images do not have the form that it wants.
        """
        by = by or self.card.inference
        if by not in self.inferences:
            raise SettingsError(f"by = {by!r}: this model predicts by {' or '.join(self.inferences)}")
        given = [self.outputs(images[start : start + batch_size]) for start in range(0, len(images), batch_size)]
        return [prediction for outputs in given for prediction in self._read(outputs, by)]

    @torch.inference_mode()
    def outputs(self, images: Images) -> Outputs:
        """Logits and distances of a batch."""
        card = self.card
        wanted = (card.channels, card.image_size, card.image_size)
        if images.dtype != np.uint8 or images.shape[1:] != wanted:
            raise ValueError(f"images are {images.dtype} {list(images.shape)}, not uint8 [N, *{list(wanted)}]")
        if card.backbones:
            inputs = extract_features(images, card.backbones, self.device).to(self.device)
        else:
            inputs = normalised(images, card.mean, card.std, self.device)
        features = self.model.body(inputs)
        apart = None if self.prototypes is None else distances(features, self.prototypes, card.similarity).cpu()
        return Outputs(self.model.head(features).cpu(), apart)

    def _read(self, outputs: Outputs, by: str) -> list[Prediction]:
        scores = outputs.logits_NC
        labels, nearest, apart = scores.argmax(1), None, None
        if self.prototypes is not None and outputs.distances_NP is not None:
            of_prototypes = self.prototypes.labels.cpu()
            apart, nearest = outputs.distances_NP.amin(1), of_prototypes[outputs.distances_NP.argmin(1)]
            if by == "prototype":
                scores = class_scores(outputs.distances_NP, of_prototypes, len(self.card.classes))
                scores /= self.card.temperature
                labels = nearest
        probabilities = scores.softmax(1).gather(1, labels[:, None])[:, 0]
        return [self._told(i, labels, probabilities, nearest, apart) for i in range(len(labels))]

    def _told(
        self, i: int, labels: Tensor, probabilities: Tensor, nearest: Tensor | None, apart: Tensor | None
    ) -> Prediction:
        label, names = int(labels[i]), self.card.classes
        if nearest is None or apart is None:
            return Prediction(label, names[label], float(probabilities[i]))
        distance = float(apart[i])
        return Prediction(
            label, names[label], float(probabilities[i]), names[int(nearest[i])], distance, distance > self.threshold
        )


def read_images(files: Sequence[Path], card: ModelCard) -> Images:
    """uint8 [N, channels, size, size]: stretched to the model's size, and grey where it has seen grey images.

    DataError for a file that cannot be read.
    """
    colour = np.stack([read_image(file, card.image_size) for file in files])
    return colour if card.channels == 3 else _grey(colour)


def _grey(colour: Images) -> Images:
    """[N, 3, H, W] -> [N, 1, H, W]: luma as PIL computes it (ITU-R 601-2), so that a grey file stays as it is."""
    weights = np.array([19595, 38470, 7471], dtype=np.int64)
    return np.asarray((np.tensordot(weights, colour, axes=(0, 1)) + 0x8000) >> 16, dtype=np.uint8)[:, None]

"""A trained model as a file: weights and prototypes as safetensors, and a small JSON card that says what they are."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protofl_common.config.options import SettingsError
from protofl_common.files import write_text
from protofl_common.models.build import build_model
from protofl_common.models.split import SplitModel
from protofl_common.prototypes import Prototypes
from protofl_common.tensorfile import TensorFileError, read_tensors, write_tensors

FORMAT = "protofl-model-2"
WEIGHTS, CARD = "model.safetensors", "model.json"
"""The two files of an exported model; a client leaves the first alone, with the card among its metadata."""


@dataclass(frozen=True)
class ModelCard:
    """All that is not a tensor."""

    run: str
    site: str
    domain: str
    algorithm: str
    """As the setting ``algo`` names it."""
    round: int
    """After which it was left."""
    arch: str
    input_shape: tuple[int, ...]
    """Of a sample: (channels, H, W), (features,), (channels, steps), (tokens,)."""
    input_type: str
    """Of its numbers, as NumPy calls it: ``uint8`` for images, ``int64`` for tokens, else ``float32``."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Per channel or feature, for pixels in [0, 1]; what the model is given is (x − mean) / std. () for tokens."""
    backbones: tuple[str, ...]
    """Frozen backbones in front of the model, which then is given their features."""
    features_in: int
    """How many these are; 0 without backbones."""
    feature_dim: int
    """D."""
    classes: tuple[str, ...]
    """Names in label order."""
    inference: str
    """How it predicts unless told otherwise: ``head`` or ``prototype``."""
    similarity: str
    """How it compares with prototypes: ``l2``, or ``cosine``."""
    accuracy: dict[str, float]
    """Of each way to predict, on the site's test samples, at the end of the run."""
    test_samples: int
    temperature: float
    """T of the probabilities by prototype, see `calibration`."""


@dataclass(frozen=True)
class TrainedModel:
    """What a site has after a run."""

    card: ModelCard
    weights: dict[str, Tensor]
    """State dict of the `SplitModel`."""
    prototypes: Prototypes | None
    """Those that predict; None where the algorithm has none."""
    distances: Tensor
    """[n] float32, ascending: of the site's test samples from their nearest prototypes; empty without prototypes."""

    def build(self) -> SplitModel:
        """The model, on the CPU, ready to predict."""
        card = self.card
        model = build_model(
            card.arch,
            input_shape=(card.features_in,) if card.backbones else card.input_shape,
            num_classes=len(card.classes),
            feature_dim=card.feature_dim,
            seed=0,
        )
        model.load_state_dict(self.weights)
        return model.eval()

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
    def read(cls, file: Path) -> TrainedModel:
        """The model in a file.

        Raises
        ------
        SettingsError
            If there is none, if it is damaged, or of another version.
        """
        try:
            tensors, facts = read_tensors(file, torch.device("cpu"))
        except TensorFileError as error:
            raise SettingsError(str(error)) from error
        if facts.get("format") != FORMAT:
            raise SettingsError(f"{file} is no model of this version ({FORMAT})")
        kept = json.loads(facts["card"])
        lists = {key: tuple(value) for key, value in kept.items() if isinstance(value, list)}
        weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        prototypes = None
        if "prototypes.means" in tensors:
            prototypes = Prototypes(tensors["prototypes.means"], tensors["prototypes.labels"])
        return cls(ModelCard(**kept | lists), weights, prototypes, tensors["distances"])

"""A trained model as ONNX, for programs without PyTorch.

Input   ``inputs`` [N, …] as the data set stores them, not normalised: float32, pixels in [0, 255]; tokens int64
Outputs ``logits`` [N, C] of the head, and, where the model has prototypes, ``distances`` [N, P] from them
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from protofl_common.config.options import SettingsError
from protofl_common.models.trained import TrainedModel

NAME = "model.onnx"
OPSET = 18


class _Whole(nn.Module):
    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.model, self.prototypes, self.similarity = trained.build(), trained.prototypes, trained.card.similarity
        per_channel = (-1, *(1,) * (len(trained.card.input_shape) - 1))
        self.mean = torch.tensor(trained.card.mean).view(per_channel)
        self.std = torch.tensor(trained.card.std).view(per_channel)
        self.fill = torch.tensor(trained.card.fill).view(per_channel)
        self.scale = 255 if trained.card.input_type == "uint8" else 1

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        inputs = torch.where(inputs.isnan(), self.fill, inputs) if len(self.fill) else inputs
        features = self.model.body((inputs / self.scale - self.mean) / self.std if len(self.mean) else inputs)
        logits = self.model.head(features)
        if self.prototypes is None:
            return (logits,)
        means_PD = self.prototypes.means  # distances as in `maths/prototypes.py`, whose ``cdist`` no exporter knows
        if self.similarity == "cosine":
            features, means_PD = normalize(features, dim=1), normalize(means_PD, dim=1)
        return logits, (features[:, None] - means_PD).square().sum(2).sqrt()


def write_onnx(trained: TrainedModel, file: Path) -> None:
    """Write the model; SettingsError if packages are missing, and for a model behind frozen backbones."""
    card = trained.card
    if card.backbones:
        raise SettingsError(f"--onnx: {card.site}'s model has frozen backbones in front of it, which are not exported")
    file.parent.mkdir(parents=True, exist_ok=True)
    example = torch.zeros(2, *card.input_shape, dtype=torch.float32 if card.mean else torch.int64)
    names = ["logits"] if trained.prototypes is None else ["logits", "distances"]
    shapes = {"inputs": {0: torch.export.Dim("N", min=1)}}
    how: dict[str, Any] = {"opset_version": OPSET, "dynamo": True, "external_data": False, "verbose": False}
    how |= {"input_names": ["inputs"], "output_names": names, "dynamic_shapes": shapes}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(_Whole(trained).eval(), (example,), str(file), **how)
    except ImportError as error:
        raise SettingsError(f"--onnx: {error.name} is not installed; pip install 'protofl[onnx]'") from error

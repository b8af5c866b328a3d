"""What every backbone is, whatever its source, and the error of one that cannot be had."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class BackboneError(ValueError):
    """A backbone cannot be had; the message names it and says why."""


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen network that maps normalised images [B, 3, size, size] to features [B, width].

    Attributes
    ----------
    mean, std
        Of the three channels, for images in [0, 1].
    identity
        Stands for everything that the features depend on, weights included.
    """

    network: nn.Module
    size: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    identity: str

    def features(self, pixels: Tensor) -> Tensor:
        """pixels [B, 3, size, size] in [0, 255] -> features float32 [B, width]."""
        mean = torch.tensor(self.mean, device=pixels.device).view(3, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(3, 1, 1)
        features: Tensor = self.network((pixels / 255 - mean) / std)
        return features.float()

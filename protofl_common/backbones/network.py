"""Backbones, and the network of the embedded ones: a small ResNet, x [B, 3, 64, 64] -> features [B, 128].

A 3×3 stem and three residual blocks (He et al., CVPR 2016), each halving the map: 32, 16, 8, 4 pixels a side. A 1×1
convolution widens the last map to the features, which are its global average: non-negative, 177,000 parameters.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 64  # pixels a side of the images that the embedded backbones see
WIDTH = 128  # F, the number of features
CHANNELS = (24, 32, 56, 80)  # of the stem and of the three blocks


class SmallResNet(nn.Module):
    """x [B, 3, H, W] -> features [B, 128] (any size works; 64×64 is what the weights know)."""

    def __init__(self) -> None:
        super().__init__()
        stem, *wider = CHANNELS
        self.stem = _Convolution(3, stem, kernel=3, stride=2)
        self.blocks = nn.Sequential(*[_Block(i, o) for i, o in zip(CHANNELS, wider, strict=False)])
        self.last = _Convolution(CHANNELS[-1], WIDTH, kernel=1, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.last(self.blocks(x)))
        return x.mean(dim=(2, 3))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = _Convolution(inputs, outputs, kernel=3, stride=2)
        self.second = _Convolution(outputs, outputs, kernel=3, stride=1)
        self.shortcut = _Convolution(inputs, outputs, kernel=1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


class _Convolution(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
        )


class BackboneError(ValueError):
    """A backbone cannot be had; the message names it and says why."""


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen network that maps normalised images [B, 3, size, size] to features [B, width]."""

    network: nn.Module
    size: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]  # of the three channels, for images in [0, 1], like the mean
    identity: str  # stands for everything that the features depend on, weights included

    def features(self, pixels: Tensor) -> Tensor:
        """pixels [B, 3, size, size] in [0, 255] -> features float32 [B, width]."""
        mean = torch.tensor(self.mean, device=pixels.device).view(3, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(3, 1, 1)
        features: Tensor = self.network((pixels / 255 - mean) / std)
        return features.float()

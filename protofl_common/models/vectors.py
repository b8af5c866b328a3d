"""Networks for what is not an image: tables and backbone features [F], signals [channels, steps], texts [tokens].

A text becomes a signal by an embedding of its tokens, so both share their networks. Whatever the length of a series or
text, what leaves the network is D features, as from the CNNs for images after a ReLU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from protofl_common.config.architectures import VOCABULARY

WIDTH = 64
MLP_PLANS: dict[str, tuple[int, ...]] = {"mlp-1": (64,), "mlp-2": (128, 64), "mlp-3": (256, 128, 64)}
"""Widths of the hidden layers."""


def build_mlp(hidden: tuple[int, ...], input_shape: tuple[int, ...], feature_dim: int) -> nn.Module:
    """Fully connected layers on all numbers of a sample, whatever its shape."""
    widths = (math.prod(input_shape), *hidden, feature_dim)
    layers = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers)


def build_projection(input_shape: tuple[int, ...], feature_dim: int) -> nn.Module:
    """FedPCL's r(x) [B, F] -> z [B, D], behind frozen backbones (Tan et al., NeurIPS 2022, Appendix A)."""
    linear = nn.Linear(math.prod(input_shape), feature_dim)
    return nn.Sequential(nn.Flatten(), linear, nn.ReLU(), nn.BatchNorm1d(feature_dim))


class Embedded(nn.Module):
    """Tokens x [B, length] -> [B, E, length]; 0 is padding, whose vector is zero and stays so.

    A token beyond the vocabulary takes the vector of its remainder, so that any whole number from 0 will do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        with torch.no_grad():
            self.vectors.weight.mul_(0.1)  # torch's N(0, 1) drowns what a few thousand words can teach

    def forward(self, x: Tensor) -> Tensor:
        """x [B, length] -> [B, E, length]."""
        vectors: Tensor = self.vectors(torch.where(x > 0, 1 + (x - 1) % (VOCABULARY - 1), 0))
        return vectors.transpose(1, 2)


class MeanOfSteps(nn.Module):
    """x [B, E, steps] -> [B, E]: the mean over the steps that are not all zero, as padding is."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, E, steps] -> [B, E]."""
        return x.sum(2) / (x != 0).any(dim=1).sum(1, keepdim=True).clamp(min=1)


class LargestOfSteps(nn.Module):
    """x [B, E, steps] -> [B, E]; unlike max-pooling, its backward pass repeats exactly on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, E, steps] -> [B, E]."""
        return x.amax(dim=2)


class Gru(nn.Module):
    """x [B, channels, steps] -> [B, E, steps]: the states of a GRU that reads the steps."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gru = nn.GRU(channels, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, steps] -> [B, E, steps]."""
        states: Tensor = self.gru(x.transpose(1, 2))[0]
        return states.transpose(1, 2)


class SmallTransformer(nn.Module):
    """x [B, channels, steps] -> [B, E]: one encoder layer of four attention heads without dropout, mean over steps."""

    def __init__(self, channels: int, steps: int) -> None:
        super().__init__()
        self.project = nn.Linear(channels, WIDTH)
        self.positions = nn.Parameter(torch.randn(steps, WIDTH) * 0.02)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, steps] -> [B, E]."""
        steps: Tensor = self.layer(self.project(x.transpose(1, 2)) + self.positions)
        return steps.mean(dim=1)


def _cnn(channels: int) -> nn.Module:
    """Two convolutions of width 5 and 3 over the steps, and the largest value of each channel."""
    return nn.Sequential(
        nn.Conv1d(channels, WIDTH, 5, padding=2),
        nn.ReLU(),
        nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1),
        nn.ReLU(),
        LargestOfSteps(),
    )


def _features(width: int, feature_dim: int) -> list[nn.Module]:
    return [nn.Linear(width, feature_dim), nn.ReLU()]


SIGNAL: dict[str, Callable[[int, int, int], nn.Module]] = {
    "signal-cnn": lambda channels, _, dim: nn.Sequential(_cnn(channels), *_features(2 * WIDTH, dim)),
    "signal-gru": lambda channels, _, dim: nn.Sequential(Gru(channels), LargestOfSteps(), *_features(WIDTH, dim)),
    "signal-transformer": lambda channels, steps, dim: nn.Sequential(
        SmallTransformer(channels, steps), *_features(WIDTH, dim)
    ),
}
"""(channels, steps, D) -> body."""

TEXT: dict[str, Callable[[int], nn.Module]] = {
    "text-bag": lambda dim: nn.Sequential(Embedded(), MeanOfSteps(), *_features(WIDTH, WIDTH), *_features(WIDTH, dim)),
    "text-cnn": lambda dim: nn.Sequential(Embedded(), _cnn(WIDTH), *_features(2 * WIDTH, dim)),
    "text-gru": lambda dim: nn.Sequential(Embedded(), Gru(WIDTH), LargestOfSteps(), *_features(WIDTH, dim)),
}
"""D -> body."""

"""Networks for what is not an image: tables and backbone features [F], signals [channels, steps], texts [tokens].

A text becomes a signal by an embedding of its tokens, so both share their networks.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from protofl_common.config.architectures import PROJECTION, VOCABULARY

WIDTH = 64


def fully_connected(*widths: int) -> list[nn.Module]:
    """Layers of these widths, the first of which is that of the inputs, with a ReLU behind each."""
    return [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.ReLU())]


class Embedded(nn.Module):
    """Tokens x [B, length] -> [B, E, length]; 0 is padding, with a zero vector; large ones take their remainder's."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        with torch.no_grad():
            self.vectors.weight.mul_(0.1)  # torch's N(0, 1) drowns what a few thousand words can teach

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.vectors(torch.where(x > 0, 1 + (x - 1) % (VOCABULARY - 1), 0))
        return vectors.transpose(1, 2)


class MeanOfSteps(nn.Module):
    """x [B, E, steps] -> [B, E]: the mean over the steps that are not all zero, as padding is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(2) / (x != 0).any(dim=1).sum(1, keepdim=True).clamp(min=1)


class LargestOfSteps(nn.Module):
    """x [B, E, steps] -> [B, E]; unlike max-pooling, its backward pass repeats exactly on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax(dim=2)


class Gru(nn.Module):
    """x [B, channels, steps] -> [B, E, steps]: the states of a GRU that reads the steps."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gru = nn.GRU(channels, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
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
        steps: Tensor = self.layer(self.project(x.transpose(1, 2)) + self.positions)
        return steps.mean(dim=1)


def _cnn(channels: int) -> nn.Module:
    first, second = nn.Conv1d(channels, WIDTH, 5, padding=2), nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), LargestOfSteps())


TABLE: dict[str, Callable[[int, int], list[nn.Module]]] = {
    "mlp-1": lambda inputs, dim: fully_connected(inputs, 64, dim),
    "mlp-2": lambda inputs, dim: fully_connected(inputs, 128, 64, dim),
    "mlp-3": lambda inputs, dim: fully_connected(inputs, 256, 128, 64, dim),
    PROJECTION: lambda inputs, dim: [nn.Linear(inputs, dim), nn.ReLU(), nn.BatchNorm1d(dim)],
}
"""(numbers of a sample, D) -> layers behind `nn.Flatten`. The projection is FedPCL's r(x) [B, F] -> z [B, D], behind
frozen backbones (Tan et al., NeurIPS 2022, Appendix A)."""

SIGNAL: dict[str, Callable[[int, int, int], list[nn.Module]]] = {
    "signal-cnn": lambda channels, _, dim: [_cnn(channels), *fully_connected(2 * WIDTH, dim)],
    "signal-gru": lambda channels, _, dim: [Gru(channels), LargestOfSteps(), *fully_connected(WIDTH, dim)],
    "signal-transformer": lambda channels, steps, d: [SmallTransformer(channels, steps), *fully_connected(WIDTH, d)],
}  # (channels, steps, D) -> layers

TEXT: dict[str, Callable[[int], list[nn.Module]]] = {
    "text-bag": lambda dim: [MeanOfSteps(), *fully_connected(WIDTH, WIDTH, dim)],
    "text-cnn": lambda dim: [_cnn(WIDTH), *fully_connected(2 * WIDTH, dim)],
    "text-gru": lambda dim: [Gru(WIDTH), LargestOfSteps(), *fully_connected(WIDTH, dim)],
}  # D -> layers behind `Embedded`

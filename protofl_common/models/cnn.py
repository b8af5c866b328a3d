"""Small CNNs: 5×5 convolutions with 2×2 max-pooling, then fully connected layers.

- ``mnist-cnn``: McMahan et al. (2017) scaled down, as in the code of the authors of FedProto (Tan et al., AAAI 2022);
  they fix D = 50. With 18, 20 or 22 channels in the second convolution it is FedProto-mh.
- ``htcnn-1`` … ``htcnn-8``: HtCNN8 of FedTGP (Zhang et al., AAAI 2024), as in HtFLlib; they fix D = 512.
- ``cnn4``: the "4-layer CNN" of FedTGP's HtFE groups.

The last fully connected layer of a body has D outputs, whatever the papers' D.

Small images: the convolutions are unpadded, as published, wherever the image is large enough for all of them.
Where it is not (two convolutions below 16×16), all of them are padded by 2, which keeps the size of the map.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from protofl_common.models.layers import ChannelsLast

KERNEL = 5


@dataclass(frozen=True)
class CnnPlan:
    """``channels`` of the convolutions, widths of the ``hidden`` fully connected layers before the one of width D."""

    channels: tuple[int, ...]
    hidden: tuple[int, ...] = ()
    dropout: float = 0.0
    """FedProto's: whole maps after the last convolution, and features before the head, with this probability."""


CNN_PLANS: dict[str, CnnPlan] = {
    "mnist-cnn": CnnPlan((10, 20), dropout=0.5),
    "mnist-cnn-18": CnnPlan((10, 18), dropout=0.5),
    "mnist-cnn-20": CnnPlan((10, 20), dropout=0.5),
    "mnist-cnn-22": CnnPlan((10, 22), dropout=0.5),
    "cnn4": CnnPlan((32, 64)),
    "htcnn-1": CnnPlan((32,)),
    "htcnn-2": CnnPlan((32, 64)),
    "htcnn-3": CnnPlan((32,), (512,)),
    "htcnn-4": CnnPlan((32, 64), (512,)),
    "htcnn-5": CnnPlan((32,), (1024,)),
    "htcnn-6": CnnPlan((32, 64), (1024,)),
    "htcnn-7": CnnPlan((32,), (1024, 512)),
    "htcnn-8": CnnPlan((32, 64), (1024, 512)),
}


def build_cnn(plan: CnnPlan, *, in_channels: int, image_size: int, feature_dim: int) -> nn.Module:
    """The body of a plan, for square images of ``image_size`` (at least 8) pixels a side."""
    padding, side = _padding_and_side(image_size, len(plan.channels))
    widths = (plan.channels[-1] * side * side, *plan.hidden, feature_dim)
    return nn.Sequential(*_convolutions(plan, in_channels, padding), nn.Flatten(), *_fully_connected(widths))


def _convolutions(plan: CnnPlan, in_channels: int, padding: int) -> list[nn.Module]:
    """ReLU follows the pool: the same values and gradients as before it, from a quarter of the elements."""
    layers: list[nn.Module] = [ChannelsLast()]
    for before, after in pairwise((in_channels, *plan.channels)):
        layers += [nn.Conv2d(before, after, KERNEL, padding=padding), nn.MaxPool2d(2), nn.ReLU()]
    if plan.dropout:
        layers.insert(-2, nn.Dropout2d(plan.dropout))  # between the last convolution and its pool
    return layers


def _fully_connected(widths: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers


def _padding_and_side(image_size: int, convolutions: int) -> tuple[int, int]:
    """The padding of all convolutions, and the side of the last map: unpadded if that leaves at least one pixel."""
    for padding in (0, KERNEL // 2):
        side = image_size
        for _ in range(convolutions):
            side = (side + 2 * padding - KERNEL + 1) // 2
        if side >= 1:
            return padding, side
    raise ValueError(f"images of {image_size}×{image_size} pixels are too small for {convolutions} convolutions")

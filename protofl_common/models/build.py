"""From the name of an architecture to a freshly initialised model."""

from __future__ import annotations

import torch

from protofl_common.models.cnn import CNN_PLANS, build_cnn
from protofl_common.models.groups import ARCHITECTURES
from protofl_common.models.resnet import RESNET_BLOCKS, build_resnet
from protofl_common.models.split import SplitModel

SMALLEST_IMAGE = 8


def build_model(
    arch: str, *, in_channels: int, image_size: int, num_classes: int, feature_dim: int, seed: int
) -> SplitModel:
    """A model on the CPU; its initial weights are a function of the arguments alone, torch's global RNG is untouched.

    Raises ValueError for an unknown architecture and for sizes that no model can have.
    """
    _check(arch, in_channels, image_size, num_classes, feature_dim)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # unlike torch.manual_seed, leaves the GPUs' generators alone
        if arch in CNN_PLANS:
            return build_cnn(
                CNN_PLANS[arch],
                in_channels=in_channels,
                image_size=image_size,
                num_classes=num_classes,
                feature_dim=feature_dim,
            )
        return build_resnet(
            RESNET_BLOCKS[arch], in_channels=in_channels, num_classes=num_classes, feature_dim=feature_dim
        )


def _check(arch: str, in_channels: int, image_size: int, num_classes: int, feature_dim: int) -> None:
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch is {arch!r}, not one of {', '.join(ARCHITECTURES)}")
    if image_size < SMALLEST_IMAGE:
        raise ValueError(f"image_size is {image_size}, below {SMALLEST_IMAGE}")
    for name, value in (("in_channels", in_channels), ("num_classes", num_classes), ("feature_dim", feature_dim)):
        if value < 1:
            raise ValueError(f"{name} is {value}, below 1")

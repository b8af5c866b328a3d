"""From the name of an architecture to a freshly initialised model."""

from __future__ import annotations

import torch
from torch import nn

from protofl_common.models.cnn import CNN_PLANS, build_cnn
from protofl_common.models.compact import COMPACT
from protofl_common.models.groups import ARCHITECTURES, HEADS, PROJECTION, body_and_hidden
from protofl_common.models.heads import build_head, freeze_orthogonally
from protofl_common.models.projection import build_projection
from protofl_common.models.resnet import RESNET_PLANS, build_resnet
from protofl_common.models.split import SplitModel

SMALLEST_IMAGE = 8


def build_model(
    arch: str,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    feature_dim: int,
    seed: int,
    head: str = "trainable",
    head_seed: int | None = None,
) -> SplitModel:
    """A model on the CPU; its initial weights are a function of the arguments alone, torch's global RNG is untouched.

    ``head`` is one of ``HEADS``. A frozen last layer is drawn from ``head_seed``, so that clients of different bodies
    can have the same one, as in FedNH (last layers of one width: HtC4's differ), or else from ``seed``: each client its
    own, as in the code of FedProto-UH, whose text does not say. Nothing else depends on these two arguments.

    Raises ValueError for an unknown architecture or kind of head, and for inputs and sizes that it cannot have.
    """
    _check(arch, head, num_classes, feature_dim)
    name, hidden = body_and_hidden(arch)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # unlike torch.manual_seed, leaves the GPUs' generators alone
        body = _build_body(name, input_shape, feature_dim)
        top = build_head(feature_dim, hidden, num_classes, CNN_PLANS[name].dropout if name in CNN_PLANS else 0.0)
        if head == "orthogonal-frozen":
            if head_seed is not None:
                torch.default_generator.manual_seed(head_seed)
            freeze_orthogonally(top)
    return SplitModel(body, top)


def _build_body(name: str, input_shape: tuple[int, ...], feature_dim: int) -> nn.Module:
    if name == PROJECTION:
        return build_projection(input_shape, feature_dim)
    channels, side = _square_image(name, input_shape)
    if name in CNN_PLANS:
        return build_cnn(CNN_PLANS[name], in_channels=channels, image_size=side, feature_dim=feature_dim)
    if name in RESNET_PLANS:
        return build_resnet(RESNET_PLANS[name], in_channels=channels, feature_dim=feature_dim)
    return COMPACT[name](channels, side, feature_dim)


def _square_image(name: str, input_shape: tuple[int, ...]) -> tuple[int, int]:
    """Channels and pixels a side."""
    if len(input_shape) != 3 or input_shape[1] != input_shape[2] or input_shape[1] < SMALLEST_IMAGE:
        raise ValueError(
            f"arch {name!r} is for square images [channels, H, W] of at least {SMALLEST_IMAGE} pixels a side (set "
            f"image-size for others); a sample of these data is {list(input_shape)}"
        )
    return input_shape[0], input_shape[1]


def _check(arch: str, head: str, num_classes: int, feature_dim: int) -> None:
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch is {arch!r}, not one of {', '.join(ARCHITECTURES)}")
    if head not in HEADS:
        raise ValueError(f"head is {head!r}, not one of {', '.join(HEADS)}")
    for name, value in (("num_classes", num_classes), ("feature_dim", feature_dim)):
        if value < 1:
            raise ValueError(f"{name} is {value}, below 1")

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
    in_channels: int,
    image_size: int,
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

    Raises ValueError for an unknown architecture or kind of head, and for sizes that no model can have.
    """
    _check(arch, head, in_channels, image_size, num_classes, feature_dim)
    name, hidden = body_and_hidden(arch)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # unlike torch.manual_seed, leaves the GPUs' generators alone
        body = _build_body(name, in_channels, image_size, feature_dim)
        top = build_head(feature_dim, hidden, num_classes, CNN_PLANS[name].dropout if name in CNN_PLANS else 0.0)
        if head == "orthogonal-frozen":
            if head_seed is not None:
                torch.default_generator.manual_seed(head_seed)
            freeze_orthogonally(top)
    return SplitModel(body, top)


def _build_body(name: str, in_channels: int, image_size: int, feature_dim: int) -> nn.Module:
    if name in CNN_PLANS:
        return build_cnn(CNN_PLANS[name], in_channels=in_channels, image_size=image_size, feature_dim=feature_dim)
    if name in RESNET_PLANS:
        return build_resnet(RESNET_PLANS[name], in_channels=in_channels, feature_dim=feature_dim)
    if name == PROJECTION:
        return build_projection(in_channels, image_size, feature_dim)
    return COMPACT[name](in_channels, image_size, feature_dim)


def _check(arch: str, head: str, in_channels: int, image_size: int, num_classes: int, feature_dim: int) -> None:
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch is {arch!r}, not one of {', '.join(ARCHITECTURES)}")
    if head not in HEADS:
        raise ValueError(f"head is {head!r}, not one of {', '.join(HEADS)}")
    if image_size < SMALLEST_IMAGE and arch != PROJECTION:
        raise ValueError(f"image_size is {image_size}, below {SMALLEST_IMAGE}")
    for name, value in (("in_channels", in_channels), ("num_classes", num_classes), ("feature_dim", feature_dim)):
        if value < 1:
            raise ValueError(f"{name} is {value}, below 1")

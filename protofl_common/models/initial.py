"""The first weights of a model in a run: whose they are, and from which seed."""

from __future__ import annotations

from typing import Any

from protofl_common.basics.seeding import derive_seed
from protofl_common.config.architectures import ORTHOGONAL_SHARED
from protofl_common.config.sections import ModelSettings
from protofl_common.models.build import build_head_alone, build_model
from protofl_common.models.heads import LinearHead
from protofl_common.models.layers import with_group_norm
from protofl_common.models.split import SplitModel


def initial_model(
    arch: str, input_shape: tuple[int, ...], num_classes: int, settings: ModelSettings, seed: int, owner: str
) -> SplitModel:
    """``owner``'s model before its first round, on the CPU; ``input_shape`` is a sample's.

    The same run seed, architecture and owner give the same weights, on the server as on a client.
    """
    model = build_model(arch, input_shape=input_shape, num_classes=num_classes, **_arguments(settings, seed, owner))
    return with_group_norm(model) if settings.norm == "group" else model


def initial_head(arch: str, num_classes: int, settings: ModelSettings, seed: int) -> LinearHead:
    """Everybody's head, where no body comes with it: fitting a model of ``arch``, with weights of its own."""
    return build_head_alone(arch, num_classes=num_classes, **_arguments(settings, seed, "global"))


def _arguments(settings: ModelSettings, seed: int, owner: str) -> dict[str, Any]:
    shared_head = settings.head == ORTHOGONAL_SHARED
    return {
        "feature_dim": settings.feature_dim,
        "seed": derive_seed(seed, "model", owner),
        "head": "trainable" if settings.head == "trainable" else "orthogonal-frozen",
        "head_seed": derive_seed(seed, "head") if shared_head else None,
    }

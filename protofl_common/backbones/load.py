"""From a backbone's name to the frozen network, ready for use; each is loaded once per process and device."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from protofl_common.backbones.network import SIZE, WIDTH, Backbone, SmallResNet
from protofl_common.backbones.weightfile import StoredWeights, read_weights
from protofl_common.config.backbones import SMALL, BackboneName, parse_name

WEIGHTS = Path(__file__).parent / "weights"
"""The folder of the embedded weights, ``NAME.json``."""


@lru_cache(maxsize=16)
def load_backbone(name: str, device: torch.device) -> Backbone:
    """The backbone called ``name``, its network on ``device``, in evaluation mode and without gradients.

    ValueError for a name that is none. BackboneError when its weights or its package cannot be had.
    """
    parsed = parse_name(name)
    if parsed.kind == "embedded":
        backbone = small_backbone(read_weights(WEIGHTS / f"{name}.json"), 0)
    elif parsed.kind == "file" and parsed.arch == SMALL:
        backbone = small_backbone(read_weights(Path(parsed.path).expanduser()), parsed.size)
    else:
        backbone = _external(parsed)
    backbone.network.requires_grad_(False).eval().to(device).to(memory_format=torch.channels_last)  # a third faster
    return backbone


def small_backbone(weights: StoredWeights, size: int) -> Backbone:
    """A `SmallResNet` of these weights; ``size`` 0: the weights' own."""
    network = SmallResNet()
    network.load_state_dict(weights.state, strict=False)  # BatchNorm's counters of batches are not stored
    size = size or weights.size or SIZE
    return Backbone(network, size, WIDTH, weights.mean, weights.std, f"{SMALL}@{size}:{weights.sha256}")


def _external(parsed: BackboneName) -> Backbone:
    from protofl_common.backbones import external  # torchvision takes over a second to import: only where it is needed

    return external.build(parsed)

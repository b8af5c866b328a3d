"""Writes weights of a `SmallResNet` to a file, which `protofl_common.backbones.load` reads and describes."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from protofl_common.backbones.load import SIZE


@dataclass(frozen=True)
class StoredWeights:
    """State dict of a `SmallResNet`, mean and deviation of its images, and how it was made."""

    state: Mapping[str, Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    made: dict[str, Any] = field(default_factory=dict)


def write_weights(file: Path, weights: StoredWeights) -> None:
    """Write ``weights`` to ``file``; kernels are rounded to float16, BatchNorm's counters of batches are 0."""
    blob = base64.b64encode(save({name: _packed(value) for name, value in weights.state.items()})).decode()
    content = {"size": SIZE, "mean": weights.mean, "std": weights.std, "made": weights.made, "weights": blob}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _packed(value: Tensor) -> Tensor:
    if not value.ndim:
        return torch.zeros_like(value)
    return value.detach().cpu().contiguous().half() if value.ndim > 1 else value.detach().cpu()

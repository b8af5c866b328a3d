"""Writes a file like those of the embedded backbones, which `protofl_common.backbones.load` reads and describes."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from protofl_common.backbones.load import SIZE

HALF = (0.5, 0.5, 0.5)


def write_weights(
    file: Path, state: Mapping[str, Tensor], mean: tuple[float, ...] = HALF, std: tuple[float, ...] = HALF
) -> None:
    """Write the state dict of a `SmallResNet`, its kernels in float16, with its images' mean and deviation."""
    packed = {name: value.half() if value.ndim > 1 else value for name, value in state.items()}
    content = {"size": SIZE, "mean": mean, "std": std, "weights": base64.b64encode(save(packed)).decode()}
    file.write_text(json.dumps(content), encoding="utf-8")

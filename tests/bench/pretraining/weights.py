"""Writes weights of a `SmallResNet` to a file, which `protofl_common.backbones.weightfile` reads and describes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from protofl_common.backbones.network import SmallResNet
from protofl_common.backbones.weightfile import FORMAT, StoredWeights, checksum


def write_weights(file: Path, weights: StoredWeights) -> None:
    """Write ``weights`` to ``file``, one line per tensor; kernels are rounded to float16."""
    arrays = {name: _packed(value) for name, value in weights.state.items() if "num_batches" not in name}
    head = {
        "format": FORMAT,
        "architecture": SmallResNet.__name__,
        "size": weights.size,
        "mean": weights.mean,
        "std": weights.std,
        "made": weights.made,
        "sha256": checksum(arrays),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    tensors = ",\n".join(f"{json.dumps(name)}: {json.dumps(_entry(array))}" for name, array in arrays.items())
    file.write_text("{\n" + ",\n".join(lines) + ',\n"tensors": {\n' + tensors + "\n}}\n", encoding="utf-8")


def _packed(value: Tensor) -> np.ndarray[Any, Any]:
    return value.detach().cpu().numpy().astype("<f2" if value.ndim > 1 else "<f4")


def _entry(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    data = base64.b64encode(array.tobytes()).decode()
    return {"shape": list(array.shape), "dtype": array.dtype.name, "data": data}

"""Weights of a `SmallResNet` as JSON, the largest format that Flower's app bundle carries along.

One object: ``format``, ``architecture``, ``size``, ``mean`` and ``std`` of the training images, ``made`` (how, and how
well, in words), ``sha256`` and ``tensors``: name -> ``shape``, ``dtype``, ``data`` (base64, little-endian). Kernels are
float16, BatchNorm's arrays float32. The checksum is over names, shapes and bytes: see `checksum`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protofl_common.backbones.network import SIZE, BackboneError, SmallResNet

FORMAT = 1
_DTYPES = {"float16": "<f2", "float32": "<f4"}


@dataclass(frozen=True)
class StoredWeights:
    """The content of a file: ``state`` float32 for `SmallResNet`, the normalisation of the images, the checksum."""

    state: dict[str, Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int = SIZE
    sha256: str = ""
    made: dict[str, Any] = field(default_factory=dict)


def read_weights(file: Path) -> StoredWeights:
    """The weights in ``file``.

    BackboneError when the file is missing, is no such file, has other tensors than `SmallResNet`, or fails its
    checksum.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["architecture"] != SmallResNet.__name__:
            raise BackboneError(f"{file}: format {content['format']} of {content['architecture']} is unknown")
        arrays = {name: _unpacked(entry) for name, entry in content["tensors"].items()}
        found = checksum(arrays)
        if found != content["sha256"]:
            raise BackboneError(f"{file}: damaged, its checksum is {found[:12]}… not {content['sha256'][:12]}…")
        _check(file, arrays)
        _check_normalisation(content)
        return StoredWeights(
            state={name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()},
            mean=tuple(map(float, content["mean"])),
            std=tuple(map(float, content["std"])),
            size=int(content["size"]),
            sha256=found,
            made=content["made"],
        )
    except OSError as error:
        raise BackboneError(f"{file}: cannot be read ({error})") from error
    except BackboneError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise BackboneError(f"{file}: not a file of backbone weights ({type(error).__name__}: {error})") from error


def checksum(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """SHA-256 in hexadecimal over the sorted names, each with dtype, shape and bytes."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def _unpacked(entry: dict[str, Any]) -> np.ndarray[Any, Any]:
    data = base64.b64decode(entry["data"], validate=True)
    return np.frombuffer(data, dtype=_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _check(file: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    with torch.device("meta"):
        wanted = {name: tuple(v.shape) for name, v in SmallResNet().state_dict().items() if "num_batches" not in name}
    found = {name: array.shape for name, array in arrays.items()}
    wrong = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise BackboneError(f"{file}: {name} has shape {found.get(name)}, the network's is {wanted.get(name)}")
    for name, array in arrays.items():
        if not np.isfinite(array).all() or (name.endswith("running_var") and array.min() < 0):
            raise BackboneError(f"{file}: {name} holds values that are not finite, or variances below 0")


def _check_normalisation(content: dict[str, Any]) -> None:
    mean, std, size = content["mean"], content["std"], content["size"]
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0 or not 8 <= size <= 1024:
        raise ValueError(f"mean {mean}, std {std}, size {size}")

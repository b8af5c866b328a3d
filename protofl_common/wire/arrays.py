"""Tensors as arrays of a message, and back: raw little-endian bytes, no pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from protofl_common.wire.limits import RefusedMessage

RAW = "raw-little-endian"
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "int64": np.dtype("<i8"),
}


def array_record(arrays: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: _array(value) for name, value in arrays.items()})


def _array(value: Tensor) -> Array:
    dtype = dtype_name(value)
    if dtype not in DTYPES:
        raise ValueError(f"cannot send {value.dtype}; the wire carries {', '.join(DTYPES)}")
    data = value.detach().cpu().contiguous().numpy().astype(DTYPES[dtype], copy=False).tobytes()
    return Array(dtype=dtype, shape=tuple(value.shape), stype=RAW, data=data)


def decoded(array: Array, what: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Decode one array, whose dtype and shape must be those given."""
    if array.stype != RAW or array.dtype != dtype:
        raise RefusedMessage(f"{what}: {array.stype} {array.dtype} instead of {RAW} {dtype}")
    _check_shape(array, what)
    if tuple(array.shape) != shape:
        raise RefusedMessage(f"{what}: shape {'×'.join(map(str, array.shape))} instead of {'×'.join(map(str, shape))}")
    if len(array.data) != math.prod(shape) * DTYPES[dtype].itemsize:
        raise RefusedMessage(f"{what}: {len(array.data)} bytes do not fill the shape {tuple(array.shape)}")
    values = np.frombuffer(array.data, dtype=DTYPES[dtype]).reshape(array.shape)
    if dtype != "int64" and not np.isfinite(values).all():
        raise RefusedMessage(f"{what}: NaN or infinity")
    return torch.from_numpy(values.astype(DTYPES[dtype].newbyteorder("="), copy=True))


def rows_of(array: Array, what: str, least: int, most: int) -> int:
    """The length of an array's first axis, checked before any of it is decoded."""
    _check_shape(array, what)
    rows = array.shape[0] if array.shape else 0
    if not least <= rows <= most:
        raise RefusedMessage(f"{rows} {what}, not from {least} to {most}")
    return rows


def _check_shape(array: Array, what: str) -> None:
    """Flower hands on whatever stands in the sender's JSON."""
    if any(type(length) is not int for length in array.shape):
        raise RefusedMessage(f"{what}: a shape of other things than whole numbers")


def dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")

"""Tensors in a file that is written whole or not at all: beside, onto the disk, then renamed.

Whoever is killed while writing leaves the old file; so does a full disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from protofl_common.wholefile import make_private


class TensorFileError(RuntimeError):
    """A file could not be read or written; the message says which and why."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Replace ``path`` in one step; TensorFileError leaves it as it was."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        make_private(path.parent)
        save_file({name: value.contiguous() for name, value in tensors.items()}, beside, metadata=dict(facts))
        sync(beside)
        os.replace(beside, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        size = sum(value.numel() * value.element_size() for value in tensors.values())
        raise TensorFileError(f"{path} could not be written, {size / 1e6:.1f} MB: {error}") from error
    finally:
        beside.unlink(missing_ok=True)


def read_tensors(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and the facts beside them; TensorFileError if it is damaged or missing."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise TensorFileError(f"{path} cannot be read ({error})") from error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk: a power cut must not reorder what we rely on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as ``<parameter index>.<name>``."""
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of :func:`flatten_optimizer`, for an optimizer over the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

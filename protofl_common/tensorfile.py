"""Tensors in a file that is written whole or not at all, and an optimizer as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from protofl_common.files import replacing


class TensorFileError(RuntimeError):
    """A file could not be read or written; the message says which and why."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Replace ``path`` in one step; TensorFileError leaves it as it was."""
    try:
        with replacing(path, private=True) as beside:
            save_file({name: value.contiguous() for name, value in tensors.items()}, beside, metadata=dict(facts))
    except (OSError, SafetensorError) as error:
        size = sum(value.numel() * value.element_size() for value in tensors.values())
        raise TensorFileError(f"{path} could not be written, {size / 1e6:.1f} MB: {error}") from error


def read_tensors(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and the facts beside them; TensorFileError if it is damaged or missing."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise TensorFileError(f"{path} cannot be read ({error})") from error


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

"""Tensors in a file written whole or not at all, with a checksum against damage."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from protofl_common.basics.files import TensorFileError, replacing

CHECKSUM = "checksum"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str], *, durable: bool = True
) -> None:
    """Replace ``path`` in one step, as `replacing` does; TensorFileError leaves it as it was."""
    try:
        with replacing(path, private=True, durable=durable) as beside:
            apart = without_shared_memory(tensors)
            metadata = {**facts, CHECKSUM: checksum(apart, facts)}
            save_file(apart, beside, metadata=metadata)
    except (OSError, SafetensorError) as error:
        size = sum(value.numel() * value.element_size() for value in tensors.values())
        megabytes = size / 1e6
        raise TensorFileError(
            f"{path} could not be written, {megabytes:.1f} MB: {error}"
        ) from error


def without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, of which no two have one memory, as tied weights of a network have.

    The format has no two names for one tensor.
    """
    apart = {}
    seen = set()
    for name, value in tensors.items():
        own = value.contiguous()
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        apart[name] = own
    return apart


def read_tensors(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file on ``device``, and its facts.

    TensorFileError if it is missing, or damaged; old files have no checksum.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise TensorFileError(f"{path} cannot be read ({error})") from error
    stored = facts.pop(CHECKSUM, None)
    if stored is not None and stored != checksum(tensors, facts):
        raise TensorFileError(f"{path} is damaged: its content does not have its checksum")
    return {name: value.to(device) for name, value in tensors.items()}, facts


def checksum(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> str:
    """SHA-256 of names, types, shapes and bytes of the tensors, and of the facts, as digits."""
    digest = hashlib.sha256(json.dumps(sorted(facts.items())).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

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
    """Write tensors, ``facts`` and their checksum to ``path``, which no other user can read.

    The file is replaced in one step, as `replacing` does; after a TensorFileError it is as it was.
    """
    try:
        with replacing(path, private=True, durable=durable) as new:
            separate = without_shared_memory(tensors)
            metadata = {**facts, CHECKSUM: checksum(separate, facts)}
            save_file(separate, new, metadata=metadata)
    except (OSError, SafetensorError) as error:
        megabytes = sum(value.nbytes for value in tensors.values()) / 1e6
        raise TensorFileError(
            f"{path} could not be written, {megabytes:.1f} MB: {error}"
        ) from error


def without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors made contiguous, with a copy of each that shares memory with another.

    Tied weights of a network share theirs, and safetensors refuses two names for one memory.
    """
    separate = {}
    addresses = set()
    for name, value in tensors.items():
        value = value.contiguous()
        if value.untyped_storage().data_ptr() in addresses:
            value = value.clone()
        addresses.add(value.untyped_storage().data_ptr())
        separate[name] = value
    return separate


def read_tensors(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, on ``device``, and its facts.

    TensorFileError if it is missing or damaged. A file without a checksum is read as it is.
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
    """Return the SHA-256 of the facts, and of the tensors' names, types, shapes and bytes."""
    digest = hashlib.sha256(json.dumps(sorted(facts.items())).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""Features on disk and in memory: frozen backbones are run once per set of images, not once per round."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from protofl_common.backbones.extract import extract_features
from protofl_common.backbones.load import load_backbone
from protofl_common.basics.files import digest, replacing
from protofl_common.basics.text import as_file_name
from protofl_common.data.raw import Inputs
from protofl_common.data.store import locked

FORMAT = 1
"""Raised whenever the same backbones give other features, e.g. after a change of the resizing."""
FOLDER = "features"
"""Under ``cache_dir``."""
MOST_IN_MEMORY = 8
"""Feature sets kept in memory: in simulation a worker serves many clients in turn."""

_memory: OrderedDict[str, Tensor] = OrderedDict()


def cached_features(images: Inputs, names: Sequence[str], device: torch.device, cache_dir: Path, key: str) -> Tensor:
    """`extract_features`, computed once and then read from ``cache_dir``; treat the result as read-only.

    The entry's name is ``key`` (for people: say whose images they are) and a hash of the images' bytes, of the
    backbones' names and weights, and of the kind of device. A file that is damaged is made anew.

    BackboneError when a backbone cannot be had. DataError when the cache folder cannot be written.
    """
    backbones = [load_backbone(name, device) for name in names]
    content = hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()
    identities = [backbone.identity for backbone in backbones]
    entry = digest(FORMAT, content, images.shape, identities, device.type)
    if entry not in _memory:
        label = as_file_name(key)
        file = cache_dir.expanduser().absolute() / FOLDER / f"{label}-{entry}.safetensors"
        shape = (len(images), sum(backbone.width for backbone in backbones))
        _memory[entry] = _from_disk(file, shape, lambda: extract_features(images, names, device))
    _memory.move_to_end(entry)
    while len(_memory) > MOST_IN_MEMORY:
        _memory.popitem(last=False)
    return _memory[entry]


def _from_disk(file: Path, shape: tuple[int, int], compute: Callable[[], Tensor]) -> Tensor:
    """Read ``file``; compute and write it first where it is missing or damaged."""
    found = _opened(file, shape)
    if found is not None:
        return found
    with locked(file):
        found = _opened(file, shape)
        if found is None:
            found = compute()
            with replacing(file, private=True) as beside:
                save_file({"features": found}, beside)
    return found


def _opened(file: Path, shape: tuple[int, int]) -> Tensor | None:
    """The features, or None where there are none, or others than expected."""
    try:
        features = load_file(file)["features"]
    except (OSError, SafetensorError, KeyError):
        return None
    sound = features.dtype == torch.float32 and features.shape == shape and bool(torch.isfinite(features).all())
    return features if sound else None

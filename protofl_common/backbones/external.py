"""Backbones from elsewhere: torchvision's, timm's, and files of weights for torchvision's architectures.

The features are what enters the last linear layer, which is taken off. Files are read as tensors only
(safetensors, or ``torch.load`` with ``weights_only``): no code in them is ever run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protofl_common.backbones.network import Backbone, BackboneError
from protofl_common.config.backbones import BackboneName

IMAGENET_SIZE = 224
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""What torchvision's models expect, and files of weights for them unless ``@SIZE`` says otherwise."""


def build(name: BackboneName) -> Backbone:
    """The backbone of a name of kind torchvision, timm or file; raises BackboneError when it cannot be had."""
    return {"torchvision": _from_torchvision, "timm": _from_timm, "file": _from_file}[name.kind](name)


def _from_torchvision(name: BackboneName) -> Backbone:
    from torchvision import models

    weights = models.get_model_weights(_known(name.arch)).DEFAULT
    preset = weights.transforms()
    try:
        network = models.get_model(name.arch, weights=weights)
    except (OSError, RuntimeError) as error:
        raise BackboneError(
            f"backbone torchvision:{name.arch}: no weights in torch hub's cache, and no download ({error})"
        ) from error
    _without_head(network, name.arch)
    return _frozen(network, name, int(preset.crop_size[0]), tuple(preset.mean), tuple(preset.std))


def _from_timm(name: BackboneName) -> Backbone:
    try:
        timm = import_module("timm")
    except ImportError as error:
        raise BackboneError(
            f"backbone timm:{name.arch}: the package timm is not installed; pip install timm on every machine"
        ) from error
    try:
        network = timm.create_model(name.arch, pretrained=True, num_classes=0)
    except Exception as error:  # an unknown name, or whatever its hub raises when it cannot download
        raise BackboneError(f"backbone timm:{name.arch}: {error}") from error
    config = timm.data.resolve_model_data_config(network)
    return _frozen(network, name, int(config["input_size"][-1]), tuple(config["mean"]), tuple(config["std"]))


def _from_file(name: BackboneName) -> Backbone:
    from torchvision import models

    network = models.get_model(_known(name.arch), weights=None)
    head = _without_head(network, name.arch)
    state = {key: value for key, value in _read(Path(name.path).expanduser()).items() if not key.startswith(head)}
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise BackboneError(f"{name.path}: not the weights of torchvision's {name.arch} ({reason}…)") from error
    return _frozen(network, name, IMAGENET_SIZE, IMAGENET_MEAN, IMAGENET_STD)


def _read(file: Path) -> dict[str, Tensor]:
    """The tensors in a file by their names."""
    try:
        if file.suffix == ".safetensors":
            state: Any = import_module("safetensors.torch").load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and safetensors raise many kinds
        raise BackboneError(f"{file}: cannot be read as tensors ({error})") from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BackboneError(f"{file}: holds something else than a state dict of tensors")
    return dict(state)


def _known(arch: str) -> str:
    """``arch``, where it is one of torchvision's classifiers."""
    from torchvision import models

    choices = models.list_models(module=models)
    if arch not in choices:
        raise BackboneError(f"backbone architecture {arch!r} is not one of {', '.join(choices)}")
    return arch


def _without_head(network: nn.Module, arch: str) -> str:
    """Replace the last linear layer by the identity; returns the start of its parameters' names."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear or not linear[-1].startswith(("fc", "classifier", "head")):
        raise BackboneError(f"backbone architecture {arch!r} does not end in a linear layer")
    parent, _, child = linear[-1].rpartition(".")
    setattr(network.get_submodule(parent), child, nn.Identity())
    return f"{linear[-1]}."


def _frozen(
    network: nn.Module, name: BackboneName, size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Backbone:
    size = name.size or size
    network.eval()
    try:
        with torch.inference_mode():
            features: Any = network(torch.zeros(1, 3, size, size))
        width = int(features.shape[1])
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise BackboneError(f"backbone {name.kind}:{name.arch} takes no images of {size}×{size} ({error})") from error
    identity = f"{name.kind}:{name.arch}@{size}:{mean}:{std}:{_checksum(network)}"
    return Backbone(network, size, width, mean, std, identity)


def _checksum(network: nn.Module) -> str:
    total = hashlib.sha256()
    for key, value in sorted(network.state_dict().items()):
        total.update(f"{key} {tuple(value.shape)}\n".encode())
        total.update(value.detach().contiguous().numpy().tobytes())
    return total.hexdigest()

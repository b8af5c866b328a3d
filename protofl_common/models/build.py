"""From the name of an architecture to a new model, with first weights by owner and seed."""

import math
from contextlib import suppress
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from protofl_common.backbones.load import classifier_name, timm
from protofl_common.basics.seeding import derive_seed
from protofl_common.config.architectures import (
    ARCHITECTURES,
    GAUSSIAN,
    ORTHOGONAL_SHARED,
    OTHER_NETWORKS,
    body_and_hidden,
)
from protofl_common.config.options import SettingsError, did_you_mean
from protofl_common.config.python_names import LIBRARY_NETWORK, is_python_name, load
from protofl_common.config.sections import ModelSettings
from protofl_common.maths.gaussian import GaussianHead
from protofl_common.models.bodies import (
    CNN_PLANS,
    SIGNAL,
    TABLE,
    TEXT,
    VISION,
    Embedded,
    reach_width,
    torchvision_trunk,
)
from protofl_common.models.devices import seeded
from protofl_common.models.split import HiddenHead, LinearHead, SplitModel, class_directions

M = TypeVar("M", bound=nn.Module)
Shape = tuple[int, ...]
"""Of a sample, as (channels, H, W) or (features,); () for a head alone."""
SMALLEST_IMAGE = 8
IMAGES = (
    f"square images [channels, H, W] (grey: [1, H, W]) of at least {SMALLEST_IMAGE} pixels a side "
    "(set image-size for others)"
)
# 2 GiB of float32: a run's feature-dim and image-size, or a card, could ask for a hundred times it.
MAX_PARAMETERS = 2**29
GROUPS_HINT = (
    "models = table3 is for tables, signal3 for signals, text3 for texts, small3 and most others "
    "for images"
)


def initial_model(
    arch: str,
    input_shape: Shape,
    num_classes: int,
    settings: ModelSettings,
    seed: int,
    owner: str,
) -> SplitModel:
    """Return ``owner``'s model before round 1, on the CPU, the same on server and client.

    ``owner`` is a client's name, or "global" for a model that all of one architecture begin with.
    With the ``input_shape`` () it is a head alone.
    """
    # a model for all is built once and copied, except a user's own, whose copy may fail
    is_shared = owner == "global" and arch in ARCHITECTURES
    build = _shared_model if is_shared else build_model
    model = build(
        arch,
        input_shape=input_shape,
        num_classes=num_classes,
        feature_dim=settings.feature_dim,
        seed=derive_seed(seed, "model", owner),
        head=settings.head,
        head_seed=derive_seed(seed, "head") if settings.head == ORTHOGONAL_SHARED else None,
    )
    if is_shared:
        model = copied(model)
    if settings.norm == "group":
        model = with_group_norm(model)
    return model


def copied(module: M) -> M:
    """Return a copy of a module of this package, with parameters and buffers of its own.

    It takes a fifth of the time of ``deepcopy``, and every visit of a client copies a model. All
    other attributes are shared, and weights that two layers share would become two.
    """
    twin = module.__new__(type(module))
    for name, value in vars(module).items():
        vars(twin)[name] = value.copy() if isinstance(value, dict) else value

    for name, parameter in module._parameters.items():
        if parameter is not None:
            weights = parameter.detach().clone()
            twin._parameters[name] = nn.Parameter(weights, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            twin._buffers[name] = buffer.clone()
    for name, child in module._modules.items():
        if child is not None:
            twin._modules[name] = copied(child)
    return twin


def build_model(
    arch: str,
    *,
    input_shape: Shape,
    num_classes: int,
    feature_dim: int,
    seed: int,
    head: str = "trainable",
    head_seed: int | None = None,
) -> SplitModel:
    """Build a model on the CPU, with initial weights that follow from the arguments alone.

    Torch's global generator is left as it was. With an empty ``input_shape`` there is no body, only
    a head: FedGH's server has such a model.

    ``head`` is a value of the setting of this name. A frozen last layer is drawn from ``head_seed``
    if there is one: clients of different bodies then have the same last layer, as in FedNH. Else it
    is drawn from ``seed``, and each client has its own, as in the code of FedProto-UH.

    A Gaussian classifier has no body either: its inputs are the features of frozen backbones. It
    has nothing to draw, so ``head`` and the seeds do not matter. ValueError for an unknown
    architecture, for inputs that it cannot have, and for too many parameters.
    """
    if arch == GAUSSIAN:
        return SplitModel(nn.Identity(), GaussianHead(num_classes, input_shape[0]))
    if arch not in ARCHITECTURES and not OTHER_NETWORKS.fullmatch(arch):
        raise ValueError(f"arch is {arch!r}, not one of {', '.join(ARCHITECTURES)}")
    if arch in ARCHITECTURES and input_shape:  # a user's own network checks its inputs itself
        _check_size(arch, input_shape, num_classes, feature_dim)
    with seeded(seed):
        body: nn.Module = nn.Identity()
        if input_shape:
            body_name, _ = body_and_hidden(arch)
            body = _body(body_name, input_shape, feature_dim)
        return SplitModel(body, _head(arch, num_classes, feature_dim, head, head_seed))


_shared_model = lru_cache(maxsize=4)(build_model)


@lru_cache(maxsize=64)
def _check_size(arch: str, input_shape: Shape, num_classes: int, feature_dim: int) -> None:
    """Refuse a network of more than `MAX_PARAMETERS` with SettingsError, before it takes memory."""
    body_name, _ = body_and_hidden(arch)
    # any seed would do: nothing that is drawn is kept, and torch's generator stays as it was
    with seeded(0), torch.device("meta"):
        body = _body(body_name, input_shape, feature_dim)
        head = _head(arch, num_classes, feature_dim, "trainable", None)
    number = sum(parameter.numel() for parameter in SplitModel(body, head).parameters())
    if number > MAX_PARAMETERS:
        raise SettingsError(
            f"arch = {arch!r}: {number:,} parameters, above {MAX_PARAMETERS:,}, for inputs "
            f"{list(input_shape)} and feature-dim = {feature_dim}; choose another network, "
            "or a smaller size"
        )


def _head(
    arch: str, num_classes: int, feature_dim: int, head: str, head_seed: int | None
) -> LinearHead:
    """Build the head of ``arch``, with weights from torch's global generator.

    ``head`` is a value of the setting of this name. If it freezes the last layer, ``head_seed``
    seeds that generator before the layer's directions are drawn; with None they are drawn from the
    generator as it stands.
    """
    body_name, hidden = body_and_hidden(arch)
    layers: LinearHead
    if hidden:
        layers = HiddenHead(feature_dim, hidden, num_classes)
    else:
        layers = LinearHead(feature_dim, num_classes)
    if body_name in CNN_PLANS:
        layers.dropout = CNN_PLANS[body_name].dropout
    if head == "trainable":
        return layers

    # the last layer stays fixed, with a bias of 0 however unequal the classes are (FedProto-UH; Dai
    # et al., AAAI 2023)
    if head_seed is not None:
        torch.default_generator.manual_seed(head_seed)
    layers.weight = nn.Parameter(class_directions(*layers.weight.shape), requires_grad=False)
    layers.bias = nn.Parameter(torch.zeros(num_classes), requires_grad=False)
    return layers


def _body(name: str, input_shape: Shape, feature_dim: int) -> nn.Module:
    """Build the body called ``name``; ValueError for samples of another shape than it takes."""
    if is_python_name(name):
        return _users_body(name, input_shape, feature_dim)
    if LIBRARY_NETWORK.fullmatch(name) and len(input_shape) == 3:
        return _library_body(name, input_shape, feature_dim)
    if name in TABLE:
        return nn.Sequential(nn.Flatten(), *TABLE[name](math.prod(input_shape), feature_dim))
    if name in SIGNAL and len(input_shape) == 2:
        return nn.Sequential(*SIGNAL[name](*input_shape, feature_dim))
    if name in TEXT and len(input_shape) == 1:
        return nn.Sequential(Embedded(), *TEXT[name](feature_dim))
    if name in VISION and len(input_shape) == 3:
        channels, height, width = input_shape
        if height == width >= SMALLEST_IMAGE:
            return VISION[name](channels, height, feature_dim)

    takes = IMAGES
    if name in SIGNAL:
        takes = "signals [channels, steps]"
    elif name in TEXT:
        takes = "texts [tokens]"
    shape = list(input_shape)
    raise ValueError(
        f"arch {name!r} is for {takes}; a sample of these data is {shape}; {GROUPS_HINT}"
    )


def _users_body(name: str, input_shape: Shape, feature_dim: int) -> nn.Module:
    """Build a network of the user's own: ``arch = "module:name"``.

    ``name(input_shape=(…), feature_dim=D)`` must return an ``nn.Module`` that maps inputs
    [B, *input_shape], float32 and normalised or tokens int64, to features [B, D], float32. First
    weights drawn in it follow from the run's seed. SettingsError if it fails, or returns something
    else.
    """
    make = load(name, "arch")
    try:
        body = make(input_shape=input_shape, feature_dim=feature_dim)
    except Exception as error:  # a user's class may raise anything
        raise SettingsError(
            f"arch = {name!r}: it failed ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(body, nn.Module):
        raise SettingsError(f"arch = {name!r}: it returned {type(body).__name__}, not an nn.Module")
    if any(is_lazy(parameter) for parameter in (*body.parameters(), *body.buffers())):
        # layers take their shapes from their inputs: two samples of zeros, numbers or tokens. A
        # network that fails is left as it is: `check_model` refuses it later, and says why
        for dtype in (torch.float32, torch.int64):
            with suppress(Exception), torch.no_grad():  # a user's network may raise anything
                body.eval()(torch.zeros(2, *input_shape, dtype=dtype))
                break
        body.train()
    return body


def _library_body(name: str, input_shape: Shape, feature_dim: int) -> nn.Module:
    """Build an untrained network of a library: ``torchvision:resnet18``, ``timm:convnext_atto``.

    Only what a library lists as its classifiers has such a name: a name imports nothing else, and
    reads no weights. The first convolution takes as many channels as the images have; the inputs of
    the last linear layer are the features, of which `reach_width` makes ``feature_dim``.
    SettingsError for an unknown name, and ValueError for images that the network cannot take.
    """
    library, _, arch = name.partition(":")
    channels = input_shape[0]
    check_library(name)
    try:
        if library == "torchvision":
            trunk = torchvision_trunk(arch, channels)
        else:
            trunk = timm().create_model(arch, pretrained=False, in_chans=channels, num_classes=0)
        with torch.inference_mode():
            features = trunk.eval()(torch.zeros(1, *input_shape))
        width = features.flatten(1).shape[1]
        return nn.Sequential(trunk.train(), reach_width(width, feature_dim))
    except Exception as error:  # a library may raise anything about images
        raise ValueError(
            f"arch = {name!r}: {error} (images {list(input_shape)}; image-size sets another)"
        ) from error


def check_library(name: str) -> None:
    """Refuse a ``LIBRARY:NETWORK`` that is not installed, or not known there; SettingsError."""
    library, _, arch = name.partition(":")
    try:
        if library == "torchvision":
            classifier_name(arch)
        elif not timm().is_model(arch):
            raise ValueError(f"timm has no such network{did_you_mean(arch, timm().list_models())}")
    except (ImportError, ValueError) as error:
        raise SettingsError(f"arch = {name!r}: {error}") from error


def check_model(model: SplitModel, arch: str, inputs: Tensor, feature_dim: int) -> None:
    """Try a model's body on samples; SettingsError unless it returns features [B, D] float32.

    The model is left in evaluation mode.
    """
    taken = f"arch = {arch!r}: inputs {_described(inputs)}"
    try:
        with torch.inference_mode():
            features = model.eval().body(inputs)
    except Exception as error:  # a user's network may raise anything
        hint = GROUPS_HINT
        if not inputs.is_floating_point():
            hint = f"{GROUPS_HINT}; give whole numbers of a table as floating point"
        raise SettingsError(
            f"{taken} do not fit ({type(error).__name__}: {error}); {hint}"
        ) from error

    wanted = [len(inputs), feature_dim]
    returned = type(features).__name__
    if isinstance(features, Tensor):
        returned = _described(features)
    if returned != f"float32 {wanted}":
        raise SettingsError(f"{taken} become {returned}, not float32 [B, feature-dim] = {wanted}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def with_group_norm(module: M) -> M:
    """Replace BatchNorm by GroupNorm inside a module, in place, and return it.

    Maps are normalised in up to 32 groups of channels (Wu and He, ECCV 2018), vectors and signals
    in one.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            groups = 1
            if isinstance(child, nn.BatchNorm2d):
                groups = math.gcd(32, child.num_features)  # groups must have equally many channels
            setattr(module, name, nn.GroupNorm(groups, child.num_features))
        else:
            with_group_norm(child)
    return module

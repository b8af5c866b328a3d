"""From the name of an architecture to a freshly initialised model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from protofl_common.config.architectures import ARCHITECTURES, HEADS, PROJECTION, body_and_hidden
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import is_python_name, load
from protofl_common.maths.gaussian import GaussianHead
from protofl_common.models.cnn import CNN_PLANS, build_cnn
from protofl_common.models.compact import COMPACT
from protofl_common.models.heads import LinearHead, build_head, freeze_orthogonally
from protofl_common.models.resnet import RESNET_PLANS, build_resnet
from protofl_common.models.split import SplitModel
from protofl_common.models.vectors import MLP_PLANS, SIGNAL, TEXT, build_mlp, build_projection

SMALLEST_IMAGE = 8
GAUSSIAN = "gaussian-"
"""The architecture of a Gaussian head behind frozen backbones, before the kind of head."""
HINT = "models = table3 is for tables, signal3 for signals, text3 for texts, small3 and most others for images"


def build_model(
    arch: str,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    feature_dim: int,
    seed: int,
    head: str = "trainable",
    head_seed: int | None = None,
) -> SplitModel:
    """A model on the CPU; its initial weights are a function of the arguments alone, torch's global RNG is untouched.

    ``head`` is one of ``HEADS``. A frozen last layer is drawn from ``head_seed``, so that clients of different bodies
    can have the same one, as in FedNH (last layers of one width: HtC4's differ), or else from ``seed``: each client its
    own, as in the code of FedProto-UH, whose text does not say. Nothing else depends on these two arguments.

    Raises ValueError for an unknown architecture or kind of head, and for inputs and sizes that it cannot have.
    """
    if arch.startswith(GAUSSIAN):
        return SplitModel(nn.Identity(), GaussianHead(num_classes, input_shape[0], arch.removeprefix(GAUSSIAN)))
    _check(arch, head, num_classes, feature_dim)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # unlike torch.manual_seed, leaves the GPUs' generators alone
        body = _build_body(_parts(arch)[0], input_shape, feature_dim)
        return SplitModel(body, _build_top(arch, num_classes, feature_dim, head, head_seed))


def build_head_alone(
    arch: str, *, num_classes: int, feature_dim: int, seed: int, head: str = "trainable", head_seed: int | None = None
) -> LinearHead:
    """A head as a model of ``arch`` has it, in evaluation mode, with weights of its own.

    The body is not built, so it may be a network that cannot be imported here. Arguments as of `build_model`.
    """
    _check(arch, head, num_classes, feature_dim)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _build_top(arch, num_classes, feature_dim, head, head_seed).eval()


def _parts(arch: str) -> tuple[str, int]:
    """The body's name, and the width of the head's hidden layer."""
    return (arch, 0) if is_python_name(arch) else body_and_hidden(arch)


def _build_top(arch: str, num_classes: int, feature_dim: int, head: str, head_seed: int | None) -> LinearHead:
    name, hidden = _parts(arch)
    top = build_head(feature_dim, hidden, num_classes, CNN_PLANS[name].dropout if name in CNN_PLANS else 0.0)
    if head == "orthogonal-frozen":
        if head_seed is not None:
            torch.default_generator.manual_seed(head_seed)
        freeze_orthogonally(top)
    return top


def check_model(model: SplitModel, arch: str, inputs: Tensor, feature_dim: int) -> None:
    """Let two samples through the body of a model, without training it.

    SettingsError when it does not take them, or does not return features [2, D].
    """
    taken = f"arch = {arch!r}: inputs {_described(inputs)}"
    try:
        with torch.inference_mode():
            features = model.eval().body(inputs)
    except Exception as error:  # a user's network may raise anything
        raise SettingsError(f"{taken} do not fit ({type(error).__name__}: {error}); {HINT}") from error
    wanted = (len(inputs), feature_dim)
    if not isinstance(features, Tensor) or features.dtype != torch.float32 or tuple(features.shape) != wanted:
        found = _described(features) if isinstance(features, Tensor) else type(features).__name__
        raise SettingsError(f"{taken} become {found}, not float32 [B, feature-dim] = {list(wanted)}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _own_body(name: str, input_shape: tuple[int, ...], feature_dim: int) -> nn.Module:
    """A network of the user's own: ``arch = "module:name"``.

    ``name(input_shape=(…), feature_dim=D)`` must return an ``nn.Module`` that maps inputs [B, *input_shape] to features
    [B, D], float32. Inputs are float32 and normalised (images [channels, H, W], signals [channels, steps],
    tables [features]), or tokens [length], int64. ProtoFL adds the head, which maps features to logits. Random first
    weights are drawn in the constructor, from torch's global generator: they then follow from the run's seed. The
    client moves the module to its device; what has to travel with it must be a parameter or a buffer.
    """
    make = load(name, "arch")
    try:
        body = make(input_shape=input_shape, feature_dim=feature_dim)
    except Exception as error:  # a user's class may raise anything
        raise SettingsError(f"arch = {name!r}: it failed ({type(error).__name__}: {error})") from error
    if not isinstance(body, nn.Module):
        raise SettingsError(f"arch = {name!r}: it returned {type(body).__name__}, not an nn.Module")
    return body


def _build_body(name: str, input_shape: tuple[int, ...], feature_dim: int) -> nn.Module:
    if is_python_name(name):
        return _own_body(name, input_shape, feature_dim)
    if name == PROJECTION:
        return build_projection(input_shape, feature_dim)
    if name in MLP_PLANS:
        return build_mlp(MLP_PLANS[name], input_shape, feature_dim)
    if name in SIGNAL:
        _check_dimensions(name, input_shape, 2, "signals [channels, steps]")
        return SIGNAL[name](input_shape[0], input_shape[1], feature_dim)
    if name in TEXT:
        _check_dimensions(name, input_shape, 1, "texts [tokens]")
        return TEXT[name](feature_dim)
    channels, side = _square_image(name, input_shape)
    if name in CNN_PLANS:
        return build_cnn(CNN_PLANS[name], in_channels=channels, image_size=side, feature_dim=feature_dim)
    if name in RESNET_PLANS:
        return build_resnet(RESNET_PLANS[name], in_channels=channels, feature_dim=feature_dim)
    return COMPACT[name](channels, side, feature_dim)


def _check_dimensions(name: str, input_shape: tuple[int, ...], wanted: int, what: str) -> None:
    if len(input_shape) != wanted:
        raise ValueError(f"arch {name!r} is for {what}; a sample of these data is {list(input_shape)}; {HINT}")


def _square_image(name: str, input_shape: tuple[int, ...]) -> tuple[int, int]:
    """Channels and pixels a side."""
    if len(input_shape) != 3 or input_shape[1] != input_shape[2] or input_shape[1] < SMALLEST_IMAGE:
        raise ValueError(
            f"arch {name!r} is for square images [channels, H, W] (grey: [1, H, W]) of at least {SMALLEST_IMAGE} "
            f"pixels a side (set image-size for others); a sample of these data is {list(input_shape)}; {HINT}"
        )
    return input_shape[0], input_shape[1]


def _check(arch: str, head: str, num_classes: int, feature_dim: int) -> None:
    if arch not in ARCHITECTURES and not is_python_name(arch):
        raise ValueError(f"arch is {arch!r}, not one of {', '.join(ARCHITECTURES)}")
    if head not in HEADS:
        raise ValueError(f"head is {head!r}, not one of {', '.join(HEADS)}")
    for name, value in (("num_classes", num_classes), ("feature_dim", feature_dim)):
        if value < 1:
            raise ValueError(f"{name} is {value}, below 1")

"""Names of architectures, of model groups and of kinds of heads (no heavy imports here)."""

import re
from typing import Any

from protofl_common.config.lists import parts_of
from protofl_common.config.options import option
from protofl_common.config.python_names import LIBRARY_NETWORK, PYTHON_NAME

OTHER_NETWORKS = re.compile(f"{LIBRARY_NETWORK.pattern}|{PYTHON_NAME.pattern}", re.ASCII)
"""What a network may be called beside the names below."""
OTHER_NETWORKS_IN_WORDS = "torchvision:NAME, timm:NAME, or MODULE:CLASS of your own"
VOCABULARY = 2**14  # number of tokens of the networks for texts; 0 is padding
BODIES: dict[str, str] = {
    "mnist-cnn": "2 conv (10, 20 channels) + 2 fc: FedProto's CNN for MNIST",
    "mnist-cnn-18": "mnist-cnn with 18 channels in its second convolution (FedProto-mh)",
    "mnist-cnn-20": "mnist-cnn with 20 channels in its second convolution (FedProto-mh)",
    "mnist-cnn-22": "mnist-cnn with 22 channels in its second convolution (FedProto-mh)",
    "cnn4": "4-layer CNN: 2 conv (32, 64 channels) + 2 fc",
    "htcnn-1": "conv 32 | fc D",
    "htcnn-2": "conv 32, 64 | fc D",
    "htcnn-3": "conv 32 | fc 512, D",
    "htcnn-4": "conv 32, 64 | fc 512, D",
    "htcnn-5": "conv 32 | fc 1024, D",
    "htcnn-6": "conv 32, 64 | fc 1024, D",
    "htcnn-7": "conv 32 | fc 1024, 512, D",
    "htcnn-8": "conv 32, 64 | fc 1024, 512, D",
    "resnet10": "ResNet-10 with a 3×3 stem for small images",
    "resnet18": "ResNet-18 with a 3×3 stem for small images",
    "resnet10-5x5-stem": (
        "ResNet-10 with a 5×5 stem of stride 2, then max-pooling of stride 2 (FedPLVM)"
    ),
    "resnet18-stride-1-4": (
        "ResNet-18 with a 7×7 stem of stride 1, then max-pooling of stride 4 (FedProto-mh)"
    ),
    "resnet4-imagenet-stem": (
        "ResNet-10 cut after its first stage; stem: 7×7 of stride 2, then max-pooling of stride 2"
    ),
    "resnet6-imagenet-stem": "ResNet-10 cut after its second stage, ImageNet stem",
    "resnet8-imagenet-stem": "ResNet-10 cut after its third stage, ImageNet stem",
    "resnet10-imagenet-stem": "ResNet-10, ImageNet stem",
    "resnet18-imagenet-stem": "torchvision's ResNet-18",
    "resnet34-imagenet-stem": "torchvision's ResNet-34",
    "resnet50-imagenet-stem": "torchvision's ResNet-50",
    "resnet101-imagenet-stem": "torchvision's ResNet-101",
    "resnet152-imagenet-stem": "torchvision's ResNet-152",
    "googlenet": "torchvision's GoogLeNet without auxiliary heads",
    "mobilenet-v2": "torchvision's MobileNet_v2",
    "mlp-1": "tables: fc 64, D",
    "mlp-2": "tables: fc 128, 64, D",
    "mlp-3": "tables: fc 256, 128, 64, D",
    "signal-cnn": "signals: 2 conv over the steps (64, 128 channels) + fc D",
    "signal-gru": "signals: GRU of 64 units + fc D",
    "signal-transformer": "signals: one Transformer layer of width 64 + fc D",
    "text-bag": "texts: mean of the words' vectors (64) + fc 64, D",
    "text-cnn": "texts: words' vectors (64) + 2 conv over the words (64, 128 channels) + fc D",
    "text-gru": "texts: words' vectors (64) + GRU of 64 units + fc D",
    "projection": "fc D, ReLU, BatchNorm: FedPCL's projection of frozen features",
}
PROJECTION = "projection"  # what every client trains behind frozen backbones
HTC4 = ("", "+fc512", "+fc256", "+fc128")
"""FedTGP's heads, behind a body's name: fc C, or one more layer before it."""
_SMALL_RESNETS = tuple(f"resnet{layers}-imagenet-stem" for layers in (4, 6, 8, 10))
_RESNETS = tuple(f"resnet{layers}-imagenet-stem" for layers in (18, 34, 50, 101, 152))
_HTFE8 = ("cnn4", "googlenet", "mobilenet-v2", *_RESNETS)
_PAPERS: dict[str, tuple[str, ...]] = {
    "small3": ("cnn4", "mnist-cnn", "htcnn-3"),
    "table3": ("mlp-1", "mlp-2", "mlp-3"),
    "signal3": ("signal-cnn", "signal-gru", "signal-transformer"),
    "text3": ("text-bag", "text-cnn", "text-gru"),
    "fedproto-mh": ("mnist-cnn-18", "mnist-cnn-20", "mnist-cnn-22"),
    "fedproto-mh-cifar": ("resnet18-stride-1-4", "resnet18-imagenet-stem"),
    "htcnn8": tuple(f"htcnn-{i}" for i in range(1, 9)),
    "htfe2": ("cnn4", "resnet18-imagenet-stem"),
    "htfe3": ("resnet10-imagenet-stem", "resnet18-imagenet-stem", "resnet34-imagenet-stem"),
    "htfe4": _HTFE8[:4],
    "htfe8": _HTFE8,
    "htfe9": (*_SMALL_RESNETS, *_RESNETS),
    "res34-htc4": tuple("resnet34-imagenet-stem" + head for head in HTC4),
    "htfe8-htc4": tuple(body + head for body, head in zip(_HTFE8, 2 * HTC4, strict=True)),
}


def body_and_hidden(arch: str) -> tuple[str, int]:
    """Split ``BODY+fcN`` into the body's name and the width N of the head's hidden layer, or 0."""
    body, _, hidden = arch.partition("+fc")
    return body, int(hidden or 0)


def _architectures() -> dict[str, str]:
    """Return a description of each architecture, by name.

    These are the bodies, with a head of one layer, and the ``BODY+fcN`` in the papers' groups,
    whose heads have a hidden layer, too.
    """
    described = dict(BODIES)
    for group in _PAPERS.values():
        for arch in group:
            if arch not in BODIES:
                body, hidden = body_and_hidden(arch)
                described[arch] = f"{body}, head: fc {hidden}, C"
    return described


ARCHITECTURES: dict[str, str] = _architectures()
GROUPS: dict[str, tuple[str, ...]] = _PAPERS | {name: (name,) for name in ARCHITECTURES}


def architecture_option(help: str, site: str = "") -> Any:
    """Return the field of a setting that names one architecture, or "" for none.

    ``site`` says what the setting means in a site's node config; without it, it may not stand
    there.
    """
    return option(
        default="",
        choices=("", *ARCHITECTURES),
        or_like=OTHER_NETWORKS,
        or_words=OTHER_NETWORKS_IN_WORDS,
        help=help,
        site=site,
    )


GAUSSIAN = "gaussian-lda"  # a head in closed form behind frozen backbones (`maths/gaussian.py`)

HEADS: dict[str, str] = {
    "trainable": "trains like the body",
    "orthogonal-frozen": (
        "last layer fixed: orthogonal directions of length 1, no bias (FedProto-UH)"
    ),
}
ORTHOGONAL_SHARED = "orthogonal-shared"
"""As orthogonal-frozen, with the same directions for all clients (FedNH)."""


def members_of(models: str) -> tuple[str, ...]:
    """Return the architectures that the setting ``models`` stands for, at least one.

    It is a list, separated by commas, of groups, architectures and Python names. An empty list
    gives the one name "", which is no architecture.
    """
    members: list[str] = []
    for name in parts_of(models) or [""]:
        members += GROUPS.get(name, (name,))  # a group, or the name of one architecture
    return tuple(members)


def architecture_of(models: str, client: int) -> str:
    """Return the architecture of the client with this index: ``models`` are dealt out in turn."""
    members = members_of(models)
    return members[client % len(members)]

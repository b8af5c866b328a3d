"""Names of architectures, of model groups and of kinds of heads (no heavy imports here)."""

import re
from itertools import product
from typing import Any

from protofl_common.config.python_names import LIBRARY_NETWORK, PYTHON_NAME

OTHER_NETWORKS = re.compile(f"{LIBRARY_NETWORK.pattern}|{PYTHON_NAME.pattern}", re.ASCII)
OR_ANOTHER: dict[str, Any] = {  # what an option may be beside the names below
    "or_like": OTHER_NETWORKS,
    "or_words": "torchvision:NAME, timm:NAME, or MODULE:CLASS of your own",
}
VOCABULARY = 2**14  # number of tokens of the networks for texts; 0 is padding
_FC = ("D", "512, D", "1024, D", "1024, 512, D")
BODIES: dict[str, str] = {
    "mnist-cnn": "2 conv (10, 20 channels) + 2 fc: FedProto's CNN for MNIST",
    **{f"mnist-cnn-{n}": f"mnist-cnn with {n} channels in its second convolution (FedProto-mh)" for n in (18, 20, 22)},
    "cnn4": "4-layer CNN: 2 conv (32, 64 channels) + 2 fc",
    **{f"htcnn-{n}": f"conv {conv} | fc {fc}" for n, (fc, conv) in enumerate(product(_FC, ("32", "32, 64")), start=1)},
    "resnet10": "ResNet-10 with a 3×3 stem for small images",
    "resnet18": "ResNet-18 with a 3×3 stem for small images",
    "resnet10-5x5-stem": "ResNet-10 with a 5×5 stem of stride 2, then max-pooling of stride 2 (FedPLVM)",
    "resnet18-stride-1-4": "ResNet-18 with a 7×7 stem of stride 1, then max-pooling of stride 4 (FedProto-mh)",
    "resnet4-imagenet-stem": "ResNet-10 cut after its first stage; stem: 7×7 of stride 2, then max-pooling of stride 2",
    "resnet6-imagenet-stem": "ResNet-10 cut after its second stage, ImageNet stem",
    "resnet8-imagenet-stem": "ResNet-10 cut after its third stage, ImageNet stem",
    "resnet10-imagenet-stem": "ResNet-10, ImageNet stem",
    **{f"resnet{n}-imagenet-stem": f"torchvision's ResNet-{n}" for n in (18, 34, 50, 101, 152)},
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
HTC4 = ("", "+fc512", "+fc256", "+fc128")  # FedTGP's heads, behind a body's name: fc C, or one more layer before it
_RESNETS = tuple(f"resnet{n}-imagenet-stem" for n in (4, 6, 8, 10, 18, 34, 50, 101, 152))
_HTFE8 = ("cnn4", "googlenet", "mobilenet-v2", *_RESNETS[4:])
_PAPERS: dict[str, tuple[str, ...]] = {
    "small3": ("cnn4", "mnist-cnn", "htcnn-3"),
    "table3": ("mlp-1", "mlp-2", "mlp-3"),
    "signal3": ("signal-cnn", "signal-gru", "signal-transformer"),
    "text3": ("text-bag", "text-cnn", "text-gru"),
    "fedproto-mh": ("mnist-cnn-18", "mnist-cnn-20", "mnist-cnn-22"),
    "fedproto-mh-cifar": ("resnet18-stride-1-4", "resnet18-imagenet-stem"),
    "htcnn8": tuple(f"htcnn-{i}" for i in range(1, 9)),
    "htfe2": ("cnn4", "resnet18-imagenet-stem"),
    "htfe3": _RESNETS[3:6],
    "htfe4": _HTFE8[:4],
    "htfe8": _HTFE8,
    "htfe9": _RESNETS,
    "res34-htc4": tuple("resnet34-imagenet-stem" + head for head in HTC4),
    "htfe8-htc4": tuple(body + HTC4[i % len(HTC4)] for i, body in enumerate(_HTFE8)),
}


def body_and_hidden(arch: str) -> tuple[str, int]:
    """The body's name, and the width of the head's hidden layer (0: it has none)."""
    body, _, hidden = arch.partition("+fc")
    return body, int(hidden or 0)


ARCHITECTURES: dict[str, str] = BODIES | {
    arch: "{}, head: fc {}, C".format(*body_and_hidden(arch))
    for group in _PAPERS.values()
    for arch in group
    if arch not in BODIES
}

GROUPS: dict[str, tuple[str, ...]] = _PAPERS | {name: (name,) for name in ARCHITECTURES}
GAUSSIAN_HEADS = ("naive-bayes", "lda", "qda")  # in closed form (`maths/gaussian.py`), as arch ``gaussian-lda`` …

HEADS: dict[str, str] = {
    "trainable": "trains like the body",
    "orthogonal-frozen": "last layer fixed: orthogonal directions of length 1, no bias (FedProto-UH)",
}
ORTHOGONAL_SHARED = "orthogonal-shared"  # as orthogonal-frozen, with the same directions for all clients (FedNH)


def members_of(models: str) -> tuple[str, ...]:
    """The architectures of a group, or of a list of groups, architectures and Python names, separated by commas."""
    return tuple(arch for entry in map(str.strip, models.split(",")) for arch in GROUPS.get(entry, (entry,)))


def architecture_of(models: str, client: int) -> str:
    """The architecture that ``models`` assigns to the client with index ``client``: in turn."""
    members = members_of(models)
    return members[client % len(members)]

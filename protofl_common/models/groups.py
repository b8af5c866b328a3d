"""Names of architectures and of model groups (no heavy imports here)."""

from __future__ import annotations

ARCHITECTURES: dict[str, str] = {
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
}

GROUPS: dict[str, tuple[str, ...]] = {
    "small3": ("cnn4", "mnist-cnn", "htcnn-3"),
    "fedproto-mh": ("mnist-cnn-18", "mnist-cnn-20", "mnist-cnn-22"),
    "htcnn8": tuple(f"htcnn-{i}" for i in range(1, 9)),
    **{name: (name,) for name in ARCHITECTURES},
}
"""Client i gets architecture ``i mod len(group)``; every architecture is also a group of one."""


def architecture_of(group: str, client: int) -> str:
    """The architecture that ``group`` assigns to the client with index ``client``."""
    members = GROUPS[group]
    return members[client % len(members)]

"""ResNets for small images: torchvision's, with a 3×3 stem of stride 1 and no max-pooling.

Global average pooling gives 512 features. As in FedTGP (Zhang et al., AAAI 2024), these are average-pooled to D;
a D above 512 is reached by a linear projection instead. BatchNorm cannot train on a batch of one sample where the
last map is a single pixel (images of 8×8).
"""

from __future__ import annotations

from torch import nn

from protofl_common.models.split import LinearHead, SplitModel

RESNET_BLOCKS: dict[str, tuple[int, int, int, int]] = {
    "resnet10": (1, 1, 1, 1),
    "resnet18": (2, 2, 2, 2),
}
RESNET_WIDTH = 512


def build_resnet(
    blocks: tuple[int, int, int, int], *, in_channels: int, num_classes: int, feature_dim: int
) -> SplitModel:
    """A ResNet of BasicBlocks, for images of any size."""
    from torchvision.models.resnet import BasicBlock, ResNet  # over a second to import: only where it is needed

    trunk = ResNet(BasicBlock, list(blocks))
    trunk.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(trunk.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's other ones
    trunk.maxpool = nn.Identity()
    trunk.fc = nn.Identity()
    return SplitModel(nn.Sequential(trunk, _to_width(feature_dim)), LinearHead(feature_dim, num_classes))


def _to_width(feature_dim: int) -> nn.Module:
    if feature_dim <= RESNET_WIDTH:
        return nn.AdaptiveAvgPool1d(feature_dim)
    return nn.Linear(RESNET_WIDTH, feature_dim)

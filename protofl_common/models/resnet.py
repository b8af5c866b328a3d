"""ResNets (He et al., 2016): torchvision's, from 4 to 152 layers, with its stem or with one for small images.

- ``resnet10``, ``resnet18``: a 3×3 stem of stride 1 and no max-pooling, for small images.
- ``…-imagenet-stem``: torchvision's own, 7×7 of stride 2 and max-pooling of stride 2: maps of a quarter of the side, at
  about a fifteenth of the cost. FedTGP's (Zhang et al., AAAI 2024): its authors' code takes torchvision's ResNets
  unchanged for 32×32 images too, and builds those of up to 10 layers with the same stem.
- ``resnet18-stride-1-4``: the ImageNet stem with stride 1, then max-pooling of stride 4. The text on FedProto says only
  that strides differ between clients; its authors' code has this one and (2, 2).
- ``resnet10-5x5-stem``: 5×5 of stride 2 and padding 1, then the same max-pooling: FedPLVM's, by its authors' code.

ResNet-4, 6 and 8 (Zhong et al., 2017) are ResNet-10 cut after its first, second and third stage: 64, 128, 256 features.
All others end in 512 features, or in 2048 with bottlenecks (50 layers and more).

BatchNorm cannot train on a batch of one sample where the last map is a single pixel: images of 8×8, and with the
ImageNet stem, of up to 32×32. There even batches of two leave it little to go by.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from protofl_common.models.layers import ChannelsLast, reach_width

STAGES = 4


@dataclass(frozen=True)
class Stem:
    """The first convolution, its stride and padding, then 3×3 max-pooling of stride ``pool`` (0: none)."""

    kernel: int
    stride: int
    padding: int
    pool: int


SMALL = Stem(3, 1, 1, 0)
IMAGENET = Stem(7, 2, 3, 2)


@dataclass(frozen=True)
class ResNetPlan:
    """Number of ``blocks`` in each stage, of two convolutions, or of three with ``bottleneck``; one to four stages."""

    blocks: tuple[int, ...]
    stem: Stem = IMAGENET
    bottleneck: bool = False

    @property
    def width(self) -> int:
        """Features after global average pooling."""
        return (256 if self.bottleneck else 64) << (len(self.blocks) - 1)


RESNET_PLANS: dict[str, ResNetPlan] = {
    "resnet10": ResNetPlan((1, 1, 1, 1), SMALL),
    "resnet18": ResNetPlan((2, 2, 2, 2), SMALL),
    "resnet18-stride-1-4": ResNetPlan((2, 2, 2, 2), Stem(7, 1, 3, 4)),
    "resnet10-5x5-stem": ResNetPlan((1, 1, 1, 1), Stem(5, 2, 1, 2)),
    "resnet4-imagenet-stem": ResNetPlan((1,)),
    "resnet6-imagenet-stem": ResNetPlan((1, 1)),
    "resnet8-imagenet-stem": ResNetPlan((1, 1, 1)),
    "resnet10-imagenet-stem": ResNetPlan((1, 1, 1, 1)),
    "resnet18-imagenet-stem": ResNetPlan((2, 2, 2, 2)),
    "resnet34-imagenet-stem": ResNetPlan((3, 4, 6, 3)),
    "resnet50-imagenet-stem": ResNetPlan((3, 4, 6, 3), bottleneck=True),
    "resnet101-imagenet-stem": ResNetPlan((3, 4, 23, 3), bottleneck=True),
    "resnet152-imagenet-stem": ResNetPlan((3, 8, 36, 3), bottleneck=True),
}


def build_resnet(plan: ResNetPlan, *, in_channels: int, feature_dim: int) -> nn.Module:
    """The body of a plan, for images of any size."""
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet  # over a second to import: only where needed

    missing = STAGES - len(plan.blocks)
    trunk = ResNet(Bottleneck if plan.bottleneck else BasicBlock, [*plan.blocks, *[1] * missing])
    for stage in range(STAGES - missing, STAGES):
        setattr(trunk, f"layer{stage + 1}", nn.Identity())
    stem = plan.stem
    trunk.conv1 = nn.Conv2d(in_channels, 64, stem.kernel, stem.stride, stem.padding, bias=False)
    nn.init.kaiming_normal_(trunk.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's other ones
    trunk.maxpool = nn.MaxPool2d(3, stem.pool, padding=1) if stem.pool else nn.Identity()
    trunk.fc = nn.Identity()
    order = [ChannelsLast()] if plan.bottleneck else []
    return nn.Sequential(*order, trunk, reach_width(plan.width, feature_dim))

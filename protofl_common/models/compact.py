"""GoogLeNet (Szegedy et al., 2015) and MobileNet_v2 (Sandler et al., 2018): torchvision's, for any image size.

Both belong to FedTGP's HtFE groups (Zhang et al., AAAI 2024), whose code uses these definitions with untrained weights:
ImageNet stems on small images too, GoogLeNet without its auxiliary heads. As there, torchvision's dropout of 0.2 on the
1024 or 1280 pooled features stays, inside the body: features of a model in training mode are noisy, those that
prototypes are made of are not. BatchNorm cannot train on a batch of one sample where the last map is a single pixel:
images of up to 32×32.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from protofl_common.models.layers import ChannelsLast, reach_width

SMALLEST_FOR_THIRD_POOL = 15
"""Smaller images are a single pixel before GoogLeNet's third max-pooling, which cannot take one."""


def build_googlenet(in_channels: int, image_size: int, feature_dim: int) -> nn.Module:
    """The body; on images below 15×15 without its third max-pooling."""
    from torchvision.models.googlenet import GoogLeNet  # over a second to import: only where it is needed

    trunk = GoogLeNet(num_classes=1, aux_logits=False, init_weights=True)
    trunk.conv1.conv = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
    nn.init.trunc_normal_(trunk.conv1.conv.weight, std=0.01, a=-2, b=2)  # as torchvision's other ones
    if image_size < SMALLEST_FOR_THIRD_POOL:
        trunk.maxpool3 = nn.Identity()
    trunk.fc = nn.Identity()
    return nn.Sequential(ChannelsLast(), trunk, reach_width(1024, feature_dim))


def build_mobilenet_v2(in_channels: int, image_size: int, feature_dim: int) -> nn.Module:
    """The body; the size of the images does not matter."""
    from torchvision.models.mobilenetv2 import MobileNetV2  # over a second to import: only where it is needed

    trunk = MobileNetV2(num_classes=1)
    trunk.features[0][0] = nn.Conv2d(in_channels, 32, 3, stride=2, padding=1, bias=False)
    nn.init.kaiming_normal_(trunk.features[0][0].weight, mode="fan_out")  # as torchvision's other ones
    trunk.classifier[1] = nn.Identity()
    return nn.Sequential(ChannelsLast(), trunk, reach_width(trunk.last_channel, feature_dim))


COMPACT: dict[str, Callable[[int, int, int], nn.Module]] = {
    "googlenet": build_googlenet,
    "mobilenet-v2": build_mobilenet_v2,
}

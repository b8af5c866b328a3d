"""Bodies x -> z [B, D]: for square images, for tables and backbone features [F], signals [channels, steps], texts.

A text becomes a signal by an embedding of its tokens. ResNets, GoogLeNet and MobileNet_v2 are torchvision's.

Small CNNs: 5×5 convolutions with 2×2 max-pooling, then fully connected layers; the last of a body has D outputs. The
convolutions are unpadded, as published, where the image is large enough, else (two of them below 16×16) padded by 2.
``mnist-cnn`` is McMahan et al.'s (2017) scaled down, as in FedProto's code, which fixes D = 50; ``htcnn-1`` … HtCNN8 of
FedTGP, as in HtFLlib, with D = 512, and ``cnn4`` the "4-layer CNN" of its HtFE groups.

ResNets (He et al., 2016), with the stems that `config/architectures.py` describes. Those of 4, 6 and 8 layers end in
64, 128 and 256 features; the others in 512, or in 2048 with bottlenecks (50 layers and more). FedTGP has the ImageNet
stem for 32×32 images too; that of stride 1 is as in FedProto's code, the 5×5 one (padding 1) as in FedPLVM's.

BatchNorm cannot train on a batch of one sample where the last map is a single pixel: images of 8×8, and with the
ImageNet stem, of up to 32×32. GoogLeNet and MobileNet_v2 keep their dropout inside the body: features are noisy in
training, but not those that prototypes are made of.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from protofl_common.config.architectures import PROJECTION, VOCABULARY

KERNEL = 5  # pixels a side of the small CNNs' convolutions
STAGES = 4
SMALLEST_FOR_THIRD_POOL = 15  # of a smaller image GoogLeNet's third max-pooling gets a single pixel
WIDTH = 64  # of the networks for signals and texts


def fully_connected(*widths: int) -> list[nn.Module]:
    """Layers of these widths, the first of which is that of the inputs, with a ReLU behind each."""
    return [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.ReLU())]


# -- images
class ChannelsLast(nn.Module):
    """The same images in the memory order [B, H, W, channels], which convolutions pass on; weights keep torch's order.

    On a CPU max-pooling is over ten times as fast so; 1×1 and depthwise convolutions train 1.3 to 1.8 times as fast.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)


def reach_width(width: int, feature_dim: int) -> nn.Module:
    """From the features of a published network to the D that all clients share: [B, width] -> [B, D].

    As in FedTGP, neighbouring features are averaged until D are left. Where D is above ``width``,
    a linear projection makes them, and they can be negative; the authors' code repeats features there.
    """
    return nn.AdaptiveAvgPool1d(feature_dim) if feature_dim <= width else nn.Linear(width, feature_dim)


class CnnPlan(NamedTuple):
    """``channels`` of the convolutions, widths of the ``hidden`` fully connected layers before the one of width D."""

    channels: tuple[int, ...]
    hidden: tuple[int, ...] = ()
    dropout: float = 0.0  # FedProto's: of maps after the last convolution, and of features


_FC: tuple[tuple[int, ...], ...] = ((), (512,), (1024,), (1024, 512))
CNN_PLANS: dict[str, CnnPlan] = {
    "mnist-cnn": CnnPlan((10, 20), dropout=0.5),
    **{f"mnist-cnn-{channels}": CnnPlan((10, channels), dropout=0.5) for channels in (18, 20, 22)},
    "cnn4": CnnPlan((32, 64)),
    **{f"htcnn-{n}": CnnPlan(conv, fc) for n, (fc, conv) in enumerate(product(_FC, ((32,), (32, 64))), start=1)},
}


def _cnn(plan: CnnPlan, in_channels: int, image_size: int, feature_dim: int) -> nn.Module:
    """ReLU follows the pool: the same values and gradients as before it, from a quarter of the elements."""
    padding, side = _padding_and_side(image_size, len(plan.channels))
    layers: list[nn.Module] = [ChannelsLast()]
    for before, after in pairwise((in_channels, *plan.channels)):
        layers += [nn.Conv2d(before, after, KERNEL, padding=padding), nn.MaxPool2d(2), nn.ReLU()]
    if plan.dropout:
        layers.insert(-2, nn.Dropout2d(plan.dropout))  # between the last convolution and its pool
    return nn.Sequential(*layers, nn.Flatten(), *fully_connected(after * side * side, *plan.hidden, feature_dim))


def _padding_and_side(image_size: int, convolutions: int) -> tuple[int, int]:
    """The padding of all convolutions, and the side of the last map: unpadded if that leaves at least one pixel."""
    for padding in (0, KERNEL // 2):
        side = image_size
        for _ in range(convolutions):
            side = (side + 2 * padding - KERNEL + 1) // 2
        if side >= 1:
            break
    return padding, side


SMALL, IMAGENET = (3, 1, 1, 0), (7, 2, 3, 2)  # kernel, stride, padding of the stem, stride of its pooling (0: none)


def _resnet(
    blocks: tuple[int, ...],
    in_channels: int,
    image_size: int,
    feature_dim: int,
    stem: tuple[int, int, int, int] = IMAGENET,
    bottleneck: bool = False,
) -> nn.Module:
    """``blocks`` in each of one to four stages, of two convolutions, or of three with ``bottleneck``."""
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet  # over a second to import: only where needed

    stages, (kernel, stride, padding, pool) = len(blocks), stem
    trunk = ResNet(Bottleneck if bottleneck else BasicBlock, [*blocks, *[1] * (STAGES - stages)])
    for stage in range(stages, STAGES):
        setattr(trunk, f"layer{stage + 1}", nn.Identity())
    trunk.conv1 = nn.Conv2d(in_channels, 64, kernel, stride, padding, bias=False)
    nn.init.kaiming_normal_(trunk.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's other ones
    trunk.maxpool = nn.MaxPool2d(3, pool, padding=1) if pool else nn.Identity()
    trunk.fc = nn.Identity()
    width = (256 if bottleneck else 64) << (stages - 1)
    return nn.Sequential(*[ChannelsLast()] * bottleneck, trunk, reach_width(width, feature_dim))


def _googlenet(in_channels: int, image_size: int, feature_dim: int) -> nn.Module:
    from torchvision.models.googlenet import GoogLeNet  # over a second to import: only where it is needed

    trunk = GoogLeNet(num_classes=1, aux_logits=False, init_weights=True)
    trunk.conv1.conv = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
    nn.init.trunc_normal_(trunk.conv1.conv.weight, std=0.01, a=-2, b=2)  # as torchvision's other ones
    if image_size < SMALLEST_FOR_THIRD_POOL:
        trunk.maxpool3 = nn.Identity()
    trunk.fc = nn.Identity()
    return nn.Sequential(ChannelsLast(), trunk, reach_width(1024, feature_dim))


def _mobilenet_v2(in_channels: int, image_size: int, feature_dim: int) -> nn.Module:
    from torchvision.models.mobilenetv2 import MobileNetV2  # over a second to import: only where it is needed

    trunk = MobileNetV2(num_classes=1)
    trunk.features[0][0] = nn.Conv2d(in_channels, 32, 3, stride=2, padding=1, bias=False)
    nn.init.kaiming_normal_(trunk.features[0][0].weight, mode="fan_out")  # as torchvision's other ones
    trunk.classifier[1] = nn.Identity()
    return nn.Sequential(ChannelsLast(), trunk, reach_width(trunk.last_channel, feature_dim))


BLOCKS: dict[int, tuple[int, ...]] = {4: (1,), 6: (1,) * 2, 8: (1,) * 3, 10: (1,) * 4, 18: (2,) * 4, 34: (3, 4, 6, 3)}
BLOCKS |= {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}  # layers of a ResNet -> blocks of each stage
VISION: dict[str, Callable[[int, int, int], nn.Module]] = {
    **{name: partial(_cnn, plan) for name, plan in CNN_PLANS.items()},
    **{f"resnet{n}": partial(_resnet, BLOCKS[n], stem=SMALL) for n in (10, 18)},
    "resnet18-stride-1-4": partial(_resnet, BLOCKS[18], stem=(7, 1, 3, 4)),
    "resnet10-5x5-stem": partial(_resnet, BLOCKS[10], stem=(5, 2, 1, 2)),
    **{f"resnet{n}-imagenet-stem": partial(_resnet, blocks, bottleneck=n >= 50) for n, blocks in BLOCKS.items()},
    "googlenet": _googlenet,
    "mobilenet-v2": _mobilenet_v2,
}  # (channels, pixels a side from 8, D) -> body


# -- tables, signals and texts
class Embedded(nn.Module):
    """Tokens x [B, length] -> [B, E, length]; 0 is padding, with a zero vector; large ones take their remainder's."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        with torch.no_grad():
            self.vectors.weight.mul_(0.1)  # torch's N(0, 1) drowns what a few thousand words can teach

    def forward(self, x: Tensor) -> Tensor:
        return torch.transpose(self.vectors(torch.where(x > 0, 1 + (x - 1) % (VOCABULARY - 1), 0)), 1, 2)


class MeanOfSteps(nn.Module):
    """x [B, E, steps] -> [B, E]: the mean over the steps that are not all zero, as padding is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(2) / (x != 0).any(dim=1).sum(1, keepdim=True).clamp(min=1)


class LargestOfSteps(nn.Module):
    """x [B, E, steps] -> [B, E]; unlike max-pooling, its backward pass repeats exactly on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax(dim=2)


class Gru(nn.Module):
    """x [B, channels, steps] -> [B, E, steps]: the states of a GRU that reads the steps."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gru = nn.GRU(channels, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.transpose(self.gru(x.transpose(1, 2))[0], 1, 2)


class SmallTransformer(nn.Module):
    """x [B, channels, steps] -> [B, E]: one encoder layer of four attention heads without dropout, mean over steps."""

    def __init__(self, channels: int, steps: int) -> None:
        super().__init__()
        self.project = nn.Linear(channels, WIDTH)
        self.positions = nn.Parameter(torch.randn(steps, WIDTH) * 0.02)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.mean(self.layer(self.project(x.transpose(1, 2)) + self.positions), dim=1)


def _cnn_of_steps(channels: int) -> nn.Module:
    first, second = nn.Conv1d(channels, WIDTH, 5, padding=2), nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), LargestOfSteps())


TABLE: dict[str, Callable[[int, int], list[nn.Module]]] = {
    "mlp-1": lambda inputs, dim: fully_connected(inputs, 64, dim),
    "mlp-2": lambda inputs, dim: fully_connected(inputs, 128, 64, dim),
    "mlp-3": lambda inputs, dim: fully_connected(inputs, 256, 128, 64, dim),
    PROJECTION: lambda inputs, dim: [nn.Linear(inputs, dim), nn.ReLU(), nn.BatchNorm1d(dim)],
}  # (numbers of a sample, D) -> layers behind `nn.Flatten`; the projection is FedPCL's (Appendix A)

SIGNAL: dict[str, Callable[[int, int, int], list[nn.Module]]] = {
    "signal-cnn": lambda channels, _, dim: [_cnn_of_steps(channels), *fully_connected(2 * WIDTH, dim)],
    "signal-gru": lambda channels, _, dim: [Gru(channels), LargestOfSteps(), *fully_connected(WIDTH, dim)],
    "signal-transformer": lambda channels, steps, d: [SmallTransformer(channels, steps), *fully_connected(WIDTH, d)],
}  # (channels, steps, D) -> layers

TEXT: dict[str, Callable[[int], list[nn.Module]]] = {
    "text-bag": lambda dim: [MeanOfSteps(), *fully_connected(WIDTH, WIDTH, dim)],
    "text-cnn": lambda dim: [_cnn_of_steps(WIDTH), *fully_connected(2 * WIDTH, dim)],
    "text-gru": lambda dim: [Gru(WIDTH), LargestOfSteps(), *fully_connected(WIDTH, dim)],
}  # D -> layers behind `Embedded`

"""Bodies x -> z [B, D]: for square images, for tables and features [F], for signals, for texts.

A signal is [channels, steps]. A text becomes a signal by an embedding of its tokens. ResNets,
GoogLeNet and MobileNet_v2 are torchvision's.

Small CNNs: 5×5 convolutions with 2×2 max-pooling, then fully connected layers; the last of a body
has D outputs. The convolutions are unpadded, as published, where the image is large enough, else
(two of them below 16×16) padded by 2. ``mnist-cnn`` is McMahan et al.'s (2017) scaled down, as in
FedProto's code, which fixes D = 50; ``htcnn-1`` … HtCNN8 of FedTGP, as in HtFLlib, with D = 512,
and ``cnn4`` the "4-layer CNN" of its HtFE groups.

ResNets (He et al., 2016), with the stems that `config/architectures.py` describes. Those of 4, 6
and 8 layers end in 64, 128 and 256 features; the others in 512, or in 2048 with bottlenecks (50
layers and more). FedTGP has the ImageNet stem for 32×32 images too; that of stride 1 is as in
FedProto's code, the 5×5 one (padding 1) as in FedPLVM's.

BatchNorm cannot train on a batch of one sample where the last map is a single pixel: images of 8×8,
and with the ImageNet stem, of up to 32×32. GoogLeNet and MobileNet_v2 keep their dropout inside the
body: features are noisy in training, but not those that prototypes are made of.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from protofl_common.backbones.load import classifier_name, remove_head
from protofl_common.config.architectures import PROJECTION, VOCABULARY

KERNEL = 5  # pixels a side of the small CNNs' convolutions
SMALLEST_UNPADDED = 16  # pixels a side of images that two of these and their pools leave a pixel of
STAGES = 4  # of torchvision's ResNet
SMALLEST_FOR_THIRD_POOL = 15  # of a smaller image GoogLeNet's third max-pooling gets a single pixel
# Networks that in training would return the scores of auxiliary heads as well.
HEADS_BESIDE = ("googlenet", "inception_v3")
WIDTH = 64  # of the networks for signals and texts


def fully_connected(*widths: int) -> list[nn.Module]:
    """Return linear layers with a ReLU behind each, from the first of the widths to the last."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers


# -- images
class ChannelsLast(nn.Module):
    """The same images in the memory order [B, H, W, channels], which convolutions pass on.

    Weights keep torch's order. On a CPU max-pooling is over ten times as fast so; 1×1 and depthwise
    convolutions train 1.3 to 1.8 times as fast.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)


def reach_width(width: int, feature_dim: int) -> nn.Module:
    """Return the layer from a published network's features to ``feature_dim`` D: [B, width] to D.

    As in FedTGP, neighbouring features are averaged until D are left. Where D is above ``width``, a
    linear projection makes them, and they can be negative; FedTGP's code repeats features there.
    """
    if feature_dim <= width:
        return nn.AdaptiveAvgPool1d(feature_dim)
    return nn.Linear(width, feature_dim)


class CnnPlan(NamedTuple):
    """``channels`` of the convolutions, widths of the ``hidden`` layers before the one of D."""

    channels: tuple[int, ...]
    hidden: tuple[int, ...] = ()
    dropout: float = 0.0  # FedProto's: of maps after the last convolution, and of features


CNN_PLANS: dict[str, CnnPlan] = {
    "mnist-cnn": CnnPlan((10, 20), dropout=0.5),
    "mnist-cnn-18": CnnPlan((10, 18), dropout=0.5),
    "mnist-cnn-20": CnnPlan((10, 20), dropout=0.5),
    "mnist-cnn-22": CnnPlan((10, 22), dropout=0.5),
    "cnn4": CnnPlan((32, 64)),
    "htcnn-1": CnnPlan((32,)),
    "htcnn-2": CnnPlan((32, 64)),
    "htcnn-3": CnnPlan((32,), hidden=(512,)),
    "htcnn-4": CnnPlan((32, 64), hidden=(512,)),
    "htcnn-5": CnnPlan((32,), hidden=(1024,)),
    "htcnn-6": CnnPlan((32, 64), hidden=(1024,)),
    "htcnn-7": CnnPlan((32,), hidden=(1024, 512)),
    "htcnn-8": CnnPlan((32, 64), hidden=(1024, 512)),
}


def _cnn(plan: CnnPlan, in_channels: int, image_size: int, feature_dim: int) -> nn.Module:
    """Build a small CNN for square images of ``image_size`` pixels a side.

    ReLU follows the pool, not the convolution: values and gradients are the same, and ReLU has a
    quarter of the elements to work on.
    """
    # as published, unpadded, where that leaves a pixel; else so that the maps keep their size
    is_padded = len(plan.channels) > 1 and image_size < SMALLEST_UNPADDED
    padding = KERNEL // 2 if is_padded else 0
    layers: list[nn.Module] = [ChannelsLast()]
    side = image_size
    for before, after in pairwise((in_channels, *plan.channels)):
        convolution = nn.Conv2d(before, after, KERNEL, padding=padding)
        layers += [convolution, nn.MaxPool2d(2), nn.ReLU()]
        side = (side + 2 * padding - KERNEL + 1) // 2
    if plan.dropout:
        layers.insert(-2, nn.Dropout2d(plan.dropout))  # between the last convolution and its pool
    flat_width = plan.channels[-1] * side * side
    fully = fully_connected(flat_width, *plan.hidden, feature_dim)
    return nn.Sequential(*layers, nn.Flatten(), *fully)


class Stem(NamedTuple):
    """The first convolution of a ResNet, and the pooling behind it."""

    kernel: int
    stride: int
    padding: int
    pool_stride: int  # 0: no pooling


SMALL_STEM = Stem(kernel=3, stride=1, padding=1, pool_stride=0)
IMAGENET_STEM = Stem(kernel=7, stride=2, padding=3, pool_stride=2)
STRIDE_1 = Stem(kernel=7, stride=1, padding=3, pool_stride=4)
FIVE_BY_FIVE = Stem(kernel=5, stride=2, padding=1, pool_stride=2)


def _resnet(
    blocks: tuple[int, ...],
    in_channels: int,
    image_size: int,
    feature_dim: int,
    stem: Stem = IMAGENET_STEM,
    bottleneck: bool = False,
) -> nn.Module:
    """Build a ResNet with as many ``blocks`` in each of its one to four stages.

    A block has two convolutions, or three with ``bottleneck``. ``image_size`` is not used: all
    builders of networks for images take it.
    """
    # over a second to import: only where it is needed
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    # torchvision's has four stages: those beyond ours get one block, and are then taken out
    stages = len(blocks)
    too_many = STAGES - stages
    trunk = ResNet(Bottleneck if bottleneck else BasicBlock, [*blocks, *[1] * too_many])
    for stage in range(stages, STAGES):
        setattr(trunk, f"layer{stage + 1}", nn.Identity())
    trunk.conv1 = nn.Conv2d(in_channels, 64, stem.kernel, stem.stride, stem.padding, bias=False)
    # as torchvision draws those of the other convolutions
    nn.init.kaiming_normal_(trunk.conv1.weight, mode="fan_out", nonlinearity="relu")
    trunk.maxpool = nn.Identity()
    if stem.pool_stride:
        trunk.maxpool = nn.MaxPool2d(3, stem.pool_stride, padding=1)
    trunk.fc = nn.Identity()

    width_of_first = 256 if bottleneck else 64
    width = width_of_first * 2 ** (stages - 1)  # each stage has twice the channels of the last
    layers = [trunk, reach_width(width, feature_dim)]
    if bottleneck:  # only these blocks have 1×1 convolutions, which gain by it
        layers.insert(0, ChannelsLast())
    return nn.Sequential(*layers)


def _of_torchvision(
    arch: str, width: int, in_channels: int, image_size: int, feature_dim: int
) -> nn.Module:
    """Build a network of torchvision whose trunk gives ``width`` features."""
    trunk = torchvision_trunk(arch, in_channels)
    if arch == "googlenet" and image_size < SMALLEST_FOR_THIRD_POOL:
        trunk.maxpool3 = nn.Identity()
    return nn.Sequential(ChannelsLast(), trunk, reach_width(width, feature_dim))


def torchvision_trunk(arch: str, channels: int) -> nn.Module:
    """Build an untrained network of torchvision without its head, for images of so many channels.

    torchvision draws the kernels of the first convolution for three colours. Channel c gets that of
    colour c modulo 3. ValueError for what is no classifier of torchvision.
    """
    # over a second to import: only where it is needed
    from torchvision import models

    without_auxiliary = {}
    if arch in HEADS_BESIDE:
        # torchvision warns where nobody says how such a network is to be initialised
        without_auxiliary = {"aux_logits": False, "init_weights": True}
    network: nn.Module = models.get_model(classifier_name(arch), weights=None, **without_auxiliary)
    remove_head(network, arch)
    first = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    colours = torch.arange(channels) % first.in_channels
    first.weight = nn.Parameter(first.weight.detach()[:, colours])
    first.in_channels = channels
    return network


BLOCKS: dict[int, tuple[int, ...]] = {
    4: (1,),
    6: (1, 1),
    8: (1, 1, 1),
    10: (1, 1, 1, 1),
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}  # layers of a ResNet -> blocks of each stage

VISION: dict[str, Callable[[int, int, int], nn.Module]] = {
    **{name: partial(_cnn, plan) for name, plan in CNN_PLANS.items()},
    "resnet10": partial(_resnet, BLOCKS[10], stem=SMALL_STEM),
    "resnet18": partial(_resnet, BLOCKS[18], stem=SMALL_STEM),
    "resnet18-stride-1-4": partial(_resnet, BLOCKS[18], stem=STRIDE_1),
    "resnet10-5x5-stem": partial(_resnet, BLOCKS[10], stem=FIVE_BY_FIVE),
    **{
        f"resnet{layers}-imagenet-stem": partial(_resnet, blocks, bottleneck=layers >= 50)
        for layers, blocks in BLOCKS.items()
    },
    "googlenet": partial(_of_torchvision, "googlenet", 1024),
    "mobilenet-v2": partial(_of_torchvision, "mobilenet_v2", 1280),
}  # (channels, pixels a side from 8, D) -> body


# -- tables, signals and texts
class Embedded(nn.Module):
    """Tokens x [B, length] -> [B, E, length].

    0 is padding, with a zero vector; tokens beyond the vocabulary take their remainder's vector.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        with torch.no_grad():
            # torch's N(0, 1) drowns what a few thousand words can teach
            self.vectors.weight.mul_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.where(x > 0, 1 + (x - 1) % (VOCABULARY - 1), 0)
        return torch.transpose(self.vectors(tokens), 1, 2)


class MeanOfSteps(nn.Module):
    """x [B, E, steps] -> [B, E]: the mean over the steps that are not all zero, as padding is."""

    def forward(self, x: Tensor) -> Tensor:
        counts_B1 = (x != 0).any(dim=1).sum(1, keepdim=True)
        return x.sum(2) / counts_B1.clamp(min=1)


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
    """x [B, channels, steps] -> [B, E]: one encoder layer, and the mean over its steps.

    It has four attention heads and no dropout. E is `WIDTH`.
    """

    def __init__(self, channels: int, steps: int) -> None:
        super().__init__()
        self.project = nn.Linear(channels, WIDTH)
        self.positions = nn.Parameter(torch.randn(steps, WIDTH) * 0.02)
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        steps = self.project(x.transpose(1, 2)) + self.positions
        return torch.mean(self.layer(steps), dim=1)


def _cnn_of_steps(channels: int) -> nn.Module:
    """Build a CNN over the steps of signals: x [B, channels, steps] -> [B, 2 · `WIDTH`]."""
    return nn.Sequential(
        nn.Conv1d(channels, WIDTH, 5, padding=2),
        nn.ReLU(),
        nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1),
        nn.ReLU(),
        LargestOfSteps(),
    )


TABLE: dict[str, Callable[[int, int], list[nn.Module]]] = {
    "mlp-1": lambda inputs, dim: fully_connected(inputs, 64, dim),
    "mlp-2": lambda inputs, dim: fully_connected(inputs, 128, 64, dim),
    "mlp-3": lambda inputs, dim: fully_connected(inputs, 256, 128, 64, dim),
    # FedPCL's, of frozen features (Appendix A)
    PROJECTION: lambda inputs, dim: [nn.Linear(inputs, dim), nn.ReLU(), nn.BatchNorm1d(dim)],
}  # (numbers of a sample, D) -> layers behind `nn.Flatten`


SIGNAL: dict[str, Callable[[int, int, int], list[nn.Module]]] = {
    "signal-cnn": lambda channels, _, dim: [
        _cnn_of_steps(channels),
        *fully_connected(2 * WIDTH, dim),
    ],
    "signal-gru": lambda channels, _, dim: [
        Gru(channels),
        LargestOfSteps(),
        *fully_connected(WIDTH, dim),
    ],
    "signal-transformer": lambda channels, steps, dim: [
        SmallTransformer(channels, steps),
        *fully_connected(WIDTH, dim),
    ],
}  # (channels, steps, D) -> layers

TEXT: dict[str, Callable[[int], list[nn.Module]]] = {
    "text-bag": lambda dim: [MeanOfSteps(), *fully_connected(WIDTH, WIDTH, dim)],
    "text-cnn": lambda dim: SIGNAL["signal-cnn"](WIDTH, 0, dim),
    "text-gru": lambda dim: SIGNAL["signal-gru"](WIDTH, 0, dim),
}  # D -> layers behind `Embedded`

"""Networks against torchvision's models and what their authors publish.

And those of torchvision and timm by name.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models as torchvision

from protofl_common.config.python_names import is_python_name
from protofl_common.experiment.settings import Settings, SettingsError, default_run_config
from protofl_common.models.build import build_model

pytestmark = pytest.mark.slow  # most of these tests build networks of millions of weights

PUBLISHED = {
    "resnet18-imagenet-stem": (512, 11_689_512),
    "resnet18-stride-1-4": (512, 11_689_512),  # strides change no parameters
    "resnet34-imagenet-stem": (512, 21_797_672),
    "resnet50-imagenet-stem": (2048, 25_557_032),
    "resnet101-imagenet-stem": (2048, 44_549_160),
    "resnet152-imagenet-stem": (2048, 60_192_808),
    "googlenet": (1024, 6_624_904),
    "mobilenet-v2": (1280, 3_504_872),
}
"""Width, and parameters with 1000 classes as torchvision states them.

GoogLeNet's are those without auxiliary heads.
"""


def build(arch, dim, channels=3, classes=10, size=32):
    shape = (channels, size, size)
    return build_model(arch, input_shape=shape, num_classes=classes, feature_dim=dim, seed=0)


def count(arch, dim, channels=3, classes=1000, size=32):
    """Return how many parameters a network has."""
    with torch.device("meta"):  # shapes only
        model = build(arch, dim, channels, classes, size)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("arch", PUBLISHED)
def test_parameters_are_torchvisions(arch):
    """Features are narrowed by averaging neighbours, which takes no parameters."""
    width, parameters = PUBLISHED[arch]
    assert count(arch, width) == parameters

    dim = width // 4
    without_head = parameters - 1000 * (width + 1)  # weights and a bias for each class

    assert count(arch, dim, classes=10) == without_head + 10 * (dim + 1)


FIRST = {
    "resnet10": 64 * 9,
    "resnet18": 64 * 9,
    "resnet10-5x5-stem": 64 * 25,
    "resnet10-imagenet-stem": 64 * 49,
    "resnet18-imagenet-stem": 64 * 49,
    "googlenet": 64 * 49,
    "mobilenet-v2": 32 * 9,
}
"""Weights of the first convolution for each channel of the images."""


@pytest.mark.parametrize("arch", FIRST)
def test_fewer_channels_only_shorten_the_first_convolution(arch):
    of_two_channels = count(arch, 64, channels=3) - count(arch, 64, channels=1)
    assert of_two_channels == 2 * FIRST[arch]


def test_resnets_of_up_to_ten_layers():
    """Their parameters are counted layer by layer, with 10 classes and the last width as D."""

    def convolution(side, inputs, outputs):
        """Count a convolution without bias, with a BatchNorm of two numbers a channel."""
        return side * side * inputs * outputs + 2 * outputs

    body = convolution(7, 3, 64)
    before = 64
    for layers, width in ((4, 64), (6, 128), (8, 256), (10, 512)):
        body += convolution(3, before, width) + convolution(3, width, width)
        if before != width:
            body += convolution(1, before, width)  # the shortcut
        before = width
        head = 10 * width + 10
        assert count(f"resnet{layers}-imagenet-stem", width, classes=10) == body + head


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "own", "width"), [
    ("resnet18-imagenet-stem", torchvision.resnet18, 512),
    ("resnet50-imagenet-stem", torchvision.resnet50, 2048),
    ("mobilenet-v2", torchvision.mobilenet_v2, 1280),
    ("googlenet", torchvision.googlenet, 1024),
])  # fmt: skip
def test_bodies_compute_what_torchvisions_do(arch, own, width):
    """With our trunk's weights their model gives our features, once neighbours are averaged."""
    options = {"aux_logits": False, "init_weights": False} if arch == "googlenet" else {}
    theirs = own(**options)
    setattr(theirs, "classifier" if arch == "mobilenet-v2" else "fc", nn.Identity())
    model = build(arch, width // 4).eval()
    theirs.load_state_dict(model.body[-2].state_dict())

    x = torch.rand(2, 3, 32, 32)
    z = theirs.eval()(x)

    assert z.shape == (2, width)
    torch.testing.assert_close(model.body(x), z.view(2, width // 4, 4).mean(2))


@pytest.mark.parametrize(
    ("arch", "width"), [("resnet4-imagenet-stem", 64), ("mobilenet-v2", 1280), ("googlenet", 1024)]
)
def test_more_features_than_the_trunk_has_are_projected(arch, width):
    """A linear layer makes the wider features of the trunk's."""
    wider = width + 36
    body = build(arch, wider).eval().body
    x = torch.rand(2, 3, 32, 32)

    *_, projection = body
    features_of_trunk = body[:-1](x)  # all before the projection
    z = body(x)

    assert features_of_trunk.shape == (2, width)
    assert z.shape == (2, wider)
    torch.testing.assert_close(z, features_of_trunk @ projection.weight.T + projection.bias)


SIDES = {  # of the map after the first convolution, and after the pool, on 32×32 images
    "resnet10": (32, 32),
    "resnet10-imagenet-stem": (16, 8),
    "resnet18-imagenet-stem": (16, 8),
    "resnet18-stride-1-4": (32, 8),
    "resnet10-5x5-stem": (15, 8),
}


@pytest.mark.parametrize("arch", SIDES)
def test_strides_of_the_stems(arch):
    """Hooks note the side of the map behind each of the two layers."""
    body = build(arch, 8).eval().body
    sides = []

    def note(_module, _inputs, maps):
        sides.append(maps.shape[-1])

    *_, trunk, _narrowing = body
    trunk.conv1.register_forward_hook(note)
    trunk.maxpool.register_forward_hook(note)
    body(torch.rand(1, 3, 32, 32))

    assert tuple(sides) == SIDES[arch]


@pytest.mark.parametrize(
    ("arch", "part", "input_shape"),
    [
        ("googlenet", "body", (2, 3, 32, 32)),
        ("mobilenet-v2", "body", (2, 3, 32, 32)),
        ("mnist-cnn", "body", (2, 3, 32, 32)),
        ("mnist-cnn", "head", (2, 8)),
    ],
)
def test_dropout_is_for_training_only(arch, part, input_shape):
    module = getattr(build(arch, 8), part)
    inputs = torch.rand(input_shape)

    assert not torch.equal(module.train()(inputs), module(inputs))
    assert torch.equal(module.eval()(inputs), module(inputs))


def test_googlenet_keeps_its_third_pool_wherever_there_is_something_to_pool():
    """Maps of images of 14×14 pixels are a single pixel there, those of 15×15 are not."""
    for size, pooled in ((14, nn.Identity), (15, nn.MaxPool2d)):
        assert isinstance(build("googlenet", 8, size=size).body[-2].maxpool3, pooled)


def linear(*widths):
    """Return the weights and biases of linear layers from the first width to the last."""
    return sum(before * after + after for before, after in pairwise(widths))


ONE = 32 * 25 + 32  # weights and biases of a 5×5 convolution of grey images
TWO = ONE + 64 * 32 * 25 + 64
FLAT1 = 32 * 12 * 12  # numbers of the last maps of 28×28 pixels
FLAT2 = 64 * 4 * 4
PARAMETERS = {
    "htcnn-1": ONE + linear(FLAT1, 512, 10),
    "htcnn-2": TWO + linear(FLAT2, 512, 10),
    "htcnn-3": ONE + linear(FLAT1, 512, 512, 10),
    "htcnn-4": TWO + linear(FLAT2, 512, 512, 10),
    "htcnn-5": ONE + linear(FLAT1, 1024, 512, 10),
    "htcnn-6": TWO + linear(FLAT2, 1024, 512, 10),
    "htcnn-7": ONE + linear(FLAT1, 1024, 512, 512, 10),
    "htcnn-8": TWO + linear(FLAT2, 1024, 512, 512, 10),
    "cnn4": TWO + linear(FLAT2, 512, 10),
}


@pytest.mark.parametrize("arch", PARAMETERS)
def test_parameter_counts_of_fedtgp(arch):
    assert count(arch, 512, 1, 10, 28) == PARAMETERS[arch]


@pytest.mark.parametrize(
    ("arch", "channels"), [("mnist-cnn", 20), ("mnist-cnn-18", 18), ("mnist-cnn-22", 22)]
)
def test_parameter_counts_of_fedproto(arch, channels):
    conv1 = 10 * 25 + 10
    conv2 = 10 * channels * 25 + channels

    assert count(arch, 50, 1, 10, 28) == conv1 + conv2 + linear(channels * 16, 50, 10)
    assert count("mnist-cnn", 50, 1, 10, 28) == 21_840


def test_mnist_cnn_is_the_published_function():
    """The same layers are applied as in FedProto's code: convolution, pool, ReLU, twice."""
    body = build("mnist-cnn", 50, 1, size=28).eval().body
    conv1, conv2 = [module for module in body.modules() if isinstance(module, nn.Conv2d)]
    (fc1,) = [module for module in body.modules() if isinstance(module, nn.Linear)]
    x = torch.rand(4, 1, 28, 28)

    z = F.relu(F.max_pool2d(conv1(x), 2))
    z = F.relu(F.max_pool2d(conv2(z), 2))
    z = F.relu(fc1(z.view(4, 320)))

    torch.testing.assert_close(body(x), z)


SHAPE = {"num_classes": 7, "feature_dim": 16, "seed": 1}


@pytest.mark.parametrize("arch", ["resnet18", "googlenet", "mobilenet_v3_small"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_of_torchvision_trains_with_these_channels_and_classes(arch, channels):
    """All weights get gradients, and the same seed gives the same ones."""
    model = build_model(f"torchvision:{arch}", input_shape=(channels, 32, 32), **SHAPE)
    logits = model.train()(torch.rand(4, channels, 32, 32))

    assert logits.shape == (4, 7)

    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

    again = build_model(f"torchvision:{arch}", input_shape=(channels, 32, 32), **SHAPE)
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_network_named_after_torchvisions_is_that_network():
    named = build_model("torchvision:resnet18", input_shape=(3, 32, 32), **SHAPE).eval()
    ours = build_model("resnet18-imagenet-stem", input_shape=(3, 32, 32), **SHAPE).eval()
    ours.load_state_dict(named.state_dict())
    images = torch.rand(2, 3, 32, 32)

    torch.testing.assert_close(named(images), ours(images))


@pytest.mark.parametrize(("arch", "shape", "said"), [
    ("torchvision:resnet19", (3, 32, 32), "resnet19' is not one of alexnet"),
    ("torchvision:fasterrcnn_resnet50_fpn", (3, 32, 32), "is not one of alexnet"),
    ("torchvision:get_model", (3, 32, 32), "is not one of alexnet"),
    (
        "torchvision:vgg11",
        (3, 16, 16),
        r"arch = 'torchvision:vgg11': .* \(images \[3, 16, 16\]; image-size",
    ),
    ("torchvision:resnet18", (5,), "is for square images"),
    ("timm:resnet18", (3, 32, 32), r"timm is not installed; pip install 'protofl\[timm\]'"),
])  # fmt: skip
def test_what_does_not_fit_is_named(arch, shape, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=said):
        build_model(arch, input_shape=shape, **SHAPE)


def test_timm_is_asked_for_an_untrained_network(monkeypatch):
    """A stand-in for timm checks how it is called."""

    def create_model(name, *, pretrained, in_chans, num_classes):
        assert name == "tiny.of_somebody"
        assert not pretrained
        assert num_classes == 0
        return nn.Sequential(nn.Flatten(), nn.Linear(in_chans * 64, 24))

    timm = SimpleNamespace(create_model=create_model, is_model=bool)
    monkeypatch.setitem(sys.modules, "timm", timm)
    model = build_model("timm:tiny.of_somebody", input_shape=(2, 8, 8), **SHAPE)

    assert model(torch.rand(3, 2, 8, 8)).shape == (3, 7)


@pytest.mark.parametrize(
    "arch", ["timm:hf-hub:any/repo", "timm:a/b", "timm:", "torchvision:", "keras:resnet"]
)
def test_names_like_those_of_a_library_are_refused_or_a_module_of_ones_own(arch):
    """``keras:resnet`` could be a module of one's own; the other names are of no library here."""
    assert is_python_name(arch) == (arch == "keras:resnet")
    assert not is_python_name("torchvision:resnet18")
    assert is_python_name("torchvision.models:resnet18")  # a module, which a person must allow
    if not is_python_name(arch):
        with pytest.raises(SettingsError, match="choose one of"):
            Settings.from_run_config(default_run_config() | {"arch": arch})

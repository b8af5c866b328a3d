"""Networks against torchvision's models and what their authors publish; those of torchvision and timm by name."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models as torchvision

from protofl_common.config.python_names import is_python_name
from protofl_common.experiment.settings import Settings, SettingsError, default_run_config
from protofl_common.models.build import build_model
from protofl_common.models.split import SplitModel
from tests.support.given import Patch

PUBLISHED = {  # parameters with 1000 classes, as torchvision states them; GoogLeNet's with no auxiliary heads
    "resnet18-imagenet-stem": (512, 11_689_512),
    "resnet18-stride-1-4": (512, 11_689_512),  # strides change no parameters
    "resnet34-imagenet-stem": (512, 21_797_672),
    "resnet50-imagenet-stem": (2048, 25_557_032),
    "resnet101-imagenet-stem": (2048, 44_549_160),
    "resnet152-imagenet-stem": (2048, 60_192_808),
    "googlenet": (1024, 6_624_904),
    "mobilenet-v2": (1280, 3_504_872),
}


def build(arch: str, dim: int, channels: int = 3, classes: int = 10, size: int = 32) -> SplitModel:
    return build_model(
        arch, input_shape=(channels, size, size), num_classes=classes, feature_dim=dim, seed=0
    )


def count(arch: str, dim: int, channels: int = 3, classes: int = 1000, size: int = 32) -> int:
    with torch.device("meta"):  # shapes only
        return sum(p.numel() for p in build(arch, dim, channels, classes, size).parameters())


@pytest.mark.parametrize("arch", PUBLISHED)
def test_parameters_are_torchvisions(arch: str) -> None:
    width, parameters = PUBLISHED[arch]
    assert count(arch, width) == parameters
    assert count(arch, width // 4, classes=10) == parameters - 1000 * (width + 1) + 10 * (
        width // 4 + 1
    )


FIRST = {"resnet10": 64 * 9, "resnet18": 64 * 9, "resnet10-5x5-stem": 64 * 25, "googlenet": 64 * 49}
FIRST |= dict.fromkeys(("resnet10-imagenet-stem", "resnet18-imagenet-stem"), 64 * 49) | {
    "mobilenet-v2": 32 * 9
}


@pytest.mark.parametrize("arch", FIRST)
def test_fewer_channels_only_shorten_the_first_convolution(arch: str) -> None:
    assert count(arch, 64, channels=3) - count(arch, 64, channels=1) == 2 * FIRST[arch]


def test_resnets_of_up_to_ten_layers() -> None:
    """Layer by layer: convolutions without bias, each with a BatchNorm of two numbers a channel; D = width, C = 10."""

    def stage(before: int, width: int) -> int:
        shortcut = before * width + 2 * width if before != width else 0
        return 9 * before * width + 2 * width + 9 * width * width + 2 * width + shortcut

    total, before = 3 * 64 * 49 + 2 * 64, 64
    for layers, width in ((4, 64), (6, 128), (8, 256), (10, 512)):
        total, before = total + stage(before, width), width
        assert count(f"resnet{layers}-imagenet-stem", width, classes=10) == total + 10 * width + 10


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "own", "width"), [
    ("resnet18-imagenet-stem", torchvision.resnet18, 512),
    ("resnet50-imagenet-stem", torchvision.resnet50, 2048),
    ("mobilenet-v2", torchvision.mobilenet_v2, 1280),
    ("googlenet", torchvision.googlenet, 1024),
])  # fmt: skip
def test_bodies_compute_what_torchvisions_do(arch: str, own: object, width: int) -> None:
    """With our trunk's weights in their model; then neighbours are averaged."""
    more = {"aux_logits": False, "init_weights": False} if arch == "googlenet" else {}
    theirs = own(**more)  # type: ignore[operator]
    setattr(theirs, "classifier" if arch == "mobilenet-v2" else "fc", nn.Identity())
    model, x = build(arch, width // 4).eval(), torch.rand(2, 3, 32, 32)
    theirs.load_state_dict(model.body[-2].state_dict())  # type: ignore[index]
    z = theirs.eval()(x)
    assert z.shape == (2, width)
    torch.testing.assert_close(model.body(x), z.view(2, width // 4, 4).mean(2))


@pytest.mark.parametrize(
    ("arch", "wide"), [("resnet4-imagenet-stem", 64), ("mobilenet-v2", 1280), ("googlenet", 1024)]
)
def test_more_features_than_the_trunk_has_are_projected(arch: str, wide: int) -> None:
    body, x = build(arch, wide + 36).eval().body, torch.rand(2, 3, 32, 32)
    z, trunk = body(x), body[:-1](x)  # type: ignore[index]
    assert (z.shape, trunk.shape) == ((2, wide + 36), (2, wide))
    torch.testing.assert_close(z, trunk @ body[-1].weight.T + body[-1].bias)  # type: ignore[index, union-attr]


SIDES = {  # of the map after the first convolution, and after the pool, on 32×32 images
    "resnet10": (32, 32),
    "resnet10-imagenet-stem": (16, 8),
    "resnet18-imagenet-stem": (16, 8),
    "resnet18-stride-1-4": (32, 8),
    "resnet10-5x5-stem": (15, 8),
}


@pytest.mark.parametrize("arch", SIDES)
def test_strides_of_the_stems(arch: str) -> None:
    body, sides = build(arch, 8).eval().body, []

    def note(_module: nn.Module, _inputs: object, maps: Tensor) -> None:
        sides.append(maps.shape[-1])

    trunk = body[-2]  # type: ignore[index]
    trunk.conv1.register_forward_hook(note)
    trunk.maxpool.register_forward_hook(note)
    body(torch.rand(1, 3, 32, 32))
    assert tuple(sides) == SIDES[arch]


@pytest.mark.parametrize(
    ("arch", "parts"), [("googlenet", 1), ("mobilenet-v2", 1), ("mnist-cnn", 2)]
)
def test_dropout_is_for_training_only(arch: str, parts: int) -> None:
    """In the body; of mnist-cnn in the head, too."""
    model, x, z = build(arch, 8), torch.rand(2, 3, 32, 32), torch.rand(2, 8)
    for part, inputs in ((model.body, x), (model.head, z))[:parts]:
        assert not torch.equal(part.train()(inputs), part(inputs))
        assert torch.equal(part.eval()(inputs), part(inputs))


def test_googlenet_keeps_its_third_pool_wherever_there_is_something_to_pool() -> None:
    for size, pooled in ((14, nn.Identity), (15, nn.MaxPool2d)):
        assert isinstance(build("googlenet", 8, size=size).body[-2].maxpool3, pooled)  # type: ignore[index, union-attr]


# Weights and biases, layer by layer, for 28×28×1 images, D = 512, C = 10.
CONV1, CONV2, HEAD = 32 * 25 + 32, 64 * 32 * 25 + 64, 512 * 10 + 10
FLAT1, FLAT2 = 32 * 12 * 12, 64 * 4 * 4
PARAMETERS = {
    "htcnn-1": CONV1 + FLAT1 * 512 + 512 + HEAD,
    "htcnn-2": CONV1 + CONV2 + FLAT2 * 512 + 512 + HEAD,
    "htcnn-3": CONV1 + FLAT1 * 512 + 512 + 512 * 512 + 512 + HEAD,
    "htcnn-4": CONV1 + CONV2 + FLAT2 * 512 + 512 + 512 * 512 + 512 + HEAD,
    "htcnn-5": CONV1 + FLAT1 * 1024 + 1024 + 1024 * 512 + 512 + HEAD,
    "htcnn-6": CONV1 + CONV2 + FLAT2 * 1024 + 1024 + 1024 * 512 + 512 + HEAD,
    "htcnn-7": CONV1 + FLAT1 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 512 + 512 + HEAD,
    "htcnn-8": CONV1 + CONV2 + FLAT2 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 512 + 512 + HEAD,
    "cnn4": CONV1 + CONV2 + FLAT2 * 512 + 512 + HEAD,
}


@pytest.mark.parametrize("arch", PARAMETERS)
def test_parameter_counts_of_fedtgp(arch: str) -> None:
    assert count(arch, 512, 1, 10, 28) == PARAMETERS[arch]


@pytest.mark.parametrize(
    ("arch", "channels"), [("mnist-cnn", 20), ("mnist-cnn-18", 18), ("mnist-cnn-22", 22)]
)
def test_parameter_counts_of_fedproto(arch: str, channels: int) -> None:
    expected = (
        (10 * 25 + 10)
        + (10 * channels * 25 + channels)
        + (channels * 16 * 50 + 50)
        + (50 * 10 + 10)
    )
    assert count(arch, 50, 1, 10, 28) == expected
    assert count("mnist-cnn", 50, 1, 10, 28) == 21_840


def test_mnist_cnn_is_the_published_function() -> None:
    model = build("mnist-cnn", 50, 1, size=28).eval()
    conv1, conv2 = (m for m in model.body.modules() if isinstance(m, nn.Conv2d))
    (fc1,) = (m for m in model.body.modules() if isinstance(m, nn.Linear))
    x, f = torch.rand(4, 1, 28, 28), nn.functional
    z = f.relu(f.max_pool2d(conv2(f.relu(f.max_pool2d(conv1(x), 2))), 2)).view(4, 320)
    torch.testing.assert_close(model.body(x), f.relu(fc1(z)))


SHAPE: dict[str, Any] = {"num_classes": 7, "feature_dim": 16, "seed": 1}


@pytest.mark.parametrize("arch", ["resnet18", "googlenet", "mobilenet_v3_small"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_of_torchvision_trains_with_these_channels_and_classes(
    arch: str, channels: int
) -> None:
    model = build_model(f"torchvision:{arch}", input_shape=(channels, 32, 32), **SHAPE)
    logits = model.train()(torch.rand(4, channels, 32, 32))
    assert logits.shape == (4, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    again = build_model(f"torchvision:{arch}", input_shape=(channels, 32, 32), **SHAPE)
    assert all(
        torch.equal(one, two)
        for one, two in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_it_is_the_network_of_that_name() -> None:
    archs = ("torchvision:resnet18", "resnet18-imagenet-stem")
    named, ours = (build_model(arch, input_shape=(3, 32, 32), **SHAPE).eval() for arch in archs)
    ours.load_state_dict(named.state_dict())
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(named(images), ours(images))


@pytest.mark.parametrize(("arch", "shape", "said"), [
    ("torchvision:resnet19", (3, 32, 32), "resnet19' is not one of alexnet"),
    ("torchvision:fasterrcnn_resnet50_fpn", (3, 32, 32), "is not one of alexnet"),
    ("torchvision:get_model", (3, 32, 32), "is not one of alexnet"),
    ("torchvision:vgg11", (3, 16, 16), r"arch = 'torchvision:vgg11': .* \(images \[3, 16, 16\]; image-size"),
    ("torchvision:resnet18", (5,), "is for square images"),
    ("timm:resnet18", (3, 32, 32), r"timm is not installed; pip install 'protofl\[timm\]'"),
])  # fmt: skip
def test_what_does_not_fit_is_named(
    arch: str, shape: tuple[int, ...], said: str, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=said):
        build_model(arch, input_shape=shape, **SHAPE)


def test_timm_is_asked_for_an_untrained_network(monkeypatch: Patch) -> None:
    def create_model(name: str, *, pretrained: bool, in_chans: int, num_classes: int) -> nn.Module:
        assert (name, pretrained, num_classes) == ("tiny.of_somebody", False, 0)
        return nn.Sequential(nn.Flatten(), nn.Linear(in_chans * 64, 24))

    monkeypatch.setitem(
        sys.modules, "timm", SimpleNamespace(create_model=create_model, is_model=bool)
    )
    model = build_model("timm:tiny.of_somebody", input_shape=(2, 8, 8), **SHAPE)
    assert model(torch.rand(3, 2, 8, 8)).shape == (3, 7)


@pytest.mark.parametrize(
    "arch", ["timm:hf-hub:any/repo", "timm:a/b", "timm:", "torchvision:", "keras:resnet"]
)
def test_no_other_name_is_one_of_a_library(arch: str) -> None:
    assert is_python_name(arch) == (arch == "keras:resnet")
    assert not is_python_name("torchvision:resnet18")
    assert is_python_name("torchvision.models:resnet18")  # a module, which a person must allow
    if not is_python_name(arch):
        with pytest.raises(SettingsError, match="choose one of"):
            Settings.from_run_config(default_run_config() | {"arch": arch})

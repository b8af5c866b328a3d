"""Networks of torchvision and timm by name: body and head, channels and classes; no name imports anything else."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from protofl_common.config.python_names import is_python_name
from protofl_common.experiment.settings import Settings, SettingsError, default_run_config
from protofl_common.models.build import build_model

SHAPE: dict[str, Any] = {"num_classes": 7, "feature_dim": 16, "seed": 1}


@pytest.mark.parametrize("arch", ["resnet18", "googlenet", "mobilenet_v3_small"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_of_torchvision_trains_with_these_channels_and_classes(arch: str, channels: int) -> None:
    model = build_model(f"torchvision:{arch}", input_shape=(channels, 32, 32), **SHAPE)
    logits = model.train()(torch.rand(4, channels, 32, 32))
    assert logits.shape == (4, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    again = build_model(f"torchvision:{arch}", input_shape=(channels, 32, 32), **SHAPE).state_dict()
    assert all(
        torch.equal(value, again[name])
        for name, value in model.state_dict().items()
        if "running" not in name and "num_batches" not in name
    )


def test_it_is_the_network_of_that_name() -> None:
    """ResNet-18 by torchvision's name is the one that the catalog calls resnet18-imagenet-stem."""
    named, ours = (
        build_model(arch, input_shape=(3, 32, 32), **SHAPE).eval()
        for arch in ("torchvision:resnet18", "resnet18-imagenet-stem")
    )
    ours.load_state_dict(named.state_dict())
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(named(images), ours(images))


@pytest.mark.parametrize(
    ("arch", "shape", "said"),
    [
        ("torchvision:resnet19", (3, 32, 32), "resnet19' is not one of alexnet"),
        ("torchvision:fasterrcnn_resnet50_fpn", (3, 32, 32), "is not one of alexnet"),
        ("torchvision:get_model", (3, 32, 32), "is not one of alexnet"),
        ("torchvision:vgg11", (3, 16, 16), r"arch = 'torchvision:vgg11': .* \(images \[3, 16, 16\]; image-size"),
        ("torchvision:resnet18", (5,), "is for square images"),
        ("timm:resnet18", (3, 32, 32), r"timm is not installed; pip install 'protofl\[timm\]'"),
    ],
)
def test_what_there_is_not_or_does_not_fit_is_named(
    arch: str, shape: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=said):
        build_model(arch, input_shape=shape, **SHAPE)


def test_timm_is_asked_for_an_untrained_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model(name: str, *, pretrained: bool, in_chans: int, num_classes: int) -> nn.Module:
        assert (name, pretrained, num_classes) == ("tiny.of_somebody", False, 0)
        return nn.Sequential(nn.Flatten(), nn.Linear(in_chans * 64, 24))

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model, is_model=bool))
    model = build_model("timm:tiny.of_somebody", input_shape=(2, 8, 8), **SHAPE)
    assert model(torch.rand(3, 2, 8, 8)).shape == (3, 7)


@pytest.mark.parametrize("arch", ["timm:hf-hub:any/repo", "timm:a/b", "timm:", "torchvision:", "keras:resnet"])
def test_no_other_name_is_one_of_a_library(arch: str) -> None:
    assert is_python_name(arch) == (arch == "keras:resnet")
    assert not is_python_name("torchvision:resnet18")
    assert is_python_name("torchvision.models:resnet18")  # a module, which a person must allow
    if not is_python_name(arch):
        with pytest.raises(SettingsError, match="choose one of"):
            Settings.from_run_config(default_run_config() | {"arch": arch})

"""Backbones of packages, torchvision's and timm's, and files of weights; nothing is downloaded."""

import hashlib
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision import models

from protofl_common.backbones import load
from protofl_common.backbones.features import extract_features, feature_widths
from protofl_common.backbones.load import BackboneError, load_backbone

CPU = torch.device("cpu")
ARCH = "shufflenet_v2_x0_5"
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 3, 20, 20), dtype=np.uint8)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return models.get_model(ARCH, weights=None, num_classes=345).eval()


@pytest.fixture(params=["x.pth", "x.safetensors", "wrapped.pth"])
def file(request, tmp_path, network):
    """The network's weights in each format; a wrapped file has other things beside them."""
    path = tmp_path / request.param
    state = network.state_dict()
    if path.suffix == ".safetensors":
        save_file(state, path)
    elif path.stem == "wrapped":
        torch.save({"state_dict": state, "epoch": 3}, path)
    else:
        torch.save(state, path)
    return path


def test_local_file_of_any_number_of_classes(file, network):
    """The network's last layer, applied to the backbone's features, gives the network's logits."""
    name = f"file:{ARCH}@64:{file}"

    features = extract_features(IMAGES, [name, "glyphs"], CPU)

    assert feature_widths([name, "glyphs"]) == (1024, 128)
    assert load_backbone(name, CPU).size == 64

    pixels = torch.from_numpy(IMAGES).float()
    pixels = nn.functional.interpolate(pixels, (64, 64), mode="bilinear", antialias=True) / 255
    imagenet_mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    imagenet_std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    with torch.no_grad():
        logits = network((pixels - imagenet_mean) / imagenet_std)
        of_the_file = features[:, :1024]
        torch.testing.assert_close(network.fc(of_the_file), logits, rtol=1e-3, atol=1e-4)


class _Code:
    """An object whose pickle prints "code was run" when it is read."""

    def __reduce__(self):
        return print, ("code was run",)


@pytest.mark.parametrize(
    "kind", ["pickle", "torch", "text", "list", "missing", "safetensors", "other"]
)
def test_wrong_files_are_refused(kind, tmp_path, network, capsys):
    """They are refused by name, and no code in them runs.

    ``kind``: "pickle" and "torch" hold code, "list" no state dict, "other" the weights of another
    network than the name says; "text" and "safetensors" are no tensors at all.
    """
    name = "x.safetensors" if kind == "safetensors" else "x.pth"
    arch = "resnet18" if kind == "other" else ARCH
    file = tmp_path / name
    contents = {
        "torch": {"fc.weight": _Code()},
        "list": [torch.zeros(2)],
        "other": network.state_dict(),
    }
    if kind == "pickle":
        file.write_bytes(pickle.dumps(_Code()))
    elif kind in contents:
        torch.save(contents[kind], file)
    elif kind != "missing":
        file.write_text("no tensors here")

    with pytest.raises(BackboneError, match=name):
        extract_features(IMAGES, [f"file:{arch}:{file}"], CPU)
    assert "code was run" not in capsys.readouterr().out


def test_unknown_architectures_name_the_choices(tmp_path):
    for name in ("torchvision:resnet19", f"file:resnet19:{tmp_path}/x.pth"):
        with pytest.raises(BackboneError, match=r"'resnet19' is not one of alexnet, .*resnet18"):
            extract_features(IMAGES, [name], CPU)
    with pytest.raises(BackboneError, match="'squeezenet1_0' does not end in a linear layer"):
        extract_features(IMAGES, [f"file:squeezenet1_0:{tmp_path}/x.pth"], CPU)


def test_torchvision_weights_that_cannot_be_had(monkeypatch):
    """The error names the backbone and the reason."""

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(models, "get_model", offline)
    said = r"torchvision:resnet34: cannot be had \(OSError: no network\)"
    with pytest.raises(BackboneError, match=said):
        load_backbone("torchvision:resnet34", CPU)


def test_torchvision_preset_is_used(monkeypatch, network):
    """Size, mean and deviation of the images are those of ImageNet's weights."""
    real = models.get_model
    monkeypatch.setattr(models, "get_model", lambda arch, weights: real(arch, weights=None))
    backbone = load_backbone(f"torchvision:{ARCH}", CPU)

    assert (backbone.size, backbone.width, backbone.mean) == (224, 1024, (0.485, 0.456, 0.406))

    load_backbone.cache_clear()


def test_without_timm_its_backbones_are_refused_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    said = r"timm:anything: .*timm is not installed; pip install 'protofl\[timm\]'"
    with pytest.raises(BackboneError, match=said):
        load_backbone("timm:anything", CPU)


def test_timm_model_and_its_data_config(monkeypatch):
    """A stand-in for timm has a network, and says which images it takes."""
    config = {"input_size": (3, 48, 48), "mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}

    def create_model(name, pretrained, num_classes):
        if name == "nothing":
            raise RuntimeError("Unknown model (nothing)")
        assert (pretrained, num_classes) == (True, 0)
        return nn.Sequential(nn.Conv2d(3, 7, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    timm = SimpleNamespace(create_model=create_model)
    timm.data = SimpleNamespace(resolve_model_data_config=lambda model: config)
    monkeypatch.setitem(sys.modules, "timm", timm)
    backbone = load_backbone("timm:stand_in", CPU)

    assert (backbone.size, backbone.width, backbone.std) == (48, 7, (0.2, 0.2, 0.2))
    assert extract_features(IMAGES, ["timm:stand_in"], CPU).shape == (4, 7)
    with pytest.raises(BackboneError, match=r"timm:nothing: .*Unknown model \(nothing\)"):
        load_backbone("timm:nothing", CPU)

    load_backbone.cache_clear()


def test_a_size_that_a_network_cannot_take_is_named(monkeypatch):
    kernel = 30  # pixels a side, and so more than images of 16×16 have
    stand_in = nn.Sequential(nn.Conv2d(3, 4, kernel), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    stand_in.add_module("fc", nn.Linear(4, 2))
    monkeypatch.setattr(models, "get_model", lambda arch, weights: stand_in)

    with pytest.raises(BackboneError, match="torchvision:resnet50 takes no images of 16×16"):
        load_backbone("torchvision:resnet50@16", CPU)


NETWORK = """
import torch

class EfficientNet(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size, self.stem, self._fc = size, torch.nn.Conv2d(3, 5, 3), torch.nn.Linear(5, 1000)

    @classmethod
    def from_name(cls, name, image_size):
        assert name == "efficientnet-lite0"
        return cls(image_size)

    def forward(self, x):
        assert x.shape[2] == self.size
        return self._fc(self.stem(x).mean((2, 3)))
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Make a package of code and one of weights, laid out as the real ones; return the weights.

    Every feature of an image is the same sum of its pixels plus 0, 1, … 4 (the bias). The package
    of the weights must not be imported.
    """
    code, weights = (tmp_path / name for name in load.PACKAGES)
    (weights / "models").mkdir(parents=True)
    code.mkdir()
    (code / "__init__.py").write_text(NETWORK)
    (weights / "__init__.py").write_text("raise AssertionError")
    file = weights / load.PACKAGED[0]
    state = {
        "stem.weight": torch.ones(5, 3, 3, 3),
        "stem.bias": torch.arange(5.0),
        "_fc.weight": torch.zeros(1000, 5),
        "_fc.bias": torch.zeros(1000),
    }
    torch.save(state, file)
    _check_as_weights(file, monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, load.PACKAGES[0], raising=False)
    load_backbone.cache_clear()
    return file


def _check_as_weights(file, monkeypatch):
    """Make the file's checksum the one that is expected."""
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(load, "PACKAGED", (load.PACKAGED[0], checksum))


def test_a_packages_backbone(packages):
    """Images have the size and colours that ImageNet's weights know; the last layer is left out."""
    backbone = load_backbone("package:efficientnet-lite0", CPU)
    assert (backbone.size, backbone.width) == (224, 5)
    assert (backbone.mean, backbone.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

    features = extract_features(IMAGES, ["package:efficientnet-lite0@32"], CPU)
    biases = features - features[:, :1]  # without the sum of pixels that all have
    torch.testing.assert_close(biases, torch.arange(5.0).expand(4, 5))


def test_other_weights_of_a_package_are_not_read_nor_code_in_them_run(
    packages, monkeypatch, capsys
):
    """They are refused even with the right checksum."""
    torch.save({"stem.weight": _Code()}, packages)
    with pytest.raises(
        BackboneError, match=r"lite0-57934424.pth: SHA-256 \w+ is not \w+; install the package anew"
    ):
        load_backbone("package:efficientnet-lite0", CPU)

    _check_as_weights(packages, monkeypatch)
    with pytest.raises(BackboneError, match="UnpicklingError"):
        load_backbone("package:efficientnet-lite0", CPU)

    packages.unlink()
    with pytest.raises(BackboneError, match="install the package anew"):
        load_backbone("package:efficientnet-lite0", CPU)
    assert "code was run" not in capsys.readouterr().out


@pytest.mark.parametrize("absent", load.PACKAGES)
def test_a_missing_package_is_named_with_the_cure(absent, packages, monkeypatch):
    real = load.find_spec
    monkeypatch.setattr(load, "find_spec", lambda name: None if name == absent else real(name))
    with pytest.raises(
        BackboneError, match=rf"{absent}.* is not installed; pip install 'protofl\[backbones\]' on"
    ):
        load_backbone("package:efficientnet-lite0", CPU)

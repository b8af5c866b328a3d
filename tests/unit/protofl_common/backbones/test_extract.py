"""Features of the embedded backbones."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from protofl_common.backbones.features import extract_features, feature_widths
from protofl_common.backbones.load import SmallResNet, frozen_backbone, load_backbone
from protofl_common.config.backbones import BackboneName
from protofl_common.config.options import SettingsError
from tests.unit.protofl_common.backbones.conftest import NAMES

CPU = torch.device("cpu")


@pytest.fixture
def images(digit_domains):
    """Every 125th of the 2,500 images: four of each of the five domains."""
    return digit_domains.inputs[::125]


@pytest.mark.slow
def test_features_lie_side_by_side(images):
    """In the order of the backbones' names, and free to take part in autograd."""
    fused = extract_features(images, NAMES, CPU)

    assert feature_widths(NAMES) == (128, 128, 128)
    assert fused.shape == (20, 384)
    assert fused.dtype == torch.float32
    assert fused.device.type == "cpu"
    assert not fused.requires_grad

    single = [extract_features(images, [name], CPU) for name in NAMES]
    assert torch.equal(fused, torch.cat(single, dim=1))
    assert not torch.allclose(single[0], single[1])

    weight = torch.ones(1, requires_grad=True)
    (fused.sum() + weight).backward()  # which fails for a tensor of inference mode


def test_features_repeat_and_leave_the_generator_alone(images):
    state = torch.get_rng_state()
    assert torch.equal(extract_features(images, NAMES, CPU), extract_features(images, NAMES, CPU))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_batch_size_does_not_matter(images, batch_size):
    found = extract_features(images, NAMES, CPU, batch_size)
    wanted = extract_features(images, NAMES, CPU)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_grey_images_count_as_three_equal_channels(images):
    grey = images[:, :1]
    expected = extract_features(np.repeat(grey, 3, axis=1), NAMES, CPU)
    torch.testing.assert_close(extract_features(grey, NAMES, CPU), expected, rtol=1e-4, atol=1e-5)


def test_features_equal_those_of_plain_code(images):
    """Images are scaled to 64 pixels and standardised, then the network sees them."""
    backbone = load_backbone("scenes", CPU)
    pixels = torch.from_numpy(images).float()
    pixels = F.interpolate(pixels, (64, 64), mode="bilinear", antialias=True) / 255
    mean = torch.tensor(backbone.mean).view(3, 1, 1)
    std = torch.tensor(backbone.std).view(3, 1, 1)
    with torch.no_grad():
        wanted = backbone.network.eval()((pixels - mean) / std)

    found = extract_features(images, ["scenes"], CPU)

    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", [8, 64, 100])
def test_images_of_any_size(side):
    images = np.random.default_rng(0).integers(0, 256, (3, 1, side, side), dtype=np.uint8)
    assert torch.isfinite(extract_features(images, ["glyphs"], CPU)).all()


def test_no_images_no_features():
    assert extract_features(np.zeros((0, 3, 8, 8), dtype=np.uint8), NAMES, CPU).shape == (0, 384)


def test_networks_stay_frozen(images):
    """A loaded backbone is kept; its weights do not change when it runs."""
    backbone = load_backbone("glyphs", CPU)
    before = {name: value.clone() for name, value in backbone.network.state_dict().items()}

    extract_features(images, ["glyphs"], CPU)

    assert load_backbone("glyphs", CPU) is backbone
    assert not backbone.network.training
    assert not any(parameter.requires_grad for parameter in backbone.network.parameters())
    for name, value in backbone.network.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((2, 3, 8, 8)),
        np.zeros((2, 2, 8, 8), dtype=np.uint8),
        np.zeros((2, 8, 8), dtype=np.uint8),
    ],
)
def test_other_arrays_are_refused(images):
    with pytest.raises(SettingsError, match=r"see images, uint8 \[1 or 3, H, W\]"):
        extract_features(images, NAMES, CPU)


@pytest.mark.slow
def test_features_beat_those_of_untrained_networks(digit_domains):
    """Images get the class of the nearest class mean (cosine), in each of five domains by itself.

    The means are of 10 images a class, and 10 others are classified.
    """
    of_domains = digit_domains.inputs.reshape(5, 500, 3, 28, 28)
    images = of_domains[:, :200].reshape(1000, 3, 28, 28)  # 20 of each of ten classes
    torch.manual_seed(0)
    name = BackboneName("embedded", "untrained")
    untrained = [frozen_backbone(name, SmallResNet(), 64, (0.5,) * 3, (0.25,) * 3) for _ in NAMES]
    with torch.inference_mode():
        pixels = F.interpolate(torch.from_numpy(images).float(), (64, 64), mode="bilinear")
        random = torch.cat([backbone.features(pixels) for backbone in untrained], dim=1)

    trained = extract_features(images, NAMES, CPU)
    assert _accuracy(trained) > _accuracy(random) + 0.3  # 30 points


def _accuracy(features):
    """Mean over five domains of 200 images each, whose labels count 0 to 9 again and again."""
    of_domains = features.view(5, 20, 10, -1)  # domain, number within the class, class, feature
    learnt, tested = of_domains.split(10, dim=1)
    means = F.normalize(learnt.mean(dim=1, keepdim=True), dim=-1)
    cosines = F.normalize(tested, dim=-1) @ means.transpose(-1, -2)
    return float((cosines.argmax(dim=-1) == torch.arange(10)).float().mean())

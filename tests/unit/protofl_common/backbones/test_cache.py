"""Features are computed once: disk, damage."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from protofl_common.backbones.features import cached_features, extract_features
from protofl_common.backbones.load import Backbone, SmallResNet
from protofl_common.data.raw import DataError
from tests.unit.protofl_common.backbones.conftest import write_weights

CPU = torch.device("cpu")
NAMES = ("glyphs", "scenes")


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (6, 3, 16, 16), dtype=np.uint8)


@pytest.fixture
def runs(monkeypatch):
    """Return a list that gets the size of the batch whenever a backbone runs."""
    batches = []
    real = Backbone.features

    def counted(self, pixels):
        batches.append(len(pixels))
        return real(self, pixels)

    monkeypatch.setattr(Backbone, "features", counted)
    return batches


def test_computed_once_per_machine(images, runs, tmp_path):
    """Both networks run once, and later calls read the file."""
    first = cached_features(images, NAMES, CPU, tmp_path, "site 1/train")
    assert runs == [6, 6]  # six images by each of the two networks
    assert torch.equal(first, extract_features(images, NAMES, CPU))

    runs.clear()
    from_disk = cached_features(images, NAMES, CPU, tmp_path, "site 1/train")
    assert torch.equal(from_disk, first)
    assert runs == []

    (file,) = tmp_path.glob("features/*.safetensors")
    assert file.name.startswith("site-1-train-")  # without what a file's name cannot have


def test_other_images_and_backbones_have_their_own_entry(images, runs, tmp_path):
    """One changed bit, another order and fewer backbones make an entry of their own."""
    changed = images.copy()
    changed[0, 0, 0, 0] ^= 1
    in_another_order = NAMES[::-1]
    fewer = NAMES[:1]

    requests = [(images, NAMES), (changed, NAMES), (images, in_another_order), (images, fewer)]
    for batch, names in requests:
        found = cached_features(batch, names, CPU, tmp_path, "x")
        assert torch.equal(found, extract_features(batch, names, CPU))
    assert len(list(tmp_path.glob("features/*.safetensors"))) == len(requests)


def test_other_weights_have_their_own_entry(images, runs, tmp_path):
    """Two files of weights differ in content, and so do the features."""
    names = [f"file:small:{tmp_path / name}.json" for name in ("a", "b")]
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        write_weights(tmp_path / f"{name}.json", SmallResNet().state_dict())
    first, second = (cached_features(images, [name], CPU, tmp_path, "x") for name in names)

    assert not torch.equal(first, second)


CUT_OFF = b"cut off"
"""In the place of a damaged file's content: the sound one without its last bytes."""
OTHERS = [torch.zeros(5, 256), torch.full((6, 256), float("nan")), torch.zeros(6, 256).double()]
"""Not the features of six images by two backbones: a wrong number, no numbers, another type."""


@pytest.mark.parametrize("damage", [b"", b"rubbish", CUT_OFF, *OTHERS])
def test_damaged_files_and_files_of_other_content_are_made_anew(images, runs, tmp_path, damage):
    """``damage`` is what stands in the place of the file's content."""
    first = cached_features(images, NAMES, CPU, tmp_path, "x")
    (file,) = tmp_path.glob("features/*.safetensors")
    sound = file.read_bytes()
    if isinstance(damage, torch.Tensor):
        save_file({"features": damage}, file)
    else:
        file.write_bytes(sound[:-5] if damage == CUT_OFF else damage)
    runs.clear()

    assert torch.equal(cached_features(images, NAMES, CPU, tmp_path, "x"), first)
    assert runs == [6, 6]
    assert file.read_bytes() == sound


def test_a_folder_that_cannot_be_written_is_named(images, runs, tmp_path):
    (tmp_path / "features").write_text("in the way")
    with pytest.raises(DataError, match=r"cache-dir: .*features cannot be written"):
        cached_features(images, NAMES, CPU, tmp_path, "x")

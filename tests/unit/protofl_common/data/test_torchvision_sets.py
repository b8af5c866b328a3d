"""The data sets read by torchvision: a made-up MNIST on disk, and stand-ins for the classes with other layouts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from protofl_common.data import DataError
from protofl_common.data.sources import SOURCES
from protofl_common.data.store import open_data

from .conftest import MakeSettings


def test_torchvision_set_has_both_parts(data_settings: MakeSettings, mnist_dir: Path) -> None:
    data = open_data(data_settings(dataset="mnist", data_dir=str(mnist_dir)))
    assert data.inputs.shape == (500, 1, 28, 28)
    np.testing.assert_array_equal(data.official, np.arange(500) >= 400)
    np.testing.assert_array_equal(data.inputs[:, 0, 0, :2].astype(int) @ [256, 1], np.arange(500))
    assert len(data.classes) == 10


class FakeSet:
    """One part of a data set as torchvision's classes present it: two samples with the labels 1 and 0."""

    def __init__(self, root: str, train: bool = True, split: str = "train") -> None:
        self.labels = [1, 0]


class FakeCifar(FakeSet):
    data = np.arange(2 * 32 * 32 * 3, dtype=np.uint8).reshape(2, 32, 32, 3)
    classes = ("plane", "car")


class FakeSvhn(FakeSet):
    data = FakeCifar.data.transpose(0, 3, 1, 2)


class FakeFlowers(FakeSet):
    def __iter__(self) -> Iterator[tuple[Image.Image, int]]:
        return iter([(Image.fromarray(image).resize((50, 40)), 0) for image in FakeCifar.data])


class EMNIST(FakeSet):
    data = torch.from_numpy(FakeCifar.data[:, :, :, 0])


@pytest.mark.parametrize(
    ("dataset", "cls", "fake", "parts", "shape"),
    [
        ("cifar10", "CIFAR10", FakeCifar, 2, (3, 32, 32)),
        ("svhn", "SVHN", FakeSvhn, 2, (3, 32, 32)),
        ("flowers102", "Flowers102", FakeFlowers, 3, (3, 64, 64)),
        ("emnist", "EMNIST", EMNIST, 2, (1, 32, 32)),
    ],
)
def test_torchvision_layouts(
    data_settings: MakeSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset: str,
    cls: str,
    fake: type,
    parts: int,
    shape: tuple[int, ...],
) -> None:
    monkeypatch.setattr(f"torchvision.datasets.{cls}", fake)
    raw = SOURCES[dataset].read(data_settings(dataset=dataset, data_dir=str(tmp_path)))
    assert raw.inputs.shape == (2 * parts, *shape)
    assert raw.inputs.flags.c_contiguous
    np.testing.assert_array_equal(raw.labels, [1, 0] * parts)
    np.testing.assert_array_equal(raw.official, [0, 0] * (parts - 1) + [1, 1])
    assert raw.classes == (("plane", "car") if dataset == "cifar10" else tuple("0123456789"))
    if dataset in ("cifar10", "svhn"):
        np.testing.assert_array_equal(raw.inputs[0], FakeCifar.data[0].transpose(2, 0, 1))
    if dataset == "emnist":
        np.testing.assert_array_equal(raw.inputs[0, 0], FakeCifar.data[0, :, :, 0].T)


def test_torchvision_set_may_lie_in_a_folder_of_its_own(data_settings: MakeSettings, mnist_dir: Path) -> None:
    nested = mnist_dir / "MNIST" / "MNIST"
    nested.mkdir()
    (mnist_dir / "MNIST" / "raw").rename(nested / "raw")
    assert len(open_data(data_settings(dataset="mnist", data_dir=str(mnist_dir))).labels) == 500


def test_missing_torchvision_file_says_how_to_get_it(data_settings: MakeSettings, mnist_dir: Path) -> None:
    (mnist_dir / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"'mnist': MNIST/raw/t10k-labels.* or set download = true"):
        open_data(data_settings(dataset="mnist", data_dir=str(mnist_dir)))
    said = r"there is no such folder \(dataset 'mnist'\); name another, or set download = true"
    with pytest.raises(DataError, match=said):
        open_data(data_settings(dataset="mnist", data_dir=str(mnist_dir / "nowhere")))


def test_damaged_torchvision_file(data_settings: MakeSettings, mnist_dir: Path) -> None:
    (mnist_dir / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03\x00")
    with pytest.raises(DataError, match="'mnist': torchvision cannot read"):
        open_data(data_settings(dataset="mnist", data_dir=str(mnist_dir)))


def test_download_fetches_every_part_once(
    data_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    class FakeUsps(FakeSet):
        data = np.zeros((2, 16, 16), dtype=np.uint8)

        def __init__(self, root: str, train: bool, download: bool = False) -> None:
            super().__init__(root, train)
            if download:
                fetched.append(train)
                Path(root, "usps.bz2" if train else "usps.t.bz2").touch()

    monkeypatch.setattr("torchvision.datasets.USPS", FakeUsps)
    settings = data_settings(dataset="usps", data_dir=str(tmp_path / "new" / "data"), download=True)
    assert open_data(settings).inputs.shape == (4, 1, 16, 16)
    assert len(open_data(settings).labels) == 4
    assert fetched == [True, False]


def test_download_that_fails(data_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(root: str, train: bool, download: bool) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.USPS", offline)
    with pytest.raises(DataError, match=r"download = true: torchvision could not fetch USPS \(no network\)"):
        open_data(data_settings(dataset="usps", data_dir=str(tmp_path), download=True))

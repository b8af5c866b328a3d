"""What the sources deliver: shapes, labels, domains, and errors that name the key."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from protofl_common.config.datasets import DATASETS, PARTITIONS
from protofl_common.data import DataError
from protofl_common.data.digits import DOMAINS
from protofl_common.data.partitions import DIVIDE
from protofl_common.data.raw import resized, statistics
from protofl_common.data.sources import SOURCES
from protofl_common.data.store import open_data

from .conftest import MakeSettings, write_image


def test_every_name_has_its_function() -> None:
    assert list(SOURCES) == list(DATASETS)
    assert list(DIVIDE) == list(PARTITIONS)


def test_digits_are_scikit_learns(data_settings: MakeSettings) -> None:
    data, original = open_data(data_settings(dataset="digits")), load_digits()
    assert data.inputs.shape == (1797, 1, 8, 8)
    assert data.inputs.dtype == np.uint8
    np.testing.assert_array_equal(data.labels, original.target)
    np.testing.assert_allclose(data.inputs[:, 0] / 255 * 16, original.images, atol=0.04)
    assert data.domain_names == ()


def test_digit_domains_are_balanced_look_different_and_are_the_same_whenever_they_are_made(
    data_settings: MakeSettings,
) -> None:
    data = open_data(settings := data_settings(dataset="digit-domains"))
    np.testing.assert_array_equal(SOURCES["digit-domains"].read(settings).inputs, data.inputs)
    assert data.inputs.shape[1:] == (3, 28, 28)
    assert data.domain_names == ("scanned", "printed", "photo", "inverted", "coloured")
    assert (np.array([np.bincount(data.labels[data.domains == d], minlength=10) for d in range(5)]) == 50).all()
    assert len({image.tobytes() for image in data.inputs}) == len(data.inputs)
    brightness = {name: data.inputs[data.domains == d].mean() for d, name in enumerate(DOMAINS)}
    assert brightness["scanned"] < 80 < 140 < brightness["inverted"] < brightness["printed"]
    colour = {name: np.ptp(data.inputs[data.domains == d], axis=1).mean() for d, name in enumerate(DOMAINS)}
    assert colour["scanned"] == colour["inverted"] == 0
    assert colour["coloured"] > 30
    assert colour["photo"] > 20


def test_digit_mix_takes_the_first_images_of_each_training_part(data_settings: MakeSettings, usps_dir: Path) -> None:
    data = open_data(data_settings(dataset="digit-mix", data_dir=str(usps_dir)))
    assert data.domain_names == ("mnist", "usps", "photo", "inverted", "coloured")
    assert np.bincount(data.domains).tolist() == [400, 40, 500, 500, 500]  # none of the 100 and 20 test images
    assert data.inputs.shape[1:] == (3, 28, 28)
    np.testing.assert_array_equal(np.asarray(data.inputs)[data.domains == 0][:, 2, 0, 1], np.arange(400) % 256)
    np.testing.assert_array_equal(data.labels[data.domains == 1], np.arange(40) % 10)
    embedded = open_data(data_settings(dataset="digit-domains"))
    np.testing.assert_array_equal(data.inputs[data.domains == 2], embedded.inputs[embedded.domains == 2])


def test_digit_mix_needs_both_sets(data_settings: MakeSettings, mnist_dir: Path) -> None:
    with pytest.raises(DataError, match=r"dataset = 'usps': usps\.bz2, usps\.t\.bz2 is neither in data-dir"):
        open_data(data_settings(dataset="digit-mix", data_dir=str(mnist_dir)))


def test_statistics_are_numpys(data_settings: MakeSettings) -> None:
    data = open_data(data_settings(dataset="digit-domains"))
    scaled = np.asarray(data.inputs) / 255
    np.testing.assert_allclose(data.mean, scaled.mean(axis=(0, 2, 3)), atol=1e-9)
    np.testing.assert_allclose(data.std, scaled.std(axis=(0, 2, 3)), atol=1e-9)
    assert statistics(np.full((2, 1, 3, 3), 51, np.uint8)) == ((pytest.approx(0.2),), (1.0,))


def test_image_size_resizes_any_source(data_settings: MakeSettings, mnist_dir: Path) -> None:
    assert open_data(data_settings(dataset="digits", image_size=16)).inputs.shape[1:] == (1, 16, 16)
    small = data_settings(dataset="mnist", data_dir=str(mnist_dir), image_size=14)
    assert open_data(small).inputs.shape == (500, 1, 14, 14)


def test_resizing_keeps_constant_images_and_the_size_that_is_right() -> None:
    grey = np.full((3, 1, 8, 8), 77, dtype=np.uint8)
    assert (resized(grey, 20) == 77).all()
    assert resized(grey, 8) is grey
    assert resized(grey, 0) is grey


def test_domain_folder(data_settings: MakeSettings, domain_dir: Path) -> None:
    (domain_dir / "photo" / "cat" / "notes.txt").write_text("not an image")
    (domain_dir / "photo" / "cat" / ".hidden.png").write_text("not an image either")
    (domain_dir / ".git" / "cat").mkdir(parents=True)
    data = open_data(data_settings(dataset="domain-folder", data_dir=str(domain_dir)))
    assert data.inputs.shape == (40, 3, 64, 64)
    assert data.classes == ("cat", "dog", "owl")
    assert data.domain_names == ("photo", "sketch")
    np.testing.assert_array_equal(np.bincount(data.labels), [16, 16, 8])
    assert (data.inputs[data.domains == 0, 2] == 200).all()
    assert (data.inputs[data.domains == 1, 0] == 200).all()


def test_image_folder_with_classes_in_the_order_given(data_settings: MakeSettings, domain_dir: Path) -> None:
    where = {"dataset": "image-folder", "data_dir": str(domain_dir / "sketch"), "image_size": 12}
    data = open_data(data_settings(**where, classes="owl, dog, cat, fox"))
    assert data.inputs.shape == (24, 3, 12, 12)
    assert data.classes == ("owl", "dog", "cat", "fox")
    np.testing.assert_array_equal(np.bincount(data.labels, minlength=4), [8, 8, 8, 0])
    assert data.domain_names == ()


def test_classes_picks_folders_of_a_domain_folder(data_settings: MakeSettings, domain_dir: Path) -> None:
    """As FedPLVM takes ten of DomainNet's 345 classes; `owl` is in one of the two domains only."""
    where = {"dataset": "domain-folder", "data_dir": str(domain_dir), "partition": "feature-shift"}
    data = open_data(data_settings(**where, classes="owl,cat"))
    assert data.classes == ("owl", "cat")
    np.testing.assert_array_equal(np.bincount(data.labels), [8, 16])
    with pytest.raises(DataError, match=r"classes = 'cat,fox': no domain in .* has images in a folder 'fox'"):
        open_data(data_settings(**where, classes="cat,fox"))


def test_unreadable_image_is_named(data_settings: MakeSettings, domain_dir: Path) -> None:
    (domain_dir / "photo" / "dog" / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    with pytest.raises(DataError, match=r"photo/dog/broken\.jpg is not a readable image"):
        open_data(data_settings(dataset="domain-folder", data_dir=str(domain_dir)))


@pytest.mark.parametrize("dataset", ["mnist", "usps", "image-folder", "domain-folder"])
def test_data_dir_missing_or_empty(data_settings: MakeSettings, tmp_path: Path, dataset: str) -> None:
    with pytest.raises(DataError, match=rf"data-dir = ''.*'{dataset}'"):
        open_data(data_settings(dataset=dataset))
    with pytest.raises(DataError, match=r"data-dir = .*there is no such folder"):
        open_data(data_settings(dataset=dataset, data_dir=str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="data-dir = "):
        open_data(data_settings(dataset=dataset, data_dir=str(tmp_path / "empty")))


def test_a_changed_folder_is_read_anew(data_settings: MakeSettings, domain_dir: Path) -> None:
    settings = data_settings(dataset="domain-folder", data_dir=str(domain_dir))
    assert len(open_data(settings).labels) == 40
    write_image(domain_dir / "photo" / "cat" / "new.png", (1, 2, 3))
    later = replace(settings, alpha=0.2)  # another process, as far as the memory of listings goes
    assert len(open_data(later).labels) == 41

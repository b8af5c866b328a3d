"""Public data sets by name, from tiny files in the layout in which they are published."""

from __future__ import annotations

import numpy as np
import pytest

from protofl_common.data import DataError
from protofl_common.data.published import PUBLIC
from tests.unit.protofl_common.data.conftest import refused, write_image


def pacs(root):
    """Write tiny PACS files below ``root``; return what must be read of them."""
    for domain in (*PUBLIC["pacs"].files, "kfold-lists"):
        for name in ("dog", "house"):
            write_image(root / "PACS" / domain / name / "pic_001.jpg")
    return {
        "clients": ("art_painting", "cartoon", "photo", "sketch"),
        "classes": ("dog", "house"),
        "split": [0] * 8,
    }


def fed_isic(root):
    """Write three images of Fed-ISIC 2019 below ``root``; return what must be read of them."""
    folder = root / "fed_isic2019"
    rows = ["image,MEL,target,center,fold,fold2"]
    for i, (target, centre, fold) in enumerate([(1, 0, "train"), (0, 3, "test"), (1, 3, "train")]):
        rows.append(f"ISIC_{i},0.0,{target},{centre},{fold},{fold}_{centre}")
        write_image(folder / "ISIC_2019_Training_Input_preprocessed" / f"ISIC_{i}.jpg")
    (folder / "train_test_split").write_text("\n".join(rows) + "\n")
    return {"clients": ("0", "3"), "classes": ("0", "1"), "labels": [1, 0, 1], "split": [0, 1, 0]}


SETS = {
    "pacs": pacs,
    "fed-isic": fed_isic,
}


@pytest.mark.parametrize("name", SETS)
def test_a_public_set_has_its_clients_classes_and_split(name, read_dataset, tmp_path):
    """Tiny files in the published layout are read, with clients, classes and parts."""
    wanted = SETS[name](tmp_path)
    data = read_dataset(name, tmp_path)

    assert (data.domain_names, data.classes) == (wanted["clients"], wanted["classes"])
    assert data.official.tolist() == wanted["split"]
    if "labels" in wanted:
        assert data.labels.tolist() == wanted["labels"]
    folder = PUBLIC[name].folder
    if (tmp_path / folder).is_dir():  # which data-dir may be itself
        assert read_dataset(name, tmp_path / folder).labels.tolist() == data.labels.tolist()


@pytest.mark.parametrize("name", ["pacs", "office10", "fed-isic"])
def test_what_is_missing_is_named_with_its_origin(name, read_dataset, tmp_path):
    """Of the files of a set the last is missing; or, of Fed-ISIC, one image."""
    *there, last = PUBLIC[name].files
    for file in there:
        (tmp_path / file).mkdir()
    with pytest.raises(DataError) as caught:
        read_dataset(name, tmp_path)
    assert f"dataset = '{name}': {last} is neither in data-dir = " in str(caught.value)
    assert PUBLIC[name].origin in str(caught.value)
    if name == "fed-isic":
        fed_isic(tmp_path)
        (tmp_path / "fed_isic2019" / PUBLIC[name].files[1] / "ISIC_1.jpg").unlink()
        with refused(r"1 images are not there, such as .*ISIC_1\.jpg"):
            read_dataset(name, tmp_path / "fed_isic2019")


def test_digit5_makes_the_folder_into_which_it_downloads(read_dataset, tmp_path, monkeypatch):
    """The publishers have nothing here, so that all domains are missing."""
    for name in ("mnist", "usps", "svhn"):
        row = PUBLIC[name]._replace(download=lambda folder: None)
        monkeypatch.setitem(PUBLIC, name, row)

    with refused("must have two of mnist, "):
        read_dataset("digit5", tmp_path / "new", download=True)

    assert (tmp_path / "new").is_dir()


def test_digit5_takes_domains_that_are_there(read_dataset, usps_dir, capsys):
    """First MNIST and USPS are there, then MNIST-M as well; a single domain is refused."""
    data = read_dataset("digit5", usps_dir)
    assert data.domain_names == ("mnist", "usps")
    numbers_of_parts = np.bincount(2 * data.domains + data.official).tolist()
    assert numbers_of_parts == [400, 100, 40, 20]  # MNIST's training and test part, then USPS's
    assert data.inputs.shape[1:] == (3, 32, 32)
    assert "digit5 without mnist-m, svhn, not in data-dir" in capsys.readouterr().err

    for part in ("train", "test"):
        write_image(usps_dir / "mnist_m" / f"mnist_m_{part}" / "00000000.png")
        (usps_dir / "mnist_m" / f"mnist_m_{part}_labels.txt").write_text("00000000.png 7\n")
    # under another spelling of the folder, whose data are in the cache already
    more = read_dataset("digit5", usps_dir / "." / ".." / usps_dir.name)
    assert more.domain_names == ("mnist", "mnist-m", "usps")
    assert more.labels[more.domains == 1].tolist() == [7, 7]

    for file in ("usps.bz2", "mnist_m/mnist_m_train_labels.txt"):
        (usps_dir / file).unlink()
    with pytest.raises(
        DataError, match=r"must have two of mnist, mnist-m, .* mnist_m/mnist_m_train"
    ):
        read_dataset("digit5", usps_dir)

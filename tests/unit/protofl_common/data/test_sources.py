"""What the sources deliver: shapes, labels, domains, images, and errors that name the key."""

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image
from sklearn.datasets import load_digits

from protofl_common.config.datasets import DATASETS, PARTITIONS
from protofl_common.data import door
from protofl_common.data import images as decoding
from protofl_common.data.digits import DOMAINS
from protofl_common.data.partitions import DIVIDE
from protofl_common.data.raw import resized, statistics
from protofl_common.data.sources import SOURCES
from protofl_common.data.store import open_data

from .conftest import identities, refused, write_image


def test_every_name_has_its_function():
    assert SOURCES.keys() == DATASETS.keys()
    assert DIVIDE.keys() == PARTITIONS.keys()


def test_digits_are_scikit_learns(read_dataset):
    """The images and labels are those of `sklearn.datasets.load_digits`."""
    data = read_dataset("digits")
    original = load_digits()
    assert data.inputs.shape == (1797, 1, 8, 8)
    assert data.inputs.dtype == np.uint8
    assert data.domain_names == ()
    assert_array_equal(data.labels, original.target)
    # scikit-learn's pixels are 0 … 16, here bytes: rounding may change them by 16/255/2 = 0.031
    assert_allclose(data.inputs[:, 0] / 255 * 16, original.images, atol=0.04)


def test_digit_domains_are_balanced_unlike_and_always_the_same(data_settings):
    """Five domains with 50 images a class differ in brightness and colour."""
    settings = data_settings(dataset="digit-domains")
    data = open_data(settings)
    assert_array_equal(SOURCES["digit-domains"].read(settings).inputs, data.inputs)
    assert data.inputs.shape[1:] == (3, 28, 28)
    assert data.domain_names == ("scanned", "printed", "photo", "inverted", "coloured")
    assert len(identities(data.inputs)) == len(data.inputs)

    brightness = {}
    colour = {}
    for number, name in enumerate(DOMAINS):
        is_of_domain = data.domains == number
        assert np.bincount(data.labels[is_of_domain]).tolist() == [50] * 10
        brightness[name] = data.inputs[is_of_domain].mean()
        colour[name] = np.ptp(data.inputs[is_of_domain], axis=1).mean()  # 0 in grey pixels
    assert brightness["scanned"] < 80 < 140 < brightness["inverted"] < brightness["printed"]
    assert colour["scanned"] == colour["inverted"] == 0
    assert colour["coloured"] > 30
    assert colour["photo"] > 20


def test_mean_and_deviation_of_the_pixels(read_dataset):
    data = read_dataset("digit-domains")
    scaled = np.asarray(data.inputs) / 255
    assert_allclose(data.mean, scaled.mean(axis=(0, 2, 3)), atol=1e-9)
    assert_allclose(data.std, scaled.std(axis=(0, 2, 3)), atol=1e-9)
    of_one_colour = np.full((2, 1, 3, 3), 51, np.uint8)  # 51/255; a deviation of 0 counts as 1
    assert statistics(of_one_colour) == ((pytest.approx(0.2),), (1.0,))


def test_digit_mix_takes_the_first_images_of_each_training_part(read_dataset, usps_dir):
    """Made-up MNIST and USPS stand beside three of the embedded domains."""
    data = read_dataset("digit-mix", usps_dir)

    assert data.domain_names == ("mnist", "usps", "photo", "inverted", "coloured")
    # none of the 100 and 20 test images
    assert np.bincount(data.domains).tolist() == [400, 40, 500, 500, 500]
    assert data.inputs.shape[1:] == (3, 28, 28)
    mnist = data.inputs[data.domains == 0]
    assert_array_equal(mnist[:, 2, 0, 1], np.arange(400) % 256)  # the images' numbers
    assert_array_equal(data.labels[data.domains == 1], np.arange(40) % 10)
    photos = data.inputs[data.domains == 2]
    embedded = read_dataset("digit-domains")
    assert_array_equal(photos, embedded.inputs[embedded.domains == 2])


def test_digit_mix_names_the_part_that_is_missing(read_dataset, usps_dir):
    for file in usps_dir.glob("usps*"):
        file.unlink()
    with refused(r"dataset = 'usps': usps\.bz2, usps\.t\.bz2 is neither in data-dir"):
        read_dataset("digit-mix", usps_dir)


def test_image_size_resizes_any_source_but_not_what_has_it(read_dataset, mnist_dir):
    assert read_dataset("digits", image_size=16).inputs.shape[1:] == (1, 16, 16)
    assert read_dataset("mnist", mnist_dir, image_size=14).inputs.shape == (500, 1, 14, 14)
    grey = np.full((3, 1, 8, 8), 77, dtype=np.uint8)
    assert (resized(grey, 20) == 77).all()
    assert resized(grey, 8) is resized(grey, 0) is grey


def test_a_domain_folder_has_its_domains_and_classes_and_nothing_hidden(read_dataset, domain_dir):
    """Photos are bluish and sketches reddish, so that channel 2, or 0, is 200 everywhere."""
    (domain_dir / "photo" / "cat" / "notes.txt").write_text("not an image")
    (domain_dir / "photo" / "cat" / ".hidden.png").write_text("not an image either")
    (domain_dir / ".git" / "cat").mkdir(parents=True)

    data = read_dataset("domain-folder", domain_dir)

    assert data.inputs.shape == (40, 3, 64, 64)
    assert data.domain_names == ("photo", "sketch")
    assert data.classes == ("cat", "dog", "owl")
    assert_array_equal(np.bincount(data.labels), [16, 16, 8])
    assert (data.inputs[data.domains == 0, 2] == 200).all()
    assert (data.inputs[data.domains == 1, 0] == 200).all()


def test_folders_that_macos_has_named(read_dataset, domain_dir):
    """The two spellings of an umlaut name one domain, and one class."""
    (domain_dir / "photo").rename(domain_dir / "Bu\u0308ro")
    (domain_dir / "sketch/dog").rename(domain_dir / "sketch/Ku\u0308ken")
    write_image(domain_dir / "B\u00fcro/K\u00fcken/0.png")

    data = read_dataset("domain-folder", domain_dir, classes="cat,Ku\u0308ken")

    assert data.classes == ("cat", "K\u00fcken")
    assert data.domain_names == ("B\u00fcro", "sketch")
    assert np.bincount(data.labels[data.domains == 0]).tolist() == [8, 1]
    assert np.bincount(data.labels[data.domains == 1]).tolist() == [8, 8]


def test_image_folder_with_classes_in_the_order_given(read_dataset, domain_dir):
    """``classes`` gives the order, and may name one that this site lacks, fox."""
    sketches = domain_dir / "sketch"
    data = read_dataset("image-folder", sketches, image_size=12, classes="owl, dog, cat, fox")
    assert data.inputs.shape == (24, 3, 12, 12)
    assert data.domain_names == ()
    assert data.classes == ("owl", "dog", "cat", "fox")
    assert_array_equal(np.bincount(data.labels, minlength=4), [8, 8, 8, 0])

    (sketches / "fox").mkdir()
    with refused(r"the folder 'fox' in .* is a class without an image there \(\.avif, "):
        read_dataset("image-folder", sketches)


def test_classes_picks_folders_of_a_domain_folder(read_dataset, domain_dir):
    """As FedPLVM takes ten of DomainNet's 345 classes; `owl` is in one of the two domains only."""
    where = ("domain-folder", domain_dir)
    data = read_dataset(*where, classes="owl,cat")
    assert data.classes == ("owl", "cat")
    assert_array_equal(np.bincount(data.labels), [8, 16])

    with refused(r"classes = 'cat,fox': no domain in .* has images in a folder 'fox'"):
        read_dataset(*where, classes="cat,fox")

    # A site may lack a class that others have, `fox` or `dogs`. A name that differs from one of its
    # folders in case and punctuation alone is taken for a misspelling.
    for classes in ("cat,fox", "cat,dogs"):
        assert len(read_dataset(*where, partition="own", classes=classes).classes) == 2
    for classes in ("cat,Dog", "cat,do_g"):
        with refused(r"does not list the folder .*dog; is it misspelt\?"):
            read_dataset(*where, partition="own", classes=classes)


def test_a_damaged_file_is_named(read_dataset, domain_dir, mnist_dir):
    (domain_dir / "photo" / "dog" / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    (mnist_dir / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03\x00")
    for dataset, folder, said in (
        ("domain-folder", domain_dir, r"photo/dog/broken\.jpg is not a readable image"),
        ("mnist", mnist_dir, "'mnist': torchvision cannot read"),
    ):
        with refused(said):
            read_dataset(dataset, folder)


def manifest_of(folder, without):
    """Write a list of a domain folder's images but for those ``without``; return its path.

    Each domain is a client.
    """
    lines = ["file,label,client"]
    for file in sorted(folder.rglob("*.png")):
        name = file.relative_to(folder)
        if str(name) not in without:
            lines.append(f"{name},{name.parts[1]},{name.parts[0]}")
    listed = folder / "images.csv"
    listed.write_text("\n".join(lines))
    return listed


@pytest.mark.parametrize("dataset", ["domain-folder", "image-folder", "manifest"])
def test_some_files_may_be_unreadable_and_are_named(dataset, read_dataset, domain_dir, capsys):
    """The data are those of a folder without them, to the bit.

    Three files are cut in half, as many as ``max-unreadable`` allows here.
    """
    broken = {"photo/cat/1.png", "photo/dog/0.png", "sketch/owl/3.png"}
    if dataset == "image-folder":
        broken = {f"sketch/{name}/2.png" for name in ("cat", "dog", "owl")}
    for name in broken:
        content = (domain_dir / name).read_bytes()
        (domain_dir / name).write_bytes(content[: len(content) // 2])
    where = {"domain-folder": domain_dir, "image-folder": domain_dir / "sketch"}

    def found_with(share, without):
        """Read the data with this ``max-unreadable``, from a manifest ``without`` some files."""
        path = where.get(dataset) or manifest_of(domain_dir, without)
        return read_dataset(dataset, path, max_unreadable=share)

    number = len(list(where.get(dataset, domain_dir).rglob("*.png")))
    found = found_with(3 / number, set())
    said = capsys.readouterr().err
    assert f"3 of {number} images cannot be read, and are left out" in said
    assert all(f"{domain_dir / name} is not a readable image" in said for name in broken)
    with refused(r"more than max-unreadable = [\d.]+ of \d+ images are so"):
        found_with(2 / number, set())
    with refused(r"is not a readable image .*: max-unreadable"):
        found_with(0.0, set())

    for name in broken:
        (domain_dir / name).unlink()
    wanted = found_with(0.0, broken)
    for name in ("inputs", "labels", "domains", "official"):
        assert_array_equal(getattr(found, name), getattr(wanted, name))
    for name in ("classes", "domain_names", "mean", "std"):
        assert getattr(found, name) == getattr(wanted, name)


def test_no_class_may_be_unreadable(read_dataset, domain_dir):
    for file in (domain_dir / "sketch" / "owl").iterdir():
        file.write_bytes(b"no image")
    with refused("no image of owl can be read"):
        read_dataset("image-folder", domain_dir / "sketch", max_unreadable=0.5)


def test_photos_are_upright(tmp_path):
    """The first row of pixels is the right side of the photo, as its Exif data say.

    Damage beside that note does not matter; without a note that can be read the image stays.
    """
    first_row = np.zeros((8, 8), np.uint8)
    first_row[0] = 1
    exif = Image.Exif()
    orientation, maker = 0x0112, 0x010F
    exif.update({orientation: 6, maker: "maker"})  # 6: turn it a quarter to the right
    turned = exif.tobytes()
    broken_beside_it = turned.replace(b"\1\x0f", b"\1\1")  # of ``maker``

    def column_sums(note):
        file = tmp_path / "turned.png"
        Image.fromarray(first_row).save(file, exif=note)
        return decoding.read_image(file, 8)[0].sum(axis=0).tolist()

    assert column_sums(turned) == [0] * 7 + [8]
    assert column_sums(broken_beside_it) == [0] * 7 + [8]
    assert column_sums(b"broken") == [1] * 8


@pytest.mark.parametrize(("name", "target", "said"), [
    ("dog/gone.png", "none", r"dog/gone\.png is not a readable image"),
    ("dog/more", "cat", "dog/more is a link to a folder, which is not followed"),
    ("Cat", "cat", "labels 'Cat', 'cat' are alike but for capitals"),
])  # fmt: skip
def test_links_that_lead_nowhere_or_to_folders_and_like_names_are_refused(
    read_dataset, domain_dir, name, target, said
):
    """``name`` becomes a link to ``target``."""
    photos = domain_dir / "photo"
    (photos / name).symlink_to(photos / target)
    with refused(said):
        read_dataset("image-folder", photos)


@pytest.mark.parametrize("dataset", ["mnist", "usps", "image-folder", "domain-folder", "arrays"])
def test_a_data_dir_that_is_missing_or_empty_is_refused(read_dataset, tmp_path, dataset):
    with refused(rf"data-dir = ''.*'{dataset}'"):
        read_dataset(dataset)
    with refused(r"data-dir = .*there is no such (file or )?folder"):
        read_dataset(dataset, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    said = "data-dir = .*none there" if dataset == "arrays" else "data-dir = "
    with refused(said):
        read_dataset(dataset, tmp_path / "empty")


def test_a_changed_folder_is_read_anew(read_dataset, domain_dir):
    assert len(read_dataset("domain-folder", domain_dir).labels) == 40
    write_image(domain_dir / "photo" / "cat" / "new.png", (1, 2, 3))
    assert len(read_dataset("domain-folder", domain_dir).labels) == 41


def test_files_are_decoded_in_their_order_and_it_says_how_far_it_is(
    data_settings, tmp_path, monkeypatch, capsys
):
    """Of two broken files the first in order is named, whichever is decoded first."""
    rng = np.random.default_rng(0)
    files = [tmp_path / f"bild {number}.png" for number in range(20)]
    for file in files:
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file)
    monkeypatch.setattr(door, "PROGRESS_SECONDS", -1.0)  # a line for every image
    settings = data_settings(image_size=8, cache_dir=str(tmp_path / "cache"))

    images = decoding.decoded(files, settings, {})

    assert "protofl: 18 of 20 images decoded" in capsys.readouterr().err
    one_by_one = np.stack([decoding.read_image(file, 8) for file in files])
    assert_array_equal(images, one_by_one)
    assert isinstance(images, np.memmap)  # on the disk, in a file that nobody else sees
    assert not list((tmp_path / "cache").iterdir())

    for number in (13, 17):
        files[number].write_bytes(b"no image")
    with refused(r"bild 13\.png is not a readable image"):
        decoding.decoded(files, settings, {})


def test_a_strangers_file_starts_no_other_program(tmp_path, monkeypatch):
    """Pillow would start Ghostscript for PostScript, under any name of a file.

    A program ``gs`` stands first on the PATH, and would leave a file ``started``.
    """
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # not looked for yet
    file = tmp_path / "scan.png"
    file.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with refused(r"scan\.png is not a readable image"):
        decoding.read_image(file, 8)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("kind", "suffix"), [(np.uint16, "png"), (np.float32, "tif"), (np.int32, "tif")]
)
def test_pixels_of_more_than_eight_bits_are_refused(tmp_path, kind, suffix):
    file = tmp_path / f"scan.{suffix}"
    Image.fromarray(np.linspace(0, 4000, 64).reshape(8, 8).astype(kind)).save(file)
    with refused(rf"scan\.{suffix}.* more than 8 bits"):
        decoding.read_image(file, 8)


def test_several_pages_or_frames_are_refused_but_not_of_a_phones_photo(tmp_path):
    """Phones write MPO files: a photo with others beside it, such as a preview."""
    dark = Image.new("L", (8, 8))
    grey = Image.new("L", (8, 8), 9)
    for name in ("scan.tif", "film.gif"):
        dark.save(tmp_path / name, save_all=True, append_images=[grey])
        with refused(rf"{name}.* has 2 pages or frames, of which one would be seen"):
            decoding.read_image(tmp_path / name, 8)

    dark.save(tmp_path / "photo.jpg", "MPO", save_all=True, append_images=[grey])
    decoding.read_image(tmp_path / "photo.jpg", 8)


@pytest.mark.parametrize("own_folder", [False, True])
def test_torchvision_set_has_both_parts(own_folder, read_dataset, mnist_dir):
    """The files may lie in a folder of their own."""
    if own_folder:
        (mnist_dir / "MNIST" / "MNIST").mkdir()
        (mnist_dir / "MNIST" / "raw").rename(mnist_dir / "MNIST" / "MNIST" / "raw")
    data = read_dataset("mnist", mnist_dir)
    assert data.inputs.shape == (500, 1, 28, 28)
    assert_array_equal(data.official, np.arange(500) >= 400)
    numbers = data.inputs[:, 0, 0, :2].astype(int) @ [256, 1]  # as `mnist_dir` writes them
    assert_array_equal(numbers, np.arange(500))
    assert len(data.classes) == 10


class FakeSet:
    """One part of a data set of torchvision: two samples with the labels 1 and 0."""

    def __init__(self, root, train=True, split="train"):
        self.labels = [1, 0]


class FakeCifar(FakeSet):
    data = np.arange(2 * 32 * 32 * 3, dtype=np.uint8).reshape(2, 32, 32, 3)
    classes = ("plane", "car")


class FakeSvhn(FakeSet):
    data = FakeCifar.data.transpose(0, 3, 1, 2)


class FakeFlowers(FakeSet):
    def __iter__(self):
        return iter([(Image.fromarray(image).resize((50, 40)), 0) for image in FakeCifar.data])


@pytest.mark.parametrize(("dataset", "cls", "fake", "parts", "shape"), [
    ("cifar10", "CIFAR10", FakeCifar, 2, (3, 32, 32)),
    ("svhn", "SVHN", FakeSvhn, 2, (3, 32, 32)),
    ("flowers102", "Flowers102", FakeFlowers, 3, (3, 64, 64)),  # a validation part as well
])  # fmt: skip
def test_the_parts_of_a_torchvision_set_become_one_array_of_images(
    dataset, cls, fake, parts, shape, data_settings, tmp_path, monkeypatch
):
    """Stand-ins have images with channels last, channels first, or as PIL images.

    Each part has two samples; ``parts`` is their number.
    """
    monkeypatch.setattr(f"torchvision.datasets.{cls}", fake)
    raw = SOURCES[dataset].read(data_settings(dataset=dataset, data_dir=str(tmp_path)))
    assert raw.inputs.shape == (2 * parts, *shape)
    assert raw.inputs.flags.c_contiguous
    assert_array_equal(raw.labels, [1, 0] * parts)
    assert_array_equal(raw.official, [0, 0] * (parts - 1) + [1, 1])
    assert raw.classes == (("plane", "car") if dataset == "cifar10" else tuple("0123456789"))
    if dataset in ("cifar10", "svhn"):
        assert_array_equal(raw.inputs[0], FakeCifar.data[0].transpose(2, 0, 1))


def test_missing_torchvision_file_says_how_to_get_it(read_dataset, mnist_dir):
    (mnist_dir / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with refused(r"'mnist': MNIST/raw/t10k-labels.* or set download = true"):
        read_dataset("mnist", mnist_dir)
    said = r"there is no such folder \(dataset 'mnist'\); name another, or set download = true"
    with refused(said):
        read_dataset("mnist", mnist_dir / "nowhere")


def test_a_download_fetches_every_part_once_or_fails(
    read_dataset, data_settings, tmp_path, monkeypatch
):
    """A stand-in for torchvision's USPS notes which parts are fetched."""
    fetched = []

    class FakeUsps(FakeSet):
        data = np.zeros((2, 16, 16), dtype=np.uint8)

        def __init__(self, root, train, download=False):
            super().__init__(root, train)
            if download:
                fetched.append(train)
                Path(root, "usps.bz2" if train else "usps.t.bz2").touch()

    monkeypatch.setattr("torchvision.datasets.USPS", FakeUsps)
    settings = data_settings(dataset="usps", data_dir=str(tmp_path / "new" / "data"), download=True)
    assert open_data(settings).inputs.shape == (4, 1, 16, 16)
    assert len(open_data(settings).labels) == 4
    assert fetched == [True, False]

    def offline(root, train, download):
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.USPS", offline)
    with refused(r"download = true: torchvision could not fetch USPS \(no network\)"):
        read_dataset("usps", tmp_path, download=True)

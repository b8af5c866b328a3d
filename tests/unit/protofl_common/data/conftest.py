"""Settings over a cache of the test session, and small file-based data sets."""

import bz2

import numpy as np
import pytest
from PIL import Image

from protofl_common.data import DataError, open_client_data
from protofl_common.data.store import data_key, open_data
from protofl_common.experiment.settings import Settings, default_run_config

WHOLE = {"train_samples": 0, "test_samples": 0}
"""No caps: every sample of a share is for training or for testing."""


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def data_settings(cache_dir):
    """``data_settings(dataset="digits")``: the defaults with these changes.

    Unless they are changed too, clients have one domain each and at most 30 training samples.
    """

    def make(**changes):
        config = default_run_config()
        config |= {"cache-dir": str(cache_dir), "partition": "feature-shift", "train-samples": 30}
        config |= {key.replace("_", "-"): value for key, value in changes.items()}
        return Settings.from_run_config(config).data

    return make


@pytest.fixture
def open_clients(data_settings):
    """``open_clients(5, seed=1, partition="iid", …)``: the data of each of 5 clients."""

    def open_clients_(clients, *, seed=42, **changes):
        settings = data_settings(**changes)
        return [
            open_client_data(settings, seed=seed, partition=i, num_partitions=clients)
            for i in range(clients)
        ]

    return open_clients_


@pytest.fixture
def read_dataset(data_settings):
    """``read_dataset("arrays", folder, image_size=8)``: a data set, as a new process reads it.

    A process lists a folder's files once; here that listing is forgotten before every call.
    """

    def read_dataset_(dataset, path="", **settings):
        data_key.cache_clear()
        return open_data(data_settings(dataset=dataset, data_dir=str(path), **settings))

    return read_dataset_


@pytest.fixture
def write_and_read(read_dataset, tmp_path):
    """``write_and_read("arrays", "a.csv", text)``: write the file, and read it as a data set.

    The contents are a text, or a dictionary of arrays for a file of NumPy.
    """

    def write_and_read_(dataset, name, contents, **settings):
        if isinstance(contents, str):
            (tmp_path / name).write_text(contents, errors="surrogateescape")
        else:
            np.savez(tmp_path / name, **contents)
        return read_dataset(dataset, tmp_path / name, **settings)

    return write_and_read_


def refused(said):
    """Demand that the block inside ``with`` raises DataError with this text (a pattern)."""
    return pytest.raises(DataError, match=said)


@pytest.fixture
def mnist_dir(tmp_path):
    """A folder with 400 + 100 made-up MNIST images; the first two pixels hold an image's number."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, first, count in (("train", 0, 400), ("t10k", 400, 100)):
        images = np.zeros((count, 28, 28), dtype=np.uint8)
        images[:, 0, 0], images[:, 0, 1] = np.divmod(np.arange(first, first + count), 256)
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8))
    return raw.parents[1]


@pytest.fixture
def usps_dir(mnist_dir):
    """`mnist_dir`, with 40 + 20 made-up USPS images beside.

    The format of USPS is LIBSVM's: labels 1 … 10, and the 256 pixels as number:value, -1 … 1.
    """
    for name, count in (("usps.bz2", 40), ("usps.t.bz2", 20)):
        rows = []
        for row in range(count):
            pixels = [f"{k + 1}:{-1 + row / 50}" for k in range(256)]
            rows.append(" ".join([f"{row % 10 + 1}", *pixels]))
        (mnist_dir / name).write_bytes(bz2.compress("\n".join(rows).encode()))
    return mnist_dir


def write_idx(file, array):
    """Write an array in MNIST's own format: 0x08 for unsigned bytes, axes, shape, values."""
    header = np.array([0x800 + array.ndim, *array.shape], dtype=">i4")
    file.write_bytes(header.tobytes() + array.tobytes())


@pytest.fixture
def domain_dir(tmp_path):
    """DOMAIN/CLASS/image, of 20×10 pixels.

    photo has 8 cats and 8 dogs, bluish; sketch has 8 cats, 8 dogs and 8 owls, reddish.
    """
    root = tmp_path / "domains"
    for number in range(8):
        for shade, name in enumerate(("cat", "dog", "owl")):
            write_image(root / "sketch" / name / f"{number}.png", (200, shade, number))
            if name != "owl":
                write_image(root / "photo" / name / f"{number}.png", (number, shade, 200))
    return root


def write_image(file, colour=(90, 0, 0)):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 10), colour).save(file)


def identities(images):
    """A set with every image's bytes: stands for which samples these are."""
    return {image.tobytes() for image in images}


def counts(client):
    """Samples of each class."""
    labels = np.concatenate([client.train_labels, client.test_labels])
    return np.bincount(labels, minlength=len(client.classes))


def held(client):
    """The classes of which a client has samples."""
    return set(client.train_labels.tolist()) | set(client.test_labels.tolist())

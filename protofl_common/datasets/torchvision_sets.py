"""The data sets that torchvision reads: training and official test part together, as uint8 arrays.

Files lie in ``data-dir`` (or in its folder named like torchvision's class) in torchvision's own layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.decoding import square_rgb
from protofl_common.datasets.folders import DEFAULT_SIZE, data_dir_of
from protofl_common.datasets.raw import DataError, Images, Ints, RawData, without_domains


@dataclass(frozen=True)
class TorchvisionSet:
    """How torchvision calls a data set: its class, the files it needs, and the arguments for its two parts."""

    cls: str
    files: tuple[str, ...]
    train: tuple[dict[str, Any], ...] = ({"train": True},)
    test: tuple[dict[str, Any], ...] = ({"train": False},)


_MNIST_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_EMNIST_FILES = tuple(f"emnist-balanced-{file.replace('t10k', 'test')}" for file in _MNIST_FILES)

SETS: dict[str, TorchvisionSet] = {
    "mnist": TorchvisionSet("MNIST", tuple(f"MNIST/raw/{file}" for file in _MNIST_FILES)),
    "fashion-mnist": TorchvisionSet("FashionMNIST", tuple(f"FashionMNIST/raw/{file}" for file in _MNIST_FILES)),
    "kmnist": TorchvisionSet("KMNIST", tuple(f"KMNIST/raw/{file}" for file in _MNIST_FILES)),
    "emnist": TorchvisionSet(
        "EMNIST",
        tuple(f"EMNIST/raw/{file}" for file in _EMNIST_FILES),
        train=({"split": "balanced", "train": True},),
        test=({"split": "balanced", "train": False},),
    ),
    "usps": TorchvisionSet("USPS", ("usps.bz2", "usps.t.bz2")),
    "svhn": TorchvisionSet(
        "SVHN", ("train_32x32.mat", "test_32x32.mat"), train=({"split": "train"},), test=({"split": "test"},)
    ),
    "cifar10": TorchvisionSet("CIFAR10", ("cifar-10-batches-py",)),
    "cifar100": TorchvisionSet("CIFAR100", ("cifar-100-python",)),
    "flowers102": TorchvisionSet(
        "Flowers102", ("flowers-102",), train=({"split": "train"}, {"split": "val"}), test=({"split": "test"},)
    ),
}


def locate(name: str, settings: DataSettings) -> tuple[Path, ...]:
    """The files and folders of data set ``name``, downloaded first when missing and ``download`` is true.

    Raises
    ------
    DataError
        When they are missing and may not, or cannot, be downloaded.
    """
    row = SETS[name]
    if settings.download and settings.data_dir:
        Path(settings.data_dir).expanduser().mkdir(parents=True, exist_ok=True)
    root = data_dir_of(settings, hint=", or download = true")
    if _missing(row, _root_of(row, root)) and settings.download:
        _download(row, root)
    found = _root_of(row, root)
    if missing := _missing(row, found):
        raise DataError(
            f"dataset = {name!r}: {missing[0]} is not in data-dir = {settings.data_dir!r}; "
            "set data-dir to the folder that holds it, or download = true"
        )
    return tuple(found / file for file in row.files)


def read(name: str, settings: DataSettings) -> RawData:
    """Decode data set ``name``: official training part first, then the official test part.

    Flowers-102, whose images differ in size, is read at ``image-size`` (64 when 0); its validation part counts as
    training. EMNIST's images, stored on their side, are turned upright.
    """
    import torchvision

    row = SETS[name]
    root = _root_of(row, data_dir_of(settings))
    try:
        parts = [
            (getattr(torchvision.datasets, row.cls)(str(root), **arguments), official)
            for official, many in enumerate((row.train, row.test))
            for arguments in many
        ]
        images = [_images(dataset, settings.image_size or DEFAULT_SIZE) for dataset, _ in parts]
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        raise DataError(f"dataset = {name!r}: torchvision cannot read the files in {root} ({error})") from error
    labels = [_labels(dataset) for dataset, _ in parts]
    official = [np.full(len(part), flag, np.uint8) for part, (_, flag) in zip(labels, parts, strict=True)]
    classes = getattr(parts[0][0], "classes", None) or [str(digit) for digit in range(10)]
    return without_domains(
        np.concatenate(images), np.concatenate(labels), np.concatenate(official), tuple(map(str, classes))
    )


def _root_of(row: TorchvisionSet, data_dir: Path) -> Path:
    """``data_dir``, or its folder named ``row.cls`` when the files are there."""
    own = data_dir / row.cls
    return data_dir if _missing(row, own) else own


def _missing(row: TorchvisionSet, root: Path) -> list[str]:
    return [file for file in row.files if not (root / file).exists()]


def _download(row: TorchvisionSet, root: Path) -> None:
    """Let torchvision fetch every part into ``root``; only one process does, the others wait for it."""
    import torchvision
    from filelock import FileLock

    with FileLock(root / f".{row.cls}.download.lock"):
        if not _missing(row, _root_of(row, root)):
            return
        try:
            for arguments in (*row.train, *row.test):
                getattr(torchvision.datasets, row.cls)(str(root), download=True, **arguments)
        except (RuntimeError, OSError) as error:
            raise DataError(f"download = true: torchvision could not fetch {row.cls} ({error})") from error


def _images(dataset: Any, size: int) -> Images:
    """uint8 [N, channels, H, W] from torchvision's [N, H, W], [N, H, W, 3] or [N, 3, H, W], or from image files."""
    if not hasattr(dataset, "data"):
        return np.stack([square_rgb(image, size) for image, _ in dataset])
    pixels = np.asarray(dataset.data)
    if type(dataset).__name__ == "EMNIST":
        pixels = pixels.transpose(0, 2, 1)
    if pixels.ndim == 3:
        return pixels[:, None]
    return pixels.transpose(0, 3, 1, 2) if pixels.shape[-1] == 3 else pixels


def _labels(dataset: Any) -> Ints:
    """int64 [N], under whichever name the class keeps them."""
    names = ("targets", "labels", "_labels")
    return np.asarray(next(getattr(dataset, name) for name in names if hasattr(dataset, name)), dtype=np.int64)

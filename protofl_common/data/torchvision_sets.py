"""The data sets that torchvision reads: training and official test part together, as uint8 arrays.

Files lie in ``data-dir`` (or in its folder named like torchvision's class) in torchvision's own layout.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.data.images import DEFAULT_SIZE, data_dir_of, square_rgb
from protofl_common.data.raw import DataError, Images, Ints, RawData, from_arrays


@dataclass(frozen=True)
class TorchvisionSet:
    """A data set of torchvision: its class, the files it needs, and the arguments for its two parts."""

    cls: str
    files: tuple[str, ...]
    num_classes: int = 10
    train: tuple[dict[str, Any], ...] = ({"train": True},)
    test: tuple[dict[str, Any], ...] = ({"train": False},)


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_LIKE_MNIST = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "kmnist": "KMNIST"}
_BALANCED = {"split": "balanced"}
_TRAIN, _VALIDATION, _TEST = {"split": "train"}, {"split": "val"}, {"split": "test"}

SETS: dict[str, TorchvisionSet] = {
    **{name: TorchvisionSet(cls, tuple(f"{cls}/raw/{file}" for file in _IDX)) for name, cls in _LIKE_MNIST.items()},
    "emnist": TorchvisionSet(
        "EMNIST",
        tuple(f"EMNIST/raw/emnist-balanced-{file.replace('t10k', 'test')}" for file in _IDX),
        47,
        train=(_BALANCED | {"train": True},),
        test=(_BALANCED | {"train": False},),
    ),
    "usps": TorchvisionSet("USPS", ("usps.bz2", "usps.t.bz2")),
    "svhn": TorchvisionSet("SVHN", ("train_32x32.mat", "test_32x32.mat"), train=(_TRAIN,), test=(_TEST,)),
    "cifar10": TorchvisionSet("CIFAR10", ("cifar-10-batches-py",)),
    "cifar100": TorchvisionSet("CIFAR100", ("cifar-100-python",), 100),
    "flowers102": TorchvisionSet("Flowers102", ("flowers-102",), 102, train=(_TRAIN, _VALIDATION), test=(_TEST,)),
}


def locate_torchvision(name: str, settings: DataSettings) -> tuple[Path, ...]:
    """The files and folders of data set ``name``, downloaded first when missing and ``download`` is true."""
    row = SETS[name]
    if settings.download and settings.data_dir:
        Path(settings.data_dir).expanduser().mkdir(parents=True, exist_ok=True)
    data_dir = data_dir_of(settings, hint=", or download = true")
    if settings.download and _found(row, data_dir)[1]:
        _download(row, data_dir)
    root, missing = _found(row, data_dir)
    if missing:
        raise DataError(
            f"dataset = {name!r}: {missing[0]} is not in data-dir = {settings.data_dir!r}; "
            "set data-dir to the folder that holds it, or download = true"
        )
    return tuple(root / file for file in row.files)


def read_torchvision(name: str, settings: DataSettings) -> RawData:
    """Decode data set ``name``: official training part first, then the official test part.

    Flowers-102, whose images differ in size, is read at ``image-size`` (64 when 0); its validation part counts as
    training. EMNIST's images, stored on their side, are turned upright.
    """
    import torchvision

    row = SETS[name]
    root, _ = _found(row, data_dir_of(settings))
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
    arrays = {"inputs": np.concatenate(images), "labels": np.concatenate(labels), "split": np.concatenate(official)}
    return from_arrays(arrays | {"classes": getattr(parts[0][0], "classes", None) or range(10)}, f"dataset = {name!r}")


def _found(row: TorchvisionSet, data_dir: Path) -> tuple[Path, list[str]]:
    """The folder of the files, ``data_dir`` or its folder named ``row.cls``, and the files that are missing there."""
    for root in (data_dir / row.cls, data_dir):
        missing = [file for file in row.files if not (root / file).exists()]
        if not missing:
            break
    return root, missing


def _download(row: TorchvisionSet, root: Path) -> None:
    """Let torchvision fetch the parts into ``root`` if some are missing; only one process does, the others wait."""
    import torchvision
    from filelock import FileLock

    with FileLock(root / f".{row.cls}.download.lock"):
        if not _found(row, root)[1]:
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
    names = ("targets", "labels", "_labels")
    return np.asarray(next(getattr(dataset, name) for name in names if hasattr(dataset, name)), dtype=np.int64)

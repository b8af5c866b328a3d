"""Published data sets: those that torchvision reads, and others in the layout of their publishers.

torchvision's files lie in ``data-dir`` (or in its folder named like torchvision's class) and may be
downloaded; of the others, which come with their natural clients, nothing is.

- ``pacs`` (Li et al., ICCV 2017), ``office10`` (Gong et al., CVPR 2012): domains of photographs,
  DOMAIN/CLASS/image.
- MNIST-M (Ganin et al., JMLR 2016): a domain of ``digit5``.
- ``fed-isic`` (FLamby, NeurIPS 2022): images of skin from six centres, eight classes, FLamby's
  split.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protofl_common.basics.files import locked
from protofl_common.config.sections import DataSettings
from protofl_common.data.door import from_arrays
from protofl_common.data.images import (
    DEFAULT_SIZE,
    data_dir_of,
    read_folder,
    read_image,
    square_rgb,
    with_images,
)
from protofl_common.data.raw import DataError, Images, Ints, RawData
from protofl_common.data.table import TableFile

ISIC_IMAGES = "ISIC_2019_Training_Input_preprocessed"
MNIST_M = (
    "mnist_m_train",
    "mnist_m_test",
    "mnist_m_train_labels.txt",
    "mnist_m_test_labels.txt",
)


class PublicSet(NamedTuple):
    """A published data set: how it is read, and what lies where."""

    read: Callable[[Path, DataSettings], RawData]
    origin: str  # where to fetch it
    folder: str  # its name in ``data-dir``, which may be that folder itself
    files: tuple[str, ...]  # what lies in it
    download: Callable[[Path], None] | None = None  # into a folder; None: a person must fetch it

    def place(self, data_dir: Path) -> tuple[Path, list[str]]:
        """Return the folder of the data set's files, and the files that are missing there.

        It is the folder of its own in ``data_dir`` if that is complete, or else ``data_dir``.
        """
        for root in (data_dir / self.folder, data_dir):
            missing = [file for file in self.files if not (root / file).exists()]
            if not missing:
                break
        return root, missing


def locate_public(name: str, settings: DataSettings) -> tuple[Path, ...]:
    """Return the files and folders of the data set ``name``; download them if they are missing.

    Nothing is downloaded without the setting ``download``, nor if the data set's publisher wants
    a person to fetch it. Files are downloaded into ``data-dir``. DataError names files that are
    missing.
    """
    row = PUBLIC[name]
    download = row.download if settings.download else None
    if download and settings.data_dir:
        Path(settings.data_dir).expanduser().mkdir(parents=True, exist_ok=True)
    hint = "; name another, or set download = true" if row.download else ""
    data_dir = data_dir_of(settings, hint=hint)
    if download and row.place(data_dir)[1]:
        # one process downloads; the others wait for the lock, and then find the files
        with locked(data_dir / f".{row.folder}.download"):
            if row.place(data_dir)[1]:
                download(data_dir)
    root, missing = row.place(data_dir)
    if missing:
        raise DataError(
            f"dataset = {name!r}: {', '.join(missing)} is "
            f"neither in data-dir = {settings.data_dir!r} nor in its folder {row.folder!r}; "
            f"fetch it from {row.origin}"
        )
    return tuple(root / file for file in row.files)


def read_public(name: str, settings: DataSettings) -> RawData:
    """Read data set ``name`` from where `locate_public` found it."""
    row = PUBLIC[name]
    root, _ = row.place(data_dir_of(settings))
    return row.read(root, settings)


def _domains(root: Path, settings: DataSettings) -> RawData:
    return read_folder(settings, [root / name for name in PUBLIC[settings.dataset].files])


def _fed_isic(root: Path, settings: DataSettings) -> RawData:
    """Read Fed-ISIC's images, and their labels, centres and split from ``train_test_split``."""
    rows = TableFile(root / "train_test_split")
    files = [root / ISIC_IMAGES / f"{name}.jpg" for name in rows.columns["image"]]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DataError(
            f"dataset = 'fed-isic': {len(missing)} images are not there, such as {missing[0]}; "
            "fetch them, or take their rows out of train_test_split"
        )
    arrays = {
        "labels": rows.columns["target"],
        "client": rows.columns["center"],
        "split": rows.columns["fold"],
    }
    return with_images(arrays, files, str(root), settings, rows.place)


def _mnist_m(root: Path, settings: DataSettings) -> RawData:
    """Read MNIST-M as its authors give it: two folders of images.

    A list of each has a line per image with its name and digit, ``00000000.png 5``.
    """
    images = []
    labels = []
    split = []
    # part 0 is for training, 1 for testing, as in a column ``split``
    for part, (folder, listed) in enumerate(zip(MNIST_M[:2], MNIST_M[2:], strict=True)):
        for line in (root / listed).read_text().splitlines():
            name, label = line.split()
            images.append(read_image(root / folder / name, 32))
            labels.append(int(label))
            split.append(part)
    arrays = {"inputs": np.stack(images), "labels": labels, "split": split, "classes": range(10)}
    return from_arrays(arrays, str(root))


# -- torchvision
Pieces = Sequence[dict[str, Any]]
"""Arguments of a class of torchvision for each piece: the training part's, last the test part."""


def _torchvision(
    cls: str, *files: str, pieces: Pieces = ({"train": True}, {"train": False})
) -> PublicSet:
    """Describe a data set that the class ``torchvision.datasets.CLS`` reads and downloads."""
    return PublicSet(
        read=partial(_decoded, cls, pieces),
        origin="its publisher, or set download = true",
        folder=cls,
        files=files,
        download=partial(_download, cls, pieces),
    )


def _decoded(cls: str, pieces: Pieces, root: Path, settings: DataSettings) -> RawData:
    """Decode a data set of torchvision: its training part first, then its test part.

    ``cls`` is the name of torchvision's class, which reads the files in the folder ``root``.
    DataError if it cannot.
    """
    import torchvision

    open_piece = getattr(torchvision.datasets, cls)
    try:
        opened = [open_piece(str(root), **arguments) for arguments in pieces]
        images = [_images(piece, settings.image_size or DEFAULT_SIZE) for piece in opened]
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        raise DataError(
            f"dataset = {settings.dataset!r}: torchvision cannot read {cls} in {root} ({error})"
        ) from error
    labels = np.concatenate([_labels(piece) for piece in opened])
    test_begins = len(labels) - len(images[-1])  # the last piece is the test part
    arrays = {
        "inputs": np.concatenate(images),
        "labels": labels,
        "split": np.arange(len(labels)) >= test_begins,
        "classes": getattr(opened[0], "classes", None) or range(10),  # digits have no names
    }
    return from_arrays(arrays, f"torchvision's {cls}")


def _download(cls: str, pieces: Pieces, root: Path) -> None:
    """Let torchvision download a data set into the folder ``root``; DataError if it fails."""
    import torchvision

    try:
        for arguments in pieces:
            getattr(torchvision.datasets, cls)(str(root), download=True, **arguments)
    except (RuntimeError, OSError) as error:
        raise DataError(f"download = true: torchvision could not fetch {cls} ({error})") from error


def _images(dataset: Any, size: int) -> Images:
    """Return the images of a data set of torchvision, uint8 [N, channels, H, W].

    The data set holds them as [N, H, W], [N, H, W, 3] or [N, 3, H, W]; if it reads files instead,
    these are stretched to ``size``×``size``.
    """
    if not hasattr(dataset, "data"):
        return np.stack([square_rgb(image, size) for image, _ in dataset])
    pixels = np.asarray(dataset.data)
    if pixels.ndim == 3:  # grey
        return pixels[:, None]
    if pixels.shape[-1] == 3:
        return pixels.transpose(0, 3, 1, 2)
    return pixels


def _labels(dataset: Any) -> Ints:
    """Return the labels of a data set of torchvision, int64 [N]."""
    names = ("targets", "labels", "_labels")  # its classes do not call them alike
    labels = next(getattr(dataset, name) for name in names if hasattr(dataset, name))
    return np.asarray(labels, dtype=np.int64)


_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_SPLITS: Pieces = ({"split": "train"}, {"split": "test"})
PUBLIC: dict[str, PublicSet] = {
    "mnist": _torchvision("MNIST", *(f"MNIST/raw/{file}" for file in _IDX)),
    "fashion-mnist": _torchvision("FashionMNIST", *(f"FashionMNIST/raw/{file}" for file in _IDX)),
    "usps": _torchvision("USPS", "usps.bz2", "usps.t.bz2"),
    "svhn": _torchvision("SVHN", "train_32x32.mat", "test_32x32.mat", pieces=_SPLITS),
    "cifar10": _torchvision("CIFAR10", "cifar-10-batches-py"),
    "cifar100": _torchvision("CIFAR100", "cifar-100-python"),
    "flowers102": _torchvision(
        "Flowers102",
        "flowers-102",
        pieces=({"split": "train"}, {"split": "val"}, {"split": "test"}),
    ),
    "mnist-m": PublicSet(_mnist_m, origin="its authors", folder="mnist_m", files=MNIST_M),
    "pacs": PublicSet(
        _domains,
        origin="DomainBed",
        folder="PACS",
        files=("art_painting", "cartoon", "photo", "sketch"),
    ),
    "office10": PublicSet(
        _domains,
        origin="Office-Caltech-10",
        folder="office10",
        files=("amazon", "caltech", "dslr", "webcam"),
    ),
    "fed-isic": PublicSet(
        _fed_isic,
        origin="github.com/owkin/FLamby",
        folder="fed_isic2019",
        files=("train_test_split", ISIC_IMAGES),
    ),
}

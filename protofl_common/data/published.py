"""Published data sets: those that torchvision reads, and others in the layout in which they are published.

torchvision's files lie in ``data-dir`` (or in its folder named like torchvision's class) and may be downloaded; of the
others, which come with their natural clients, nothing is.

- ``pacs`` (Li et al., ICCV 2017), ``office10`` (Gong et al., CVPR 2012): domains of photographs, DOMAIN/CLASS/image.
- ``tiny-imagenet``: 200 classes, 64×64; its validation part is the test part, whose own has no labels.
- ``fed-isic`` (FLamby, NeurIPS 2022): images of skin from six centres, eight classes, FLamby's split.
- ``fed-heart`` (FLamby): four hospitals. As there, without slope, ca, thal and patients with gaps, who stay where
  ``impute`` is set; cp and restecg are categories; sick is whose num is above 0. The split is made here.
- ``har`` (Anguita et al., ESANN 2013): nine signals of 128 steps, six activities, thirty people.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protofl_common.basics.files import locked
from protofl_common.config.sections import DataSettings
from protofl_common.data.images import DEFAULT_SIZE, data_dir_of, image_files, read_folder, read_images, square_rgb
from protofl_common.data.raw import DataError, Images, Ints, RawData, from_arrays
from protofl_common.data.table import Rows, read_columns

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
HEART_FILES = tuple(f"processed.{name}.data" for name in HOSPITALS)
HEART = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"]
NOT_USED = ["slope", "ca", "thal"]
ISIC_IMAGES, PARTS = "ISIC_2019_Training_Input_preprocessed", ("train", "test")
HEART_INPUTS = ("age", "sex", "cp:1|2|3|4", *HEART[3:6], "restecg:0|1|2", *HEART[7:10])
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")


class PublicSet(NamedTuple):
    read: Callable[[Path, DataSettings], RawData]
    origin: str  # where to fetch it
    folder: str  # its name in ``data-dir``, which may be that folder itself
    files: tuple[str, ...]  # what lies in it
    classes: int = 0  # their number where it is known without reading; 0 where the data decide
    download: Callable[[Path], None] | None = None  # into a folder; None: a person must fetch it

    def place(self, data_dir: Path) -> tuple[Path, list[str]]:
        """Return where the files are, in ``data_dir`` or its ``folder``, and those that are missing there."""
        for root in (data_dir / self.folder, data_dir):
            if not (missing := [file for file in self.files if not (root / file).exists()]):
                break
        return root, missing


def locate_public(name: str, settings: DataSettings) -> tuple[Path, ...]:
    """The files and folders of data set ``name``, with ``download`` fetched first; DataError for missing ones."""
    row = PUBLIC[name]
    download = row.download if settings.download else None
    if download and settings.data_dir:
        Path(settings.data_dir).expanduser().mkdir(parents=True, exist_ok=True)
    data_dir = data_dir_of(settings, hint="; name another, or set download = true" if row.download else "")
    if download and row.place(data_dir)[1]:
        with locked(data_dir / f".{row.folder}.download"):  # only one process downloads, the others wait
            if row.place(data_dir)[1]:
                download(data_dir)
    root, missing = row.place(data_dir)
    if missing:
        where = f"neither in data-dir = {settings.data_dir!r} nor in its folder {row.folder!r}"
        raise DataError(f"dataset = {name!r}: {', '.join(missing)} is {where}; fetch it from {row.origin}")
    return tuple(root / file for file in row.files)


def read_public(name: str, settings: DataSettings) -> RawData:
    return PUBLIC[name].read(PUBLIC[name].place(data_dir_of(settings))[0], settings)


def _domains(root: Path, settings: DataSettings) -> RawData:
    return read_folder(settings, [root / name for name in PUBLIC[settings.dataset].files])


def _tiny_imagenet(root: Path, settings: DataSettings) -> RawData:
    marked = [line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines()]
    samples = [(file, file.parents[1].name, "train") for file in image_files(root / "train")]
    samples += [(root / "val" / "images" / line[0], line[1], "test") for line in marked]
    files, labels, split = zip(*samples, strict=True)
    return from_arrays({"inputs": read_images(files, settings), "labels": labels, "split": split}, str(root))


def _fed_isic(root: Path, settings: DataSettings) -> RawData:
    rows = Rows(root / "train_test_split")
    files = [root / ISIC_IMAGES / f"{name}.jpg" for name in rows.columns["image"]]
    if missing := [file for file in files if not file.is_file()]:
        cure = "fetch them, or take their rows out of train_test_split"
        raise DataError(f"dataset = 'fed-isic': {len(missing)} images are not there, such as {missing[0]}; {cure}")
    wanted = {"labels": "target", "client": "center", "split": "fold"}
    arrays = {key: rows.columns[name] for key, name in wanted.items()} | {"inputs": read_images(files, settings)}
    return from_arrays(arrays, str(root), place=rows.place)


def _fed_heart(root: Path, settings: DataSettings) -> RawData:
    tables = [Rows(root / file, [*HEART, *NOT_USED, "num"]).columns.values() for file in HEART_FILES]
    patients = [(*row, name) for name, table in zip(HOSPITALS, tables, strict=True) for row in zip(*table, strict=True)]
    used = [row for row in patients if settings.impute != "none" or "?" not in row[: len(HEART)]]
    columns = dict(zip((*HEART, *NOT_USED, "num", "client"), zip(*used, strict=True), strict=True))
    inputs = read_columns(columns, HEART_INPUTS, str(root), "patient {}".format, gaps=True)
    labels = ["sick" if float(num) > 0 else "healthy" for num in columns["num"]]
    return from_arrays({"inputs": inputs, "labels": labels, "client": columns["client"]}, str(root), gaps=True)


def _har(root: Path, settings: DataSettings) -> RawData:
    def column(name: str) -> Any:
        files = [root / part / f"{name}_{part}.txt" for part in PARTS]
        return [np.loadtxt(file, dtype=np.float32, ndmin=2) for file in files]

    signals = [column(f"Inertial Signals/{name}") for name in SIGNALS]
    labels, people = column("y"), column("subject")
    names = [line.split()[1] for line in (root / "activity_labels.txt").read_text().splitlines()]
    arrays: dict[str, Any] = {
        "inputs": np.stack([np.concatenate(parts) for parts in signals], axis=1),
        "labels": np.concatenate(labels)[:, 0].astype(np.int64) - 1,
        "client": [f"{int(person):02d}" for (person,) in np.concatenate(people)],
        "split": np.repeat((0, 1), [len(part) for part in labels]),
    }
    return from_arrays(arrays | {"classes": names}, str(root))


# -- torchvision
Pieces = tuple[dict[str, Any], ...]  # of a class of torchvision, for each piece of a part


def _torchvision(
    cls: str, *files: str, classes: int = 10, train: Pieces = ({"train": True},), test: Pieces = ({"train": False},)
) -> PublicSet:
    read, download = partial(_decoded, cls, (train, test)), partial(_downloaded, cls, (*train, *test))
    return PublicSet(read, "its publisher, or set download = true", cls, files, classes, download)


def _decoded(cls: str, parts: tuple[Pieces, Pieces], root: Path, settings: DataSettings) -> RawData:
    """Decode a data set of torchvision: official training part first, then the official test part."""
    import torchvision

    pieces = [(arguments, official) for official, part in enumerate(parts) for arguments in part]
    try:
        read = [getattr(torchvision.datasets, cls)(str(root), **arguments) for arguments, _ in pieces]
        images = [_images(dataset, settings.image_size or DEFAULT_SIZE) for dataset in read]
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        raise DataError(f"dataset = {settings.dataset!r}: torchvision cannot read {cls} in {root} ({error})") from error
    labels = [_labels(dataset) for dataset in read]
    official = [np.full(len(part), flag, np.uint8) for part, (_, flag) in zip(labels, pieces, strict=True)]
    arrays = {"inputs": np.concatenate(images), "labels": np.concatenate(labels), "split": np.concatenate(official)}
    return from_arrays(arrays | {"classes": getattr(read[0], "classes", None) or range(10)}, f"torchvision's {cls}")


def _downloaded(cls: str, parts: Pieces, root: Path) -> None:
    import torchvision

    try:
        for arguments in parts:
            getattr(torchvision.datasets, cls)(str(root), download=True, **arguments)
    except (RuntimeError, OSError) as error:
        raise DataError(f"download = true: torchvision could not fetch {cls} ({error})") from error


def _images(dataset: Any, size: int) -> Images:
    """uint8 [N, channels, H, W] from torchvision's [N, H, W], [N, H, W, 3] or [N, 3, H, W], or files of any size."""
    if not hasattr(dataset, "data"):
        return np.stack([square_rgb(image, size) for image, _ in dataset])
    pixels = np.asarray(dataset.data)
    if type(dataset).__name__ == "EMNIST":  # whose images lie on their side
        pixels = pixels.transpose(0, 2, 1)
    if pixels.ndim == 3:
        return pixels[:, None]
    return pixels.transpose(0, 3, 1, 2) if pixels.shape[-1] == 3 else pixels


def _labels(dataset: Any) -> Ints:
    names = ("targets", "labels", "_labels")
    return np.asarray(next(getattr(dataset, name) for name in names if hasattr(dataset, name)), dtype=np.int64)


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_LIKE_MNIST = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "kmnist": "KMNIST"}
_EMNIST = tuple(f"EMNIST/raw/emnist-balanced-{file.replace('t10k', 'test')}" for file in _IDX)
_BALANCED: dict[str, Any] = {"split": "balanced"}
_TRAIN, _VALIDATION, _TEST = {"split": "train"}, {"split": "val"}, {"split": "test"}
OF_TORCHVISION: dict[str, PublicSet] = {
    **{name: _torchvision(cls, *(f"{cls}/raw/{file}" for file in _IDX)) for name, cls in _LIKE_MNIST.items()},
    "emnist": _torchvision(
        "EMNIST", *_EMNIST, classes=47, train=(_BALANCED | {"train": True},), test=(_BALANCED | {"train": False},)
    ),
    "usps": _torchvision("USPS", "usps.bz2", "usps.t.bz2"),
    "svhn": _torchvision("SVHN", "train_32x32.mat", "test_32x32.mat", train=(_TRAIN,), test=(_TEST,)),
    "cifar10": _torchvision("CIFAR10", "cifar-10-batches-py"),
    "cifar100": _torchvision("CIFAR100", "cifar-100-python", classes=100),
    "flowers102": _torchvision("Flowers102", "flowers-102", classes=102, train=(_TRAIN, _VALIDATION), test=(_TEST,)),
}
OTHERS: dict[str, PublicSet] = {
    "pacs": PublicSet(_domains, "DomainBed", "PACS", ("art_painting", "cartoon", "photo", "sketch")),
    "office10": PublicSet(_domains, "Office-Caltech-10", "office10", ("amazon", "caltech", "dslr", "webcam")),
    "tiny-imagenet": PublicSet(_tiny_imagenet, "cs231n.stanford.edu", "tiny-imagenet-200", ("train", "val")),
    "fed-isic": PublicSet(_fed_isic, "github.com/owkin/FLamby", "fed_isic2019", ("train_test_split", ISIC_IMAGES)),
    "fed-heart": PublicSet(_fed_heart, "archive.ics.uci.edu/dataset/45", "heart+disease", HEART_FILES),
    "har": PublicSet(_har, "archive.ics.uci.edu/dataset/240", "UCI HAR Dataset", ("activity_labels.txt", *PARTS)),
}
PUBLIC = OF_TORCHVISION | OTHERS

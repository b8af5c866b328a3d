"""Public data sets in the layout in which they are published, with their natural clients; nothing is downloaded.

- ``pacs`` (Li et al., ICCV 2017), ``office10`` (Gong et al., CVPR 2012): domains of photographs, DOMAIN/CLASS/image.
- ``tiny-imagenet``: 200 classes, 64×64; its validation part is the test part, whose own has no labels.
- ``fed-isic`` (FLamby, NeurIPS 2022): images of skin from six centres, eight classes, FLamby's split.
- ``fed-heart`` (FLamby): four hospitals. As there, without slope, ca, thal and patients with gaps, who stay where
  ``impute`` is set; cp and restecg are categories; sick is whose num is above 0. The split is made here.
- ``har`` (Anguita et al., ESANN 2013): nine signals of 128 steps, six activities, thirty people.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protofl_common.basics.files import cache_folder
from protofl_common.config.sections import DataSettings
from protofl_common.data.images import DEFAULT_SIZE, data_dir_of, image_files, read_folder, read_images
from protofl_common.data.raw import DataError, Images, RawData, from_arrays
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


def locate_public(settings: DataSettings) -> tuple[Path, ...]:
    """The files and folders of the data set; DataError says which are missing, and where they are from."""
    row, data_dir = PUBLIC[settings.dataset], data_dir_of(settings)
    for root in (data_dir / row.folder, data_dir):
        if not (absent := [name for name in row.files if not (root / name).exists()]):
            return tuple(root / name for name in row.files)
    where = f"neither in data-dir = {settings.data_dir!r} nor in its folder {row.folder!r}; fetch it from {row.origin}"
    raise DataError(f"dataset = {settings.dataset!r}: {', '.join(absent)} is {where}")


def read_public(settings: DataSettings) -> RawData:
    return PUBLIC[settings.dataset].read(locate_public(settings)[0].parent, settings)


def _domains(root: Path, settings: DataSettings) -> RawData:
    return read_folder(settings, [root / name for name in PUBLIC[settings.dataset].files])


def _images(files: Sequence[Path], settings: DataSettings) -> Images:
    return read_images(files, settings.image_size or DEFAULT_SIZE, cache_folder(settings.cache_dir))


def _tiny_imagenet(root: Path, settings: DataSettings) -> RawData:
    marked = [line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines()]
    samples = [(file, file.parents[1].name, "train") for file in image_files(root / "train")]
    samples += [(root / "val" / "images" / line[0], line[1], "test") for line in marked]
    files, labels, split = zip(*samples, strict=True)
    return from_arrays({"inputs": _images(files, settings), "labels": labels, "split": split}, str(root))


def _fed_isic(root: Path, settings: DataSettings) -> RawData:
    rows = Rows(root / "train_test_split")
    files = [root / ISIC_IMAGES / f"{name}.jpg" for name in rows.columns["image"]]
    if missing := [file for file in files if not file.is_file()]:
        cure = "fetch them, or take their rows out of train_test_split"
        raise DataError(f"dataset = 'fed-isic': {len(missing)} images are not there, such as {missing[0]}; {cure}")
    wanted = {"labels": "target", "client": "center", "split": "fold"}
    arrays = {key: rows.columns[name] for key, name in wanted.items()} | {"inputs": _images(files, settings)}
    return from_arrays(arrays, str(root), place=rows.place)


def _fed_heart(root: Path, settings: DataSettings) -> RawData:
    tables = {
        name: Rows(root / f"processed.{name}.data", [*HEART, *NOT_USED, "num"]).columns.values() for name in HOSPITALS
    }
    patients = [(*row, name) for name, table in tables.items() for row in zip(*table, strict=True)]
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


PUBLIC: dict[str, PublicSet] = {
    "pacs": PublicSet(_domains, "DomainBed", "PACS", ("art_painting", "cartoon", "photo", "sketch")),
    "office10": PublicSet(_domains, "Office-Caltech-10", "office10", ("amazon", "caltech", "dslr", "webcam")),
    "tiny-imagenet": PublicSet(_tiny_imagenet, "cs231n.stanford.edu", "tiny-imagenet-200", ("train", "val")),
    "fed-isic": PublicSet(_fed_isic, "github.com/owkin/FLamby", "fed_isic2019", ("train_test_split", ISIC_IMAGES)),
    "fed-heart": PublicSet(_fed_heart, "archive.ics.uci.edu/dataset/45", "heart+disease", HEART_FILES),
    "har": PublicSet(_har, "archive.ics.uci.edu/dataset/240", "UCI HAR Dataset", ("activity_labels.txt", *PARTS)),
}

"""Data sets that are not in the catalog: ``dataset = "module:function"``, and ``"hf:NAME"`` of Hugging Face."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from protofl_common.basics.files import cache_folder, make_private
from protofl_common.config.python_names import load
from protofl_common.config.sections import DataSettings
from protofl_common.data.files import tokens
from protofl_common.data.images import DEFAULT_SIZE, data_dir_of, square_rgb
from protofl_common.data.raw import KEYS, DataError, RawData, from_arrays


def read_python(name: str, settings: DataSettings) -> RawData:
    """Data from a function of the user's: ``dataset = "module:function"``.

    It is called as ``function(data_dir)`` with the setting ``data-dir`` ("" where that is not set) and returns a
    dictionary of arrays as `from_arrays` describes, an object with attributes of these names, or a `RawData`. It is
    called once on a machine: the result is in the cache until its file, or a file in ``data-dir``, changes.

    SettingsError when there is no such function. DataError when it fails, or returns something else.
    """
    function = load(name, "dataset")
    try:
        found = function(settings.data_dir)
    except Exception as error:  # a user's function may raise anything
        raise DataError(f"dataset = {name!r}: it failed ({type(error).__name__}: {error})") from error
    if isinstance(found, RawData):
        names = np.array(found.domain_names or [""])
        found = {"inputs": found.inputs, "labels": found.labels, "split": found.official, "classes": found.classes} | (
            {"client": names[found.domains]} if found.domain_names else {}
        )
    if not isinstance(found, Mapping):
        found = {key: getattr(found, key) for key in KEYS if hasattr(found, key)} or found
    if not isinstance(found, Mapping):
        raise DataError(f"dataset = {name!r}: it returned {type(found).__name__}, not a dictionary of arrays")
    return from_arrays(found, f"dataset = {name!r}", settings.classes)


def locate_python(name: str, settings: DataSettings) -> tuple[Path, ...]:
    """The file of the function, and ``data-dir``."""
    folder = (Path(settings.data_dir).expanduser().absolute(),) if settings.data_dir else ()
    try:
        return (Path(inspect.getfile(inspect.unwrap(load(name, "dataset")))), *folder)
    except TypeError:  # made by no file of Python: a class's instance, a builtin
        return folder


def locate_hugging_face(name: str, settings: DataSettings) -> tuple[Path, ...]:
    """The folder NAME in ``data-dir``; nothing where the data set is in the hub's cache."""
    return (_folder(name, settings),) if settings.data_dir else ()


def read_hugging_face(name: str, settings: DataSettings) -> RawData:
    """``dataset = "hf:NAME"``: the folder NAME in ``data-dir``, or else the hub's data set of that name.

    The folder is one that ``save_to_disk`` wrote, or that ``load_dataset`` reads. From the hub's cache without the
    network, unless ``download = true``. The parts ``test`` and ``validation`` are that, all others for training. The
    column ``label`` (or the only one of ``ClassLabel``) has the labels, ``client`` or ``domain`` the clients; the
    inputs are the column of images, else the columns of text, else those of numbers.

    DataError when the package is missing, or the data set cannot be read or has no such columns.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"dataset = {name!r}: needs the package datasets; pip install 'protofl[hf]'") from error
    make_private(cache := cache_folder(settings.cache_dir))
    with TemporaryDirectory(dir=cache) as scratch:
        return _from_hugging_face(datasets, name, settings, scratch)


def _from_hugging_face(datasets: Any, name: str, settings: DataSettings, scratch: str) -> RawData:
    """Read the data set; copies of the user's data go to ``scratch``, not to the cache of the package."""
    try:
        opened = _opened(datasets, name, settings, scratch)
        parts = dict(opened) if isinstance(opened, Mapping) else {"train": opened}
        whole = datasets.concatenate_datasets(list(parts.values()))
    except Exception as error:  # the package raises many kinds
        hint = "" if settings.data_dir or settings.download else "; set data-dir to a folder that has it, or download"
        raise DataError(f"dataset = {name!r}: cannot be read ({type(error).__name__}: {error}){hint}") from error
    label = _label_column(datasets, whole, name)
    arrays: dict[str, Any] = {
        "inputs": _inputs(datasets, whole, {label, "client", "domain"}, name, settings),
        "labels": np.array(whole[label][:]),
        "split": np.repeat(
            [part if part in ("test", "validation") else "train" for part in parts],
            [len(part) for part in parts.values()],
        ),
    }
    if isinstance(whole.features[label], datasets.ClassLabel):
        arrays["classes"] = whole.features[label].names
    for column in {"client", "domain"} & set(whole.column_names):
        arrays["client"] = np.array(whole[column][:])
    return from_arrays(arrays, f"dataset = {name!r}", settings.classes)


def _folder(name: str, settings: DataSettings) -> Path:
    inside = Path(name.removeprefix("hf:"))
    folder = data_dir_of(settings) / inside
    if inside.is_absolute() or ".." in inside.parts or not folder.is_dir():
        raise DataError(f"dataset = {name!r}: there is no folder {name.removeprefix('hf:')!r} in data-dir")
    return folder


def _opened(datasets: Any, name: str, settings: DataSettings, scratch: str) -> Any:
    if settings.data_dir:
        folder = _folder(name, settings)
        saved = any((folder / file).exists() for file in ("dataset_dict.json", "state.json"))
        return datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder), cache_dir=scratch)
    before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, not settings.download
    try:
        return datasets.load_dataset(name.removeprefix("hf:"))
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _label_column(datasets: Any, whole: Any, name: str) -> str:
    if "label" in whole.column_names:
        return "label"
    labels: list[str] = [column for column, kind in whole.features.items() if isinstance(kind, datasets.ClassLabel)]
    if len(labels) != 1:
        raise DataError(f"dataset = {name!r}: has no column 'label'; its columns: {', '.join(whole.column_names)}")
    return labels[0]


def _inputs(datasets: Any, whole: Any, others: set[str], name: str, settings: DataSettings) -> Any:
    kinds = {column: kind for column, kind in whole.features.items() if column not in others}
    images = [column for column, kind in kinds.items() if isinstance(kind, datasets.Image)]
    if images:
        size = settings.image_size or DEFAULT_SIZE
        try:
            return np.stack([square_rgb(image, size) for image in whole[images[0]]])
        except ValueError as error:
            raise DataError(f"dataset = {name!r}: an image cannot be used: {error}") from error
    texts = [column for column, kind in kinds.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    if texts:
        joined = zip(*(whole[column][:] for column in texts), strict=True)
        return tokens((" ".join(parts) for parts in joined), settings.text_length)
    try:
        columns = [np.asarray(whole[column][:], dtype=np.float32).reshape(len(whole), -1) for column in kinds]
        return np.concatenate(columns, axis=1)
    except ValueError as error:
        raise DataError(f"dataset = {name!r}: columns {', '.join(kinds)} are no numbers ({error})") from error

"""Decoded data sets on disk: read once per machine, then mapped into every client process.

A data set is a folder ``DATASET-KEY`` in the cache, with ``inputs.npy``, ``labels.npy``,
``domains.npy``, ``official.npy`` (see `RawData`) and ``meta.json``. Its key covers everything that
its content depends on. One process at a time builds it, under a temporary name; a damaged entry is
built anew.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from protofl_common.basics.files import cache_folder, digest, locked, replacing
from protofl_common.basics.text import as_file_name
from protofl_common.config.datasets import is_own
from protofl_common.config.sections import DataSettings
from protofl_common.data.door import doubts, without_copies
from protofl_common.data.raw import DataError, RawData, are_images, resized, statistics
from protofl_common.data.sources import source_of
from protofl_common.tasks import kind_of, task_of

T = TypeVar("T")
FORMAT = 14
"""Raise it when the content of the files, or of a data set that a source delivers, changes."""
MADE_BY = ("pillow", "matplotlib", "scikit-learn")  # packages that decode, resize or bring images
ARRAYS = ("inputs", "labels", "domains", "official", "contents")
NAMES = ("classes", "domain_names", "columns", "notes")


@dataclass(frozen=True, eq=False)
class StoredData(RawData):
    """Raw data opened from the cache, memory-mapped and read-only; equal only to itself."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    has_uneven_classes: bool = False  # a class has more than twice another's samples


def open_data(settings: DataSettings) -> StoredData:
    """Open the data set of ``settings`` from the cache; if it is not there, decode and store it."""
    folder = cache_folder(settings.cache_dir) / data_key(settings)
    return cached(folder, lambda: _opened(folder), lambda: _build(folder, settings))


def data_if_cached(settings: DataSettings) -> StoredData | None:
    """Open the data set that clients divide, if the cache has it; never decode anything.

    None if the cache lacks it, and for sites with data of their own.
    """
    if settings.partition == "own":
        return None
    return _opened(cache_folder(settings.cache_dir) / data_key(settings))


def cached(entry: Path, open_it: Callable[[], T | None], build: Callable[[], T | None]) -> T:
    """Open the cache ``entry`` by ``open_it``; if that returns None, ``build`` it.

    One process at a time builds; the others wait, and open what it has built. DataError if a file
    of the data cannot be read, the cache cannot be written, or the entry cannot be opened
    afterwards.
    """
    opened = open_it()
    if opened is None:
        try:
            with locked(entry):
                opened = open_it()  # another process may have built it meanwhile
                if opened is None:
                    opened = build()
        except OSError as error:
            if error.filename and not Path(error.filename).is_relative_to(entry.parent):
                raise DataError(f"{error.filename} cannot be read ({error.strerror})") from error
            where = f"cache-dir: {entry.parent} cannot be written ({error})"
            raise DataError(f"{where}; set cache-dir to a folder with room") from error
    if opened is None:
        what = "cannot be read back after writing it"
        raise DataError(f"cache-dir: {entry} {what}; is the disk full?")
    return opened


@lru_cache(maxsize=64)
def data_key(settings: DataSettings) -> str:
    """Return the name of a data set's cache entry, which digests all that its content depends on.

    That is the settings that shape samples, the source files, and the packages that decode. Keys
    are remembered, so a process does not notice files that change while it runs.
    """
    made_by = [version(package) for package in MADE_BY]
    # whether gaps are let in; what fills them is up to each client
    lets_gaps_in = settings.impute != "none"
    table = (settings.columns, settings.drop, settings.one_hot, lets_gaps_in)
    images = (settings.image_size, settings.max_unreadable)
    labels = (settings.classes, settings.task, settings.label_map, settings.uncertain)
    shaping = (*images, settings.text_length, *labels, *table)
    key = digest(FORMAT, settings.dataset, shaping, _listings(settings), made_by)
    return f"{as_file_name(settings.dataset)}-{key}"


def files_key(settings: DataSettings) -> str:
    """Return 16 hexadecimal digits for the sizes and times of change of a data set's source files.

    Wherever the files lie; who has edited one of them has another data set.
    """
    return digest(*[(size, time) for files in _listings(settings) for _, size, time in files])


def _listings(settings: DataSettings) -> list[list[tuple[str, int, int]]]:
    """Return for each source of a data set the name, size and time of change of all its files."""
    return [_listing(path) for path in source_of(settings.dataset).locate(settings)]


def _listing(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of a file, or of all files in and below a folder.

    Links to folders are followed.
    """
    files = [path]  # a folder is dropped below, and `os.walk` yields nothing for a file
    visited = set()
    for folder, subfolders, names in os.walk(path, followlinks=True):
        stat = os.stat(folder)
        if (stat.st_dev, stat.st_ino) in visited:  # a link leads back: do not go round for ever
            subfolders.clear()  # so `os.walk` goes no deeper here
            continue
        visited.add((stat.st_dev, stat.st_ino))
        subfolders.sort()  # os.walk goes down in this order, which the digest needs to be fixed
        files += [Path(folder, name) for name in sorted(names)]
    listing = []
    for file in files:
        if file.is_file():
            stat = file.stat()
            listing.append((str(file), stat.st_size, stat.st_mtime_ns))
    return listing


def _opened(folder: Path) -> StoredData | None:
    """Open a cache entry; None if one of its files is missing or damaged."""
    names = ["meta.json"] + [f"{name}.npy" for name in ARRAYS]
    try:
        stats = [os.stat(f"{folder}/{name}") for name in names]
    except OSError:
        return None
    return _opened_in_state(folder, tuple((stat.st_mtime_ns, stat.st_size) for stat in stats))


@lru_cache(maxsize=8)
def _opened_in_state(folder: Path, state: tuple[tuple[int, int], ...]) -> StoredData | None:
    """Open a cache entry whose files have these times and sizes; None if one is damaged.

    Results are cached, so that a process that simulates many clients maps the arrays once.
    ``state`` serves as a key of that cache alone: files that have changed are opened anew.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        if any(len(array) != meta["samples"] for array in arrays.values()):  # cut off
            return None
        tuples: dict[str, Any] = {name: tuple(meta[name]) for name in (*NAMES, "mean", "std")}
        task = task_of(tuples["classes"], kind_of(arrays["labels"]))
        return StoredData(
            **arrays,
            **tuples,
            by_client=meta["by_client"],
            has_uneven_classes=task.are_uneven(arrays["labels"]),
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _build(folder: Path, settings: DataSettings) -> StoredData | None:
    """Read and decode the data set, write it to the cache, and open it there; None if that fails.

    Lines for the data's owner that are printed meanwhile are stored with them, as who opens the
    data from the cache would not learn of them.
    """
    with doubts() as notes:
        raw = source_of(settings.dataset).read(settings)
        if is_own(settings.dataset):
            raw = without_copies(raw, settings.data_dir or settings.dataset)
    raw = replace(raw, notes=tuple(notes))
    digests = raw.contents
    if not len(digests):  # there are none: each sample has an empty one
        digests = np.zeros((len(raw.labels), 0), np.uint8)
    raw = replace(raw, inputs=resized(raw.inputs, settings.image_size), contents=digests)
    # images are scaled by all, numbers by those for training alone
    inputs_to_scale_by = raw.inputs
    if not are_images(raw.inputs):
        is_for_training = raw.official == 0
        inputs_to_scale_by = raw.inputs[is_for_training]
    mean, std = statistics(inputs_to_scale_by)
    meta: dict[str, Any] = {"samples": len(raw.labels)}
    for name in (*NAMES, "by_client"):
        meta[name] = getattr(raw, name)
    meta |= {"mean": mean, "std": std}
    with replacing(folder, private=True) as beside:
        beside.mkdir()
        for name in ARRAYS:
            np.save(beside / f"{name}.npy", getattr(raw, name))
        (beside / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return _opened(folder)

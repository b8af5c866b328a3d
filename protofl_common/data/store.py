"""Decoded data sets on disk: read once per machine, then opened memory-mapped by every client process.

A data set is a folder ``DATASET-KEY`` in the cache, with ``inputs.npy``, ``labels.npy``, ``domains.npy``,
``official.npy`` (see `RawData`) and ``meta.json``. Its key covers everything that its content depends on. One process
at a time builds it, under a temporary name; a damaged entry is built anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from protofl_common.basics import files
from protofl_common.basics.files import cache_folder, digest, replacing
from protofl_common.basics.text import as_file_name
from protofl_common.config.sections import DataSettings
from protofl_common.data.inputs import are_images, resized, statistics
from protofl_common.data.raw import DataError, RawData
from protofl_common.data.sources import source_of

FORMAT = 4
"""Raise it when the content of the files, or of a data set that a source delivers, changes."""
MADE_BY = ("pillow", "matplotlib", "scikit-learn")
"""Packages whose version the images depend on: they decode and resize, and the embedded data sets are made of them."""
ARRAYS = ("inputs", "labels", "domains", "official")


@dataclass(frozen=True)
class StoredData(RawData):
    """Raw data opened from the cache, their arrays memory-mapped and read-only."""

    key: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def open_data(settings: DataSettings) -> StoredData:
    """The data set of ``settings``, from the cache; reads and decodes it first where the cache has none.

    DataError when the data cannot be read.
    """
    folder = cache_root(settings) / data_key(settings)
    data = _opened(folder)
    if data is None:
        with locked(folder):
            data = _opened(folder) or _built(folder, settings)
    return data


def data_if_cached(settings: DataSettings) -> StoredData | None:
    """The data set of ``settings`` if the cache has it, else None; never reads or decodes it.

    DataError when the files that it would be decoded from are missing.
    """
    return _opened(cache_root(settings) / data_key(settings))


def cache_root(settings: DataSettings) -> Path:
    """``cache-dir``, else ``protofl`` in the user's cache folder; `locked` makes it."""
    return cache_folder(settings.cache_dir)


@contextmanager
def locked(entry: Path) -> Iterator[None]:
    """Lock a cache entry while it is built, as `files.locked`; DataError when the cache cannot be written."""
    try:
        with files.locked(entry):
            yield
    except OSError as error:
        raise DataError(
            f"cache-dir: {entry.parent} cannot be written ({error}); set cache-dir to a folder with room"
        ) from error


@lru_cache(maxsize=64)
def data_key(settings: DataSettings) -> str:
    """The name of the data set's cache entry.

    The files are listed once per process: a process does not notice that a folder changes while it runs.

    DataError when the files are missing.
    """
    locate = source_of(settings.dataset).locate
    listing = [_listing(path) for path in locate(settings)] if locate else []
    made_by = [version(package) for package in MADE_BY]
    shaping = (settings.image_size, settings.text_length, settings.classes)
    key = digest(FORMAT, settings.dataset, shaping, listing, made_by)
    return f"{as_file_name(settings.dataset)}-{key}"


def _listing(path: Path) -> list[tuple[str, int, int]]:
    """Path, size and time of change of ``path`` and of every file below it, sorted."""
    if path.is_file():
        return [_stamp(path, path.stat())]
    stamps: list[tuple[str, int, int]] = []
    for folder, subfolders, _ in os.walk(path, followlinks=True):
        subfolders.sort()
        with os.scandir(folder) as entries:
            stamps += sorted(_stamp(entry, entry.stat()) for entry in entries if entry.is_file())
    return stamps


def _stamp(file: os.PathLike[str], stat: os.stat_result) -> tuple[str, int, int]:
    return os.fspath(file), stat.st_size, stat.st_mtime_ns


def _opened(folder: Path) -> StoredData | None:
    """The cache entry, or None when there is none or it is damaged; opened once per process while its files stay."""
    try:
        return _mapped(folder, tuple(_stamp(file, file.stat()) for file in _files(folder)))
    except OSError:
        return None


def _files(folder: Path) -> Iterator[Path]:
    yield folder / "meta.json"
    yield from (folder / f"{name}.npy" for name in ARRAYS)


@lru_cache(maxsize=4)
def _mapped(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> StoredData | None:
    """The cache entry of which the files have these ``stamps``; None when it is damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        if any(len(array) != meta["samples"] for array in arrays.values()):
            return None
        facts: dict[str, Any] = {name: tuple(meta[name]) for name in ("classes", "domain_names", "mean", "std")}
        return StoredData(**arrays, **facts, key=folder.name)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _built(folder: Path, settings: DataSettings) -> StoredData:
    """Read the data set and write its cache entry; the caller holds the entry's lock."""
    raw = source_of(settings.dataset).read(settings)
    raw = replace(raw, inputs=resized(raw.inputs, settings.image_size))
    mean, std = statistics(raw.inputs if are_images(raw.inputs) else raw.inputs[raw.official == 0])
    meta = {"samples": len(raw.labels), "classes": raw.classes, "domain_names": raw.domain_names}
    with replacing(folder, private=True) as beside:
        beside.mkdir()
        for name in ARRAYS:
            np.save(beside / f"{name}.npy", getattr(raw, name))
        (beside / "meta.json").write_text(json.dumps(meta | {"mean": mean, "std": std}), encoding="utf-8")
    data = _opened(folder)
    if data is None:
        raise DataError(f"cache-dir: {folder} cannot be read back after writing it; is the disk full?")
    return data

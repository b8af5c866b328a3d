"""Decoded data sets on disk: read once per machine, then opened memory-mapped by every client process.

A data set is a folder ``DATASET-KEY`` in the cache, with ``inputs.npy``, ``labels.npy``, ``domains.npy``,
``official.npy`` (see `RawData`) and ``meta.json``. Its key covers everything that its content depends on. It is
built by one process at a time, under a temporary name; an entry that is damaged is built anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from glob import escape
from importlib.metadata import version
from pathlib import Path

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.inputs import are_images, resized, statistics
from protofl_common.datasets.raw import DataError, RawData
from protofl_common.datasets.sources import source_of
from protofl_common.files import make_private, remove, replacing
from protofl_common.text import as_file_name

FORMAT = 4
"""Raised whenever the content of the files, or what a source delivers, changes."""
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

    Raises
    ------
    DataError
        When the data cannot be read.
    """
    folder = cache_root(settings) / data_key(settings)
    found = _opened(folder)
    if found is None:
        with locked(folder):
            found = _opened(folder) or _built(folder, settings)
    return found


def data_if_cached(settings: DataSettings) -> StoredData | None:
    """The data set of ``settings`` if the cache has it, else None; never reads or decodes it.

    Raises
    ------
    DataError
        When the files that it would be decoded from are missing.
    """
    return _opened(cache_root(settings) / data_key(settings))


def cache_root(settings: DataSettings) -> Path:
    """``cache-dir``, else ``protofl`` in the user's cache folder; `locked` makes it."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(settings.cache_dir).expanduser().absolute() if settings.cache_dir else user_cache / "protofl"


@contextmanager
def locked(entry: Path) -> Iterator[None]:
    """Hold the lock of the cache entry ``entry`` while building it; the system frees it when its holder dies.

    What a process that was killed at it has left is removed.

    Raises
    ------
    DataError
        When the cache folder cannot be written.
    """
    from filelock import FileLock

    try:
        make_private(entry.parent)
        with FileLock(entry.with_name(f"{entry.name}.lock")):
            for leftover in entry.parent.glob(f"{escape(entry.name)}*.tmp"):
                remove(leftover)
            yield
    except OSError as error:
        raise DataError(
            f"cache-dir: {entry.parent} cannot be written ({error}); set cache-dir to a folder with room"
        ) from error


def digest(*parts: object) -> str:
    """16 hexadecimal digits that stand for ``parts`` (plain values only)."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@lru_cache(maxsize=64)
def data_key(settings: DataSettings) -> str:
    """The name of the data set's cache entry.

    The files are listed once per process: a process does not notice that a folder changes while it runs.

    Raises
    ------
    DataError
        When the files are missing.
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
    found: list[tuple[str, int, int]] = []
    for folder, subfolders, _ in os.walk(path, followlinks=True):
        subfolders.sort()
        with os.scandir(folder) as entries:
            found += sorted(_stamp(entry, entry.stat()) for entry in entries if entry.is_file())
    return found


def _stamp(file: os.PathLike[str], stat: os.stat_result) -> tuple[str, int, int]:
    return os.fspath(file), stat.st_size, stat.st_mtime_ns


def _opened(folder: Path) -> StoredData | None:
    """The cache entry, or None when there is none or it is damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        if any(len(array) != meta["samples"] for array in arrays.values()):
            return None
        return StoredData(
            **arrays,
            key=folder.name,
            classes=tuple(meta["classes"]),
            domain_names=tuple(meta["domain_names"]),
            mean=tuple(meta["mean"]),
            std=tuple(meta["std"]),
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _built(folder: Path, settings: DataSettings) -> StoredData:
    """Read the data set and write its cache entry; the caller holds the entry's lock."""
    raw = source_of(settings.dataset).read(settings)
    raw = replace(raw, inputs=resized(raw.inputs, settings.image_size))
    mean, std = statistics(raw.inputs if are_images(raw.inputs) else raw.inputs[raw.official == 0])
    meta = {
        "samples": len(raw.labels),
        "classes": raw.classes,
        "domain_names": raw.domain_names,
        "mean": mean,
        "std": std,
    }
    with replacing(folder, private=True) as beside:
        beside.mkdir()
        for name in ARRAYS:
            np.save(beside / f"{name}.npy", getattr(raw, name))
        (beside / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    found = _opened(folder)
    if found is None:
        raise DataError(f"cache-dir: {folder} cannot be read back after writing it; is the disk full?")
    return found

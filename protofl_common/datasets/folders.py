"""A user's own images: ``image-folder`` reads CLASS/image, ``domain-folder`` DOMAIN/CLASS/image.

``classes`` names the classes in label order. In an ``image-folder``, which each site may have of its own, it must name
every folder; of a ``domain-folder`` it picks those that it names.
Images may lie in folders below CLASS, too. Files whose extension is not among `EXTENSIONS`, and names that begin
with a dot, are skipped. Every image is made RGB and stretched to a square.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.decoding import read_images
from protofl_common.datasets.raw import DataError, RawData

EXTENSIONS = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
DEFAULT_SIZE = 64
"""Pixels a side when ``image-size`` is 0: photographs have no common size of their own."""


def data_dir_of(settings: DataSettings, *, hint: str = "") -> Path:
    """The folder ``data-dir``; ``hint``: what else the user may do when there is none.

    Raises
    ------
    DataError
        When it is not given or is no folder.
    """
    if not settings.data_dir:
        raise DataError(f"data-dir = '': dataset {settings.dataset!r} needs files; set data-dir to their folder{_SITE}")
    root = Path(settings.data_dir).expanduser().absolute()
    if not root.is_dir():
        where = f"data-dir = {settings.data_dir!r}"
        raise DataError(f"{where}: there is no such folder (dataset {settings.dataset!r}){hint}")
    return root


_SITE = " (on a site with a node config of its own: there)"


def locate(settings: DataSettings) -> tuple[Path]:
    """What to look at to know whether the data changed: everything in ``data-dir``."""
    return (data_dir_of(settings),)


def read_image_folder(settings: DataSettings) -> RawData:
    """CLASS/image below ``data-dir``: one kind of images, without domains."""
    root = data_dir_of(settings)
    return _read_trees(settings, root, {"": root})


def read_domain_folder(settings: DataSettings) -> RawData:
    """DOMAIN/CLASS/image below ``data-dir``: domains in the order of their sorted names."""
    root = data_dir_of(settings)
    return _read_trees(settings, root, {folder.name: folder for folder in _folders(root)})


def class_names(classes: str) -> tuple[str, ...]:
    """The names in the setting ``classes``, in label order.

    Raises
    ------
    DataError
        When a name is empty or stands twice.
    """
    names = tuple(name.strip() for name in classes.split(",")) if classes else ()
    if not are_different(names):
        raise DataError(f"classes = {classes!r}: must be different names, separated by commas")
    return names


def are_different(names: Sequence[str]) -> bool:
    """Whether no name is empty or stands twice."""
    return "" not in names and len(set(names)) == len(names)


def _read_trees(settings: DataSettings, root: Path, trees: dict[str, Path]) -> RawData:
    named = class_names(settings.classes)
    picks = named and settings.dataset == "domain-folder"
    files = [
        (file, folder.name, domain)
        for domain, (_, tree) in enumerate(sorted(trees.items()))
        for folder in _folders(tree)
        if not picks or folder.name in named
        for file in image_files(folder)
    ]
    if not files:
        layout = "DOMAIN/CLASS/image" if settings.dataset == "domain-folder" else "CLASS/image"
        raise DataError(f"data-dir = {settings.data_dir!r}: no images laid out as {layout} in {root}")
    found = {name for _, name, _ in files}
    classes = named or tuple(sorted(found))
    for file, name, _ in files:
        if name not in classes:
            raise DataError(f"classes = {settings.classes!r} does not list the folder {name!r} (of {file})")
    if picks and settings.partition != "own" and (absent := [name for name in classes if name not in found]):
        raise DataError(f"classes = {settings.classes!r}: no domain in {root} has images in a folder {absent[0]!r}")
    return RawData(
        inputs=read_images([file for file, _, _ in files], settings.image_size or DEFAULT_SIZE, settings),
        labels=np.array([classes.index(name) for _, name, _ in files], dtype=np.int64),
        domains=np.array([domain for _, _, domain in files], dtype=np.int64),
        official=np.zeros(len(files), dtype=np.uint8),
        classes=classes,
        domain_names=tuple(name for name in sorted(trees) if name),
    )


def _folders(root: Path) -> list[Path]:
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def image_files(folder: Path) -> list[Path]:
    """All images in ``folder`` and below it, by name."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in EXTENSIONS and not file.name.startswith(".") and file.is_file()
    )

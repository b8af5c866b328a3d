"""Image files, and folders of them.

Every image becomes uint8 [3, size, size], RGB and stretched to a square.
``image-folder`` reads CLASS/image, ``domain-folder`` DOMAIN/CLASS/image; images may lie in folders
below CLASS, too. Files whose extension is not among `EXTENSIONS`, and names that begin with a dot,
are skipped. ``classes`` names the classes in label order: of an ``image-folder``, which each site
may have of its own, every folder; of a ``domain-folder`` those to pick.
"""

import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np

from protofl_common.basics.files import cache_folder, make_private
from protofl_common.basics.text import with_composed_letters
from protofl_common.config.sections import DataSettings
from protofl_common.data.raw import DataError, Images, RawData, check_classes, class_names

EXTENSIONS = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
)
PART_NAMES = frozenset(
    (
        *("train", "training", "test", "testing"),
        *("val", "valid", "validation", "dev", "eval", "evaluation"),
    )
)
"""Names of folders that are no classes, and no domains."""
DEFAULT_SIZE = 64
"""Pixels a side when ``image-size`` is 0: photographs have no common size of their own."""
MOST_PIXELS = 2**26  # limit of an image file; decoded, so many pixels take 200 MB
PROGRESS_SECONDS = 5.0  # seconds between two lines of progress


def data_dir_of(settings: DataSettings, *, hint: str = "") -> Path:
    """The folder ``data-dir``; DataError without one, with a ``hint`` at another way."""
    dataset = settings.dataset
    if not settings.data_dir:
        filled = ", which download = true can fill" if hint else ""
        needs = f"dataset {dataset!r} needs files; set data-dir to their folder{filled}"
        raise DataError(f"data-dir = '': {needs} (on a site with a node config of its own: there)")
    root = Path(settings.data_dir).expanduser().absolute()
    if not root.is_dir():
        missing = f"there is no such folder (dataset {dataset!r}){hint}"
        raise DataError(f"data-dir = {settings.data_dir!r}: {missing}")
    return root


class _Sample(NamedTuple):
    """An image, and the names of the folders that say its class and its domain."""

    file: Path
    class_name: str
    domain: str


def read_folder(settings: DataSettings, domains: Sequence[Path] = ()) -> RawData:
    """Read all images of a folder, the classes and domains of which are its subfolders.

    An ``image-folder`` has CLASS/image below ``data-dir``, every other data set DOMAIN/CLASS/image.
    With ``domains`` these folders are the domains, in this order; else all below ``data-dir`` are,
    by name.
    """
    root = data_dir_of(settings)
    by_domain = settings.dataset != "image-folder"
    folders = domains or _folders(root)
    trees = folders if by_domain else [root]
    names = class_names(settings.classes)
    samples = _images_in(trees, names if by_domain else ())
    if not samples:
        layout = "DOMAIN/CLASS/image" if by_domain else "CLASS/image"
        none = f"no images laid out as {layout} in {root}"
        raise DataError(f"data-dir = {settings.data_dir!r}: {none}")

    folder_of = {with_composed_letters(folder.name): folder for folder in folders}
    if by_domain:
        _check_no_parts(folder_of, root, "domains")
        classes = _classes_of_domains(samples, trees, root, settings)
        domain_names = tuple(folder_of)
        domain_of = [domain_names.index(image.domain) for image in samples]
    else:
        classes = _classes_of_folders(samples, folder_of, root, settings)
        domain_names = ()
        domain_of = [0] * len(samples)
    images = read_images([image.file for image in samples], settings)
    labels = np.array([classes.index(image.class_name) for image in samples], dtype=np.int64)
    numbers = np.array(domain_of, dtype=np.int64)
    official = np.zeros(len(samples), dtype=np.uint8)
    return RawData(images, labels, numbers, official, classes, domain_names)


def _images_in(trees: Sequence[Path], names: tuple[str, ...]) -> list[_Sample]:
    """All images TREE/CLASS/image; with ``names`` only those of the classes called so."""
    samples = []
    for tree in trees:
        for folder in _folders(tree):
            name = with_composed_letters(folder.name)
            if names and name not in names:
                continue
            domain = with_composed_letters(tree.name)
            samples += [_Sample(file, name, domain) for file in image_files(folder)]
    return samples


def _classes_of_folders(
    samples: list[_Sample], folder_of: Mapping[str, Path], root: Path, settings: DataSettings
) -> tuple[str, ...]:
    """The classes of an ``image-folder``: those in the setting, or else every folder."""
    names = class_names(settings.classes)
    if not names:
        present = {image.class_name for image in samples}
        for name in folder_of:
            if name not in present:
                kinds = ", ".join(sorted(EXTENSIONS))
                without = f"is a class without an image there ({kinds})"
                cure = "add some, remove it, or name the classes"
                raise DataError(f"classes = '': the folder {name!r} in {root} {without}; {cure}")
        _check_no_parts(folder_of, root, "classes")
        return _classes_present(samples, root)
    for image in samples:
        if image.class_name not in names:
            unlisted = f"the folder {image.class_name!r} (of {image.file})"
            raise DataError(f"classes = {settings.classes!r} does not list {unlisted}")
    return names


def _classes_of_domains(
    samples: list[_Sample], trees: Sequence[Path], root: Path, settings: DataSettings
) -> tuple[str, ...]:
    """The classes of a ``domain-folder``: those that the setting picks, or all that have images.

    DataError where one that is picked has none: its folder may be spelt in another way.
    """
    names = class_names(settings.classes)
    if not names:
        return _classes_present(samples, root)
    present = {image.class_name for image in samples}
    absent = [name for name in names if name not in present]
    if not absent:
        return names

    unlisted = {}
    for tree in trees:
        for folder in _folders(tree):
            name = with_composed_letters(folder.name)
            if name not in names:
                unlisted[_letters(name)] = folder
    for name in absent:
        folder_alike = unlisted.get(_letters(name))
        if folder_alike:
            without = f"{name!r} has no images, and it does not list the folder {folder_alike}"
            raise DataError(f"classes = {settings.classes!r}: {without}; is it misspelt?")
    if settings.partition != "own":
        without = f"no domain in {root} has images in a folder {absent[0]!r}"
        raise DataError(f"classes = {settings.classes!r}: {without}")
    return names


def _classes_present(samples: list[_Sample], root: Path) -> tuple[str, ...]:
    """The names of the folders, sorted; DataError where they are no classes."""
    names = tuple(sorted({image.class_name for image in samples}))
    labels = [int(name) if name.isdecimal() else name for name in names]
    check_classes(labels, math.inf, str(root))
    return names


def _check_no_parts(folders: Mapping[str, Path], root: Path, kind: str) -> None:
    """DataError for folders called ``train`` or the like, which would be of this ``kind``.

    A class may be called ``test`` where other folders are there, unless it has folders called like
    these.
    """
    parts = [folder for name, folder in folders.items() if name.lower() in PART_NAMES]
    if len(parts) < len(folders):  # test/cat beside cat
        parts = [part for part in parts if _has_one_of(folders, part)]
    if parts:
        which = f"{', '.join(part.name for part in parts)} in {root}"
        taken = f"parts of a data set, which would be taken for {kind}"
        raise DataError(f"{which}: {taken}; list the images in a manifest with a split")


def _has_one_of(names: Mapping[str, Path], folder: Path) -> bool:
    return any(with_composed_letters(below.name) in names for below in _folders(folder))


def _letters(name: str) -> str:
    """A name without capitals and marks; looser, ``female`` would be as ``male``."""
    return re.sub(r"[\W_]", "", name.casefold())


def _folders(root: Path) -> list[Path]:
    entries = (entry for entry in root.iterdir() if not entry.name.startswith("."))
    folders = (entry for entry in entries if entry.is_dir())
    return sorted(folders, key=lambda folder: with_composed_letters(folder.name))


def image_files(folder: Path) -> list[Path]:
    """All images in ``folder`` and below it, by name.

    DataError for a link to a folder there: it may lead anywhere.
    """
    paths = sorted(path for path in folder.rglob("*") if not path.name.startswith("."))
    for path in paths:
        if path.is_symlink() and path.is_dir():
            link = f"{path} is a link to a folder, which is not followed"
            raise DataError(f"{link}; link a whole class, or files")
    return [path for path in paths if path.suffix.lower() in EXTENSIONS and not path.is_dir()]


def read_images(files: Sequence[Path], settings: DataSettings) -> Images:
    """uint8 [N, 3, size, size], in a nameless file in the cache.

    DataError for a file that is no image, OSError where the disk has no room.
    """
    size = settings.image_size or DEFAULT_SIZE
    shape = (len(files), 3, size, size)
    length = math.prod(shape)
    folder = cache_folder(settings.cache_dir)
    make_private(folder)
    with TemporaryFile(dir=folder) as file:
        file.truncate(length)
        # a full disk is an error now; later it would be the end (SIGBUS)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, length)
        images: Images = np.memmap(file, np.uint8, "r+", shape=shape)

    def decode(row: int) -> None:
        images[row] = read_image(files[row], size)

    reported = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, _ in enumerate(pool.map(decode, range(len(files))), 1):
            if time.monotonic() > reported + PROGRESS_SECONDS:
                reported = time.monotonic()
                progress = f"{done:,} of {len(files):,} images decoded"
                print(f"protofl: {progress}", file=sys.stderr, flush=True)
    return images


def square_rgb(image: Any, size: int) -> Images:
    """A PIL image as uint8 [3, size, size], stretched (bilinear).

    ValueError for more than 8 bits, or several pages.
    """
    if image.mode.startswith(("I", "F")):  # PIL would cut them off at 255
        deep = f"its pixels have more than 8 bits (mode {image.mode}), whose range nobody says"
        raise ValueError(f"{deep}: save it with 8 bits, or bring arrays of floating point")
    # MPO: a photo of a phone, with its parts
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        several = f"it has {image.n_frames} pages or frames, of which one would be seen"
        raise ValueError(f"{several}; save each as an image")
    if image.mode != "RGB":  # else convert would copy it: half of the time of a photo
        image = image.convert("RGB")
    bilinear = 2  # Image.Resampling.BILINEAR
    return np.asarray(image.resize((size, size), resample=bilinear)).transpose(2, 0, 1)


def read_image(file: Path, size: int) -> Images:
    """One image file as uint8 [3, size, size]."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            if image.width * image.height > MOST_PIXELS:  # a small file may say so
                limit = f"{MOST_PIXELS / 1e6:.0f} million"
                raise ValueError(f"{image.width}×{image.height} pixels, above {limit}")
            # a camera's notes may be broken; what is wrong with the pixels is said below
            with suppress(Exception):
                ImageOps.exif_transpose(image, in_place=True)  # upright, as its camera says
            return square_rgb(image, size)
    except (OSError, ValueError, IndexError, SyntaxError, Image.DecompressionBombError) as error:
        cure = "repair or remove it"
        raise DataError(f"{file} is not a readable image ({error}); {cure}") from error

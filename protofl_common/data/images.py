"""Image files, and folders of them: every image becomes uint8 [3, size, size], RGB and stretched to a square.

``image-folder`` reads CLASS/image, ``domain-folder`` DOMAIN/CLASS/image; images may lie in folders below CLASS, too.
Files whose extension is not among `EXTENSIONS`, and names that begin with a dot, are skipped. ``classes`` names the
classes in label order: of an ``image-folder``, which each site may have of its own, every folder; of a
``domain-folder`` those to pick.
"""

import math
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from protofl_common.basics.files import cache_folder, make_private
from protofl_common.basics.text import composed
from protofl_common.config.sections import DataSettings
from protofl_common.data.raw import DataError, Images, RawData, check_classes, class_names

EXTENSIONS = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
PARTS = frozenset(("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation"))
"""Names of folders that are no classes, and no domains."""
DEFAULT_SIZE = 64  # pixels a side when ``image-size`` is 0: photographs have no common size of their own
MOST_PIXELS = 2**26  # limit of an image file; decoded, so many pixels take 200 MB
PATIENCE = 5.0  # seconds between two lines of progress


def data_dir_of(settings: DataSettings, *, hint: str = "") -> Path:
    """The folder ``data-dir``; DataError when it is not given or no folder, with a ``hint`` at another way."""
    if not settings.data_dir:
        filled = ", which download = true can fill" if hint else ""
        needs = f"dataset {settings.dataset!r} needs files; set data-dir to their folder{filled}"
        raise DataError(f"data-dir = '': {needs} (on a site with a node config of its own: there)")
    if not (root := Path(settings.data_dir).expanduser().absolute()).is_dir():
        where = f"data-dir = {settings.data_dir!r}"
        raise DataError(f"{where}: there is no such folder (dataset {settings.dataset!r}){hint}")
    return root


def read_folder(settings: DataSettings, domains: Sequence[Path] = ()) -> RawData:
    """CLASS/image, or DOMAIN/CLASS/image, below ``data-dir``, or in ``domains``; the names are sorted."""
    root, by_domain = data_dir_of(settings), settings.dataset != "image-folder"
    trees, names = domains or (_folders(root) if by_domain else [root]), class_names(settings.classes)
    files = [
        (file, composed(folder.name), composed(tree.name))
        for tree in trees
        for folder in _folders(tree)
        if not (names and by_domain) or composed(folder.name) in names
        for file in image_files(folder)
    ]
    if not files:
        layout = "DOMAIN/CLASS/image" if by_domain else "CLASS/image"
        raise DataError(f"data-dir = {settings.data_dir!r}: no images laid out as {layout} in {root}")
    every = {composed(folder.name): folder for folder in domains or _folders(root)}
    if not names and (empty := [name for name in every if not by_domain and all(name != of for _, of, _ in files)]):
        cure = f"an image there ({', '.join(sorted(EXTENSIONS))}); add some, remove it, or name the classes"
        raise DataError(f"classes = '': the folder {empty[0]!r} in {root} is a class without {cure}")
    parts = [folder for name, folder in every.items() if name.lower() in PARTS]
    if len(parts) < len(every):  # test/cat beside cat
        parts = [part for part in parts if any(composed(each.name) in every for each in _folders(part))]
    if (by_domain or not names) and parts:
        what = f"{', '.join(part.name for part in parts)} in {root}: parts of a data set, which would be taken for"
        raise DataError(f"{what} {'domains' if by_domain else 'classes'}; list the images in a manifest with a split")
    present = {name for _, name, _ in files}
    classes = names or tuple(sorted(present))
    if not names:
        check_classes([int(name) if name.isdecimal() else name for name in classes], math.inf, str(root))
    for file, name, _ in files:
        if name not in classes:
            raise DataError(f"classes = {settings.classes!r} does not list the folder {name!r} (of {file})")
    if (absent := [name for name in classes if name not in present]) and by_domain:
        others = (folder for tree in trees for folder in _folders(tree) if composed(folder.name) not in classes)
        unlisted = {_letters(composed(folder.name)): folder for folder in others}
        for name in absent:
            if folder := unlisted.get(_letters(name)):
                misspelt = f"{name!r} has no images, and it does not list the folder {folder}; is it misspelt?"
                raise DataError(f"classes = {settings.classes!r}: {misspelt}")
        if settings.partition != "own":
            raise DataError(f"classes = {settings.classes!r}: no domain in {root} has images in a folder {absent[0]!r}")
    images, official = read_images([file for file, *_ in files], settings), np.zeros(len(files), dtype=np.uint8)
    labels = np.array([classes.index(name) for _, name, _ in files], dtype=np.int64)
    numbers = np.array([[*every].index(domain) if by_domain else 0 for _, _, domain in files], dtype=np.int64)
    return RawData(images, labels, numbers, official, classes, tuple(every) if by_domain else ())


def _letters(name: str) -> str:
    """Return a name without capitals and marks: more alike may be other classes, as ``female`` and ``male``."""
    return re.sub(r"[\W_]", "", name.casefold())


def _folders(root: Path) -> list[Path]:
    folders = (entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sorted(folders, key=lambda folder: composed(folder.name))


def image_files(folder: Path) -> list[Path]:
    """All images in ``folder`` and below it, by name; DataError for a link to a folder there: it may lead anywhere."""
    paths = sorted(path for path in folder.rglob("*") if not path.name.startswith("."))
    if links := [path for path in paths if path.is_symlink() and path.is_dir()]:
        raise DataError(f"{links[0]} is a link to a folder, which is not followed; link a whole class, or files")
    return [path for path in paths if path.suffix.lower() in EXTENSIONS and not path.is_dir()]


def read_images(files: Sequence[Path], settings: DataSettings) -> Images:
    """uint8 [N, 3, size, size], in a nameless file in the cache; DataError for a bad file, OSError without room."""
    size = settings.image_size or DEFAULT_SIZE
    shape = (len(files), 3, size, size)
    make_private(folder := cache_folder(settings.cache_dir))
    with TemporaryFile(dir=folder) as file:
        file.truncate(length := math.prod(shape))
        if hasattr(os, "posix_fallocate"):  # a full disk is an error now; later it would be the end (SIGBUS)
            os.posix_fallocate(file.fileno(), 0, length)
        images: Images = np.memmap(file, np.uint8, "r+", shape=shape)

    def decode(row: int) -> None:
        images[row] = read_image(files[row], size)

    reported = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, _ in enumerate(pool.map(decode, range(len(files))), 1):
            if time.monotonic() > reported + PATIENCE:
                reported = time.monotonic()
                print(f"protofl: {done:,} of {len(files):,} images decoded", file=sys.stderr, flush=True)
    return images


def square_rgb(image: Any, size: int) -> Images:
    """A PIL image as uint8 [3, size, size], stretched (bilinear); ValueError for more than 8 bits, or several pages."""
    if image.mode.startswith(("I", "F")):  # PIL would cut them off at 255
        cure = "save it with 8 bits, or bring arrays of floating point"
        raise ValueError(f"its pixels have more than 8 bits (mode {image.mode}), whose range nobody says: {cure}")
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:  # a photo of a phone, with its parts
        raise ValueError(f"it has {image.n_frames} pages or frames, of which one would be seen; save each as an image")
    rgb = image if image.mode == "RGB" else image.convert("RGB")  # which would copy it: half of the time of a photo
    return np.asarray(rgb.resize((size, size), resample=2)).transpose(2, 0, 1)  # Image.Resampling.BILINEAR


def read_image(file: Path, size: int) -> Images:
    """One image file as uint8 [3, size, size]."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            if image.width * image.height > MOST_PIXELS:  # a small file may say so
                raise ValueError(f"{image.width}×{image.height} pixels, above {MOST_PIXELS / 1e6:.0f} million")
            with suppress(Exception):  # a camera's notes may be broken; what is wrong with the pixels is said below
                ImageOps.exif_transpose(image, in_place=True)  # upright, as its camera says
            return square_rgb(image, size)
    except (OSError, ValueError, IndexError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} is not a readable image ({error}); repair or remove it") from error

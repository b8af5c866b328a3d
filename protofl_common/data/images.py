"""Image files, and folders of them.

Every image becomes uint8 [3, size, size], RGB and stretched to a square.
``image-folder`` reads CLASS/image, ``domain-folder`` DOMAIN/CLASS/image; images may lie in folders
below CLASS, too. What is no image of the user's (`_LEFT_OUT`, and files whose extension is not
among `EXTENSIONS`) is left out and counted. ``classes`` names the classes in label order: of an
``image-folder``, which each site may have of its own, every folder; of a ``domain-folder`` those to
pick.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np

from protofl_common.basics.files import cache_folder, make_private
from protofl_common.basics.text import first_of, with_composed_letters
from protofl_common.config.sections import DataSettings
from protofl_common.data.door import class_names, from_arrays, letters_of, say, with_progress
from protofl_common.data.raw import DataError, Images, Place, RawData, digests
from protofl_common.data.several_labels import SeveralLabels

EXTENSIONS = frozenset(
    (
        *(".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg"),
        *(".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"),
    )
)
_LEFT_OUT = re.compile(r"[.@$#~].*|__MACOSX|lost\+found|System Volume Information")
"""Names of folders that systems and tools make, of files that begin with a point."""
_COPIES = re.compile(
    r"_?thumb(nail)?s?([\W_].*)?|(smart )?previews?|caches?|.*\.lrdata"
    r"|trash|recycle[rd]?|recycle bin|deleted( items)?|papierkorb|corbeille|papelera|cestino"
    r"|masks?|segmentations?|annotations?|ground[ _-]?truths?",
    re.IGNORECASE,
)
"""Names of folders below a class that hold copies, what was thrown away, or masks of images."""
_MASK = re.compile(r"(.+?)[ _-](masks?|seg|segmentation|gt|annotation)([ _-]?\d+)?", re.IGNORECASE)
"""Names of images, without their ending, that are masks of the image called as the first group."""
_HOLDER = re.compile(r"images?|imgs?|jpe?gs?|pngs?|photos?|pictures|frames", re.IGNORECASE)
"""Names of folders that say only that images lie there."""
PART = re.compile(
    r"(.*[\W_])?(train|test|val|valid|dev|eval|fold)(ing|idation|ation|uation)?"
    r"(s?(data|daten|set))?[\W_]?\d*([\W_].*)?",
    re.IGNORECASE,
)
"""Names of folders and of parts of a data set that are neither domains nor classes."""
DEFAULT_SIZE = 64
"""Pixels a side when ``image-size`` is 0: photographs have no common size of their own."""
MOST_PIXELS = 2**26  # limit of an image file; decoded, so many pixels take 200 MB


def data_dir_of(settings: DataSettings, *, hint: str = "") -> Path:
    """Return the folder ``data-dir``; DataError if it is not set, or there is no such folder.

    ``hint`` ends the error for a data set that could be downloaded.
    """
    dataset = settings.dataset
    if not settings.data_dir:
        filled = ", which download = true can fill" if hint else ""
        raise DataError(
            f"data-dir = '': dataset {dataset!r} needs files; set data-dir to their folder"
            f"{filled} (on a site with a node config of its own: there)"
        )
    root = Path(settings.data_dir).expanduser().absolute()
    if not root.is_dir():
        raise DataError(
            f"data-dir = {settings.data_dir!r}: there is no such folder (dataset {dataset!r}){hint}"
        )
    return root


_Folders = list[tuple[str, Path]]
"""The name of each folder, of composed letters, and the folder."""


class _Sample(NamedTuple):
    """An image, and the names of the folders that say its class and its domain."""

    file: Path
    class_name: str
    domain: str
    folder_below: str  # the first one between the class's folder and the image; "" without any


def read_folder(settings: DataSettings, domains: Sequence[Path] = ()) -> RawData:
    """Read all images of ``data-dir``, whose subfolders are the classes, and perhaps domains.

    An ``image-folder`` has CLASS/image there, every other data set DOMAIN/CLASS/image. The domains
    are the folders ``domains``, or else all in ``data-dir``. DataError if the folders are no such
    layout, or have no images.
    """
    root = data_dir_of(settings)
    by_domain = settings.dataset != "image-folder"
    left_out: Counter[str] = Counter()
    folders = [(path.name, path) for path in domains]
    if not domains:
        # what else is in an image-folder's root is counted with the rest of its tree below
        folders = _folders(root, left_out if by_domain else Counter())
    names = [name for name, _ in folders]
    trees = folders if by_domain else [("", root)]
    picked = class_names(settings.classes)
    samples, unlisted = _images_in(trees, picked if by_domain else (), left_out)
    if not samples:
        layout = "DOMAIN/CLASS/image" if by_domain else "CLASS/image"
        raise DataError(
            f"data-dir = {settings.data_dir!r}: no images laid out as {layout} in {root}"
        )

    arrays: dict[str, Any] = {"labels": [image.class_name for image in samples]}
    if by_domain:
        parts = [name for name in names if PART.fullmatch(name)]
        if len(parts) > 1 or len(parts) == len(names):
            raise _no_layout(root, parts, "domains")
        _check_picked(samples, unlisted, root, settings)
        arrays["domain"] = [image.domain for image in samples]
    else:
        _check_classes_of_folders(samples, folders, root, settings)
    files = [image.file for image in samples]
    data = with_images(arrays, files, str(root), settings, lambda row: str(files[row]))
    note = f"{root}: {len(data.labels)} images of {first_of(data.classes)}"
    folders_below = [image.folder_below for image in samples if image.folder_below]
    if folders_below:
        names_below = first_of(sorted({*folders_below}))
        note += f"; {len(folders_below)} of them in folders below their class: {names_below}"
    if left_out:
        note += f"; left out: {counts_of(left_out)}"
    if by_domain:  # domains without images count, too, so indices are into the names of all folders
        names = sorted({*names})
        indices = np.array([names.index(name) for name in data.domain_names], np.int64)
        data = replace(data, domains=indices[data.domains], domain_names=tuple(names))
    say(note)
    return data


def _images_in(
    trees: _Folders, names: tuple[str, ...], left_out: Counter[str]
) -> tuple[list[_Sample], dict[str, Path]]:
    """Return all images TREE/CLASS/image; with ``names`` only those of these classes.

    What is passed over is counted in ``left_out``; folders of other classes are also returned, by
    the letters of their names (`letters_of`).
    """
    samples = []
    unlisted = {}
    for domain, tree in trees:
        for name, folder in _folders(tree, left_out):
            if names and name not in names:
                left_out["folder of no class in `classes`"] += 1
                unlisted[letters_of(name)] = folder
                continue
            for file in image_files(folder, left_out):
                folders_below = file.relative_to(folder).parts[:-1]
                first_below = folders_below[0] if folders_below else ""
                samples.append(_Sample(file, name, domain, first_below))
    return samples, unlisted


def _check_classes_of_folders(
    samples: list[_Sample], folders: _Folders, root: Path, settings: DataSettings
) -> None:
    """Raise DataError for folders of an ``image-folder`` that are no classes.

    With the setting ``classes`` these are folders that it does not list. Without it, they are
    folders without an image, and folders that are parts or domains: all are called so, or several
    of those have folders of the same names below them, the real classes.
    """
    names = class_names(settings.classes)
    present = {image.class_name for image in samples}
    if names:
        for image in samples:
            if image.class_name not in names:
                raise DataError(
                    f"classes = {settings.classes!r} does not list "
                    f"the folder {image.class_name!r} (of {image.file})"
                )
        return
    for name, _ in folders:
        if name not in present:
            kinds = ", ".join(sorted(EXTENSIONS))
            raise DataError(
                f"classes = '': the folder {name!r} in {root} is a class without an image there "
                f"({kinds}); add some, remove it, or name the classes"
            )

    if len(folders) > 1 and all(PART.fullmatch(name) for name, _ in folders):
        raise _no_layout(root, sorted(present), "classes")
    # a folder that itself has images is a class; of the others compare the names of their folders
    direct = {image.class_name for image in samples if image.file.parent.parent == root}
    names_below = {name: _names_below(folder) for name, folder in folders if name not in direct}
    times = Counter([*present, *chain.from_iterable(names_below.values())])
    no_classes = [name for name, below in names_below.items() if any(times[n] > 1 for n in below)]
    if no_classes:
        raise _no_layout(root, no_classes, "classes")


def _names_below(folder: Path) -> set[str]:
    """Return the names of all folders below this one that may be names of classes.

    Folders of systems and tools, and such as ``images`` and ``masks``, are none.
    """
    names = {with_composed_letters(path.name) for path in folder.rglob("*") if path.is_dir()}
    no_classes = (_LEFT_OUT, _COPIES, _HOLDER)
    return {name for name in names if not any(kind.fullmatch(name) for kind in no_classes)}


def _no_layout(root: Path, names: Sequence[str], taken: str) -> DataError:
    which = f"{first_of(names)} in {root}"
    are = f"parts, folds or sites of a data set, which would be taken for {taken}"
    of_parts = "for parts list the images in a manifest with a split, or take hf:NAME"
    if taken == "domains":
        return DataError(f"{which}: {are}; {of_parts}; call sites otherwise")
    return DataError(
        f"{which}: {are}; take dataset = 'domain-folder' for sites; {of_parts}; or name `classes`"
    )


def _check_picked(
    samples: list[_Sample], unlisted: dict[str, Path], root: Path, settings: DataSettings
) -> None:
    """Raise DataError for a class in the setting ``classes`` without images in a domain-folder.

    If a folder's name differs from it in spaces, signs and capitals alone, the error names that
    folder. A site with data of its own may lack a class, but not by misspelling it.
    """
    names = class_names(settings.classes)
    present = {image.class_name for image in samples}
    absent = [name for name in names if name not in present]
    which = f"classes = {settings.classes!r}"
    for name in absent:
        folder_alike = unlisted.get(letters_of(name))
        if folder_alike:
            raise DataError(
                f"{which}: {name!r} has no images, and it does not list the folder {folder_alike}; "
                "is it misspelt?"
            )
    if absent and settings.partition != "own":
        raise DataError(f"{which}: no domain in {root} has images in a folder {absent[0]!r}")


def _folders(root: Path, left_out: Counter[str]) -> _Folders:
    """Return the user's folders in ``root``, sorted by name; count all else in ``left_out``.

    Folders that systems and tools make are none of the user's (`_LEFT_OUT`).
    """
    folders = []
    for entry in root.iterdir():
        if entry.is_dir() and not _LEFT_OUT.fullmatch(entry.name):
            folders.append((with_composed_letters(entry.name), entry))
        else:
            left_out[_kind(entry)] += 1
    return sorted(folders)


def image_files(folder: Path, left_out: Counter[str]) -> list[Path]:
    """Return all image files in ``folder`` and below it, sorted; count others in ``left_out``.

    Hidden files count as others, and so do masks of other images, folders of thumbnails, of masks,
    of trash, and of systems and tools (`_COPIES`, `_LEFT_OUT`). DataError for a link to a folder
    there: it may lead anywhere.
    """
    images = []
    paths = sorted(folder.iterdir())
    stems = {path.stem for path in paths if path.suffix.lower() in EXTENSIONS}
    for path in paths:
        is_foreign = path.name.startswith(".")
        if path.is_dir() and not is_foreign:
            is_foreign = bool(_LEFT_OUT.fullmatch(path.name) or _COPIES.fullmatch(path.name))
        # a broken link counts as an image, so that it is refused when it is read
        is_image = path.suffix.lower() in EXTENSIONS and (path.is_file() or not path.exists())
        mask = _MASK.fullmatch(path.stem)
        if path.is_dir() and not is_foreign:
            if path.is_symlink():
                raise DataError(
                    f"{path} is a link to a folder, which is not followed; "
                    "link a whole class, or files"
                )
            images += image_files(path, left_out)
        elif is_image and mask and mask[1] in stems:  # ``a_mask`` beside ``a``
            left_out["named as masks of others"] += 1
        elif is_image and not is_foreign:
            images.append(path)
        else:
            left_out[_kind(path)] += 1
    return images


def _kind(path: Path) -> str:
    """Return the words under which a file or folder that is left out is counted."""
    if path.is_dir():
        return f"folder {path.name}"
    if path.name.startswith("."):
        return "hidden file"
    return f"*{path.suffix}" if path.suffix else path.name


def counts_of(left_out: Counter[str]) -> str:
    return first_of(f"{count} {kind}" for kind, count in sorted(left_out.items()))


def with_images(
    arrays: dict[str, Any],
    files: Sequence[Path],
    where: str,
    settings: DataSettings,
    place: Place,
) -> RawData:
    """Make a data set of these image files; ``arrays`` has their labels, domains and parts.

    The arrays are checked before an image is decoded. If ``max-unreadable`` allows it, files that
    cannot be read are left out as if they were not there, and lines name them. DataError if the
    arrays are wrong, too many files cannot be read, or all of a class.
    """
    several = SeveralLabels.of(settings)
    unreadable: dict[int, DataError] = {}  # row -> why it has no image
    all_rows = from_arrays(  # also those that turn out to be unreadable
        {**arrays, "inputs": lambda: decoded(files, settings, unreadable)},
        where,
        settings.classes,
        place,
        several=several,
    )
    rows = [row for row in range(len(files)) if row not in unreadable]
    contents = digests(files[row].read_bytes() for row in rows)
    if not unreadable:
        return replace(all_rows, contents=contents)

    # check the arrays again without the unreadable rows: a class or a part may have no sample left
    images = all_rows.inputs
    for position, row in enumerate(rows):  # in place: they may be too large for two arrays
        images[position] = images[row]
    kept: dict[str, Any] = dict(arrays)
    for key in arrays.keys() - {"classes"}:
        kept[key] = [arrays[key][row] for row in rows]
    kept["inputs"] = images[: len(rows)]
    data = from_arrays(kept, where, settings.classes, lambda row: place(rows[row]), several=several)
    lost = [name for name in all_rows.classes if name not in data.classes]
    if lost:
        raise DataError(
            f"{where}: no image of {first_of(lost)} can be read ({unreadable[min(unreadable)]})"
        )
    count = f"{len(unreadable)} of {len(files)} images cannot be read, and are left out"
    for line in (f"{where}: {count}", *map(str, unreadable.values())):
        say(line)
    return replace(data, contents=contents)


def decoded(
    files: Sequence[Path], settings: DataSettings, unreadable: dict[int, DataError]
) -> Images:
    """Decode image files to uint8 [N, 3, size, size], on all cores.

    A file that cannot be read is noted in ``unreadable``, which has the error by the file's row;
    that row of the result is all 0. DataError if ``max-unreadable`` allows fewer such files,
    OSError if the disk has no room.
    """
    number = len(files)
    size = settings.image_size or DEFAULT_SIZE
    # rounding errors are made up for: 0.29 · 100 is 28.999…
    most_unreadable = math.floor(settings.max_unreadable * number + 1e-9)
    images = _array_on_disk((number, 3, size, size), settings)

    def decode(row: int) -> DataError | None:
        try:
            images[row] = read_image(files[row], size)
        except DataError as error:
            return error
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = pool.map(decode, range(number))
        for row, error in enumerate(with_progress(errors, f"of {number:,} images decoded")):
            if error is None:
                continue
            unreadable[row] = error
            if len(unreadable) > most_unreadable:
                pool.shutdown(cancel_futures=True)
                share = settings.max_unreadable
                bound = "or let some be so: max-unreadable"
                if share:
                    bound = f"more than max-unreadable = {share} of {number} images are so"
                raise DataError(f"{error}, {bound}")
    return images


def _array_on_disk(shape: tuple[int, ...], settings: DataSettings) -> Images:
    """Return an array of zeros, uint8, in a nameless file of the cache: it may exceed the memory.

    The file is gone when the array is. OSError if the disk has no room for it.
    """
    length = math.prod(shape)
    folder = cache_folder(settings.cache_dir)
    make_private(folder)
    with TemporaryFile(dir=folder) as file:
        file.truncate(length)
        # a full disk is an OSError now; later it would kill the process (SIGBUS)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, length)
        return np.memmap(file, np.uint8, "r+", shape=shape)


def square_rgb(image: Any, size: int) -> Images:
    """Return a PIL image as uint8 [3, size, size], stretched (bilinear).

    ValueError for None, and for an image of more than 8 bits, or of several pages.
    """
    if image is None:
        raise ValueError("there is none")
    if image.mode.startswith(("I", "F")):  # PIL would cut them off at 255
        raise ValueError(
            f"its pixels have more than 8 bits (mode {image.mode}), whose range nobody says: "
            "save it with 8 bits, or bring arrays of floating point"
        )
    # MPO is a phone's photo, whose further frames are previews or a second view
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        raise ValueError(
            f"it has {image.n_frames} pages or frames, of which one would be seen; "
            "save each as an image"
        )
    if image.mode != "RGB":  # else convert would copy it: half of the time of a photo
        image = image.convert("RGB")
    bilinear = 2  # Image.Resampling.BILINEAR
    return np.asarray(image.resize((size, size), resample=bilinear)).transpose(2, 0, 1)


def open_image(file: Path) -> Any:
    """Open an image file with PIL, by its content, which must be of a kind in `EXTENSIONS`.

    PIL reads more kinds, and does not go by a file's name: a stranger's PostScript, which is a
    program, it would run in Ghostscript.
    """
    from PIL import Image

    kinds = Image.registered_extensions()
    return Image.open(file, formats=[kinds[name] for name in EXTENSIONS & kinds.keys()])


def read_image(file: Path, size: int) -> Images:
    """Decode one image file to uint8 [3, size, size], upright; DataError if it cannot be read."""
    from PIL import ImageOps

    try:
        with open_image(file) as image:
            if image.width * image.height > MOST_PIXELS:  # as even a small file may claim
                raise ValueError(
                    f"{image.width}×{image.height} pixels, above {MOST_PIXELS / 1e6:.0f} million"
                )
            # what a camera noted of its position may be broken: then the image stays as it is
            with suppress(Exception):
                ImageOps.exif_transpose(image, in_place=True)
            return square_rgb(image, size)
    except Exception as error:  # what decoders raise of a broken file may be anything
        raise DataError(f"{file} is not a readable image ({error}); repair or remove it") from error

"""Data of the user's own: images of a manifest, arrays, tables and texts; those of a function, and of Hugging Face."""

import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from protofl_common.basics.code_version import files_of
from protofl_common.basics.files import cache_folder, digest, make_private
from protofl_common.config.architectures import VOCABULARY
from protofl_common.config.python_names import load, module_of
from protofl_common.config.sections import DataSettings
from protofl_common.data.images import DEFAULT_SIZE, data_dir_of, read_images, square_rgb
from protofl_common.data.raw import KEYS, SPLITS, DataError, Ints, RawData, from_arrays
from protofl_common.data.table import COLUMNS, Rows, checked_names, chosen_columns, name_and_categories, read_columns

ARRAYS = (".npz", ".csv", ".parquet")
_WORD = re.compile(r"\w+|[^\w\s]")


def file_of(settings: DataSettings, suffixes: Sequence[str]) -> Path:
    """``data-dir`` where that is a file of such a kind, else the only one in that folder."""
    path, what = Path(settings.data_dir).expanduser().absolute(), f"dataset {settings.dataset!r}"
    kinds = ", ".join(f"*{suffix}" for suffix in suffixes)
    if not settings.data_dir:
        raise DataError(f"data-dir = '': {what} needs a file ({kinds}); set data-dir to it")
    if not path.exists():
        raise DataError(f"data-dir = {settings.data_dir!r}: there is no such file or folder ({what})")
    files = [file for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.suffix.lower() in suffixes]
    if len(files) != 1:
        several = f"several: {', '.join(file.name for file in files)}; name one of them" if files else "none there"
        raise DataError(f"data-dir = {settings.data_dir!r}: {what} needs one file ({kinds}); {several}")
    return files[0]


def read_manifest(settings: DataSettings) -> RawData:
    """A CSV file ``file,label,client,split``, the last two optional: paths of images, which are read as in folders."""
    rows = Rows(file_of(settings, (".csv",)))
    columns = rows.annotations("file", "label")
    files, first = [rows.file.parent / name for name in rows.columns["file"]], dict[str, int]()
    for row, name in enumerate(rows.columns["file"]):
        if not files[row].is_file():
            raise DataError(f"{rows.file}, {rows.place(row)}, column 'file': there is no file {name!r}")
        before = first.setdefault(os.path.normpath(files[row]), row)
        if columns["labels"][before] != columns["labels"][row]:
            raise DataError(f"{rows.file}, {rows.place(before)} and {rows.place(row)}: image {name!r} has two labels")
    columns["inputs"] = read_images(files, settings)
    return from_arrays(columns, str(rows.file), settings.classes, rows.place)


def locate_manifest(settings: DataSettings) -> tuple[Path, ...]:
    """The file, its folder, with the images in it, and the images that are elsewhere."""
    file = file_of(settings, (".csv",))
    named = (os.path.normpath(file.parent / name) for name in Rows(file).columns.get("file", ()))
    below = os.path.join(file.parent, "")
    return (file, file.parent, *(Path(name) for name in named if not name.startswith(below)))


def read_arrays(settings: DataSettings) -> RawData:
    """A file of arrays ``inputs``, ``labels``, … (``.npz``), or a table with a column ``label`` (CSV, Parquet)."""
    file, gaps = file_of(settings, ARRAYS), settings.impute != "none"
    if file.suffix.lower() == ".npz":
        if named := settings.columns or settings.drop or settings.one_hot:
            raise DataError(f"{file} has no columns that could be named; leave out {named!r}")
        return from_arrays(_npz(file), str(file), settings.classes, gaps=gaps)
    rows = Rows(file)
    arrays, chosen = rows.annotations("label"), chosen_columns(settings, rows.others, str(file))
    arrays["inputs"] = read_columns(rows.columns, chosen, str(file), rows.place, gaps=gaps)
    used = {name: rows.columns[name] for name, _ in map(name_and_categories, chosen)}
    check_no_label(used, arrays["labels"], str(file), numbers=True)
    return replace(from_arrays(arrays, str(file), settings.classes, rows.place, gaps=gaps), columns=chosen)


def read_text(settings: DataSettings) -> RawData:
    """CSV files of texts: columns ``label`` and any others, joined (`tokens`); or without a header, the label first."""
    parts = [_with_label(file) for file in locate_text(settings)]
    joined = checked_names(parts[0].others, settings.data_dir)
    if differ := set(parts[0].names) ^ set(parts[-1].names):
        raise DataError(f"{settings.data_dir}: only one of its files has a column {', '.join(sorted(differ))}")
    columns, texts = [rows.annotations("label") for rows in parts], [rows.texts(joined) for rows in parts]
    arrays: dict[str, Any] = {key: [value for part in columns for value in part[key]] for key in columns[0]}
    whole = {name: [text for rows in parts for text in rows.columns[name]] for name in joined}
    check_no_label(whole, arrays["labels"], settings.data_dir)  # in all files: a few texts may say it by chance
    if len(parts) == 2 and "split" not in arrays:
        arrays["split"] = np.repeat(("test", "train"), [len(rows.lines) for rows in parts])
    arrays["inputs"] = tokens([text for part in texts for text in part], settings.text_length)
    places = [f"{rows.file.name}, line {line}" for rows in parts for line in rows.lines]
    named = joined if parts[0].has_header else ()
    return replace(from_arrays(arrays, settings.data_dir, settings.classes, places.__getitem__), columns=named)


def locate_text(settings: DataSettings) -> tuple[Path, ...]:
    """One CSV file, or ``test.csv`` and ``train.csv``, which give the split."""
    both = tuple(Path(settings.data_dir).expanduser().absolute() / name for name in ("test.csv", "train.csv"))
    return both if all(file.is_file() for file in both) else (file_of(settings, (".csv",)),)


def check_no_label(columns: Mapping[str, Sequence[Any]], labels: Any, where: str, numbers: bool = False) -> None:
    """DataError where one of several columns of texts says the label in other words; for ``numbers`` only a warning."""
    kinds = len({*(texts := [*map(str, labels)])})
    for name, values in columns.items() if numbers or len(columns) > 1 else ():
        few = len({*values[:10_000]}) <= kinds  # most columns are seen to have more at once
        if few and 1 < kinds == len({*values}) == len({*zip(values, texts, strict=True)}) < len(texts):
            copies = f"{where}: column {name!r} says the label in other words"
            if not numbers:
                raise DataError(f"{copies}; take it out of the data")
            print(f"protofl: {copies}; drop it, unless it is known before the label", file=sys.stderr, flush=True)


def tokens(texts: Iterable[str], length: int) -> Ints:
    """int64 [N, length]: the words and signs of a text, of which the first ``length`` count; 0 where it has fewer.

    A word is the token 1 + crc32(word) mod (`VOCABULARY` − 1), so that all sites agree (Weinberger et al., ICML 2009).
    """
    words_of = [_WORD.findall(text.lower())[:length] for text in texts]
    result = np.zeros((len(words_of), length), dtype=np.int64)
    for row, words in enumerate(words_of):
        result[row, : len(words)] = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
    return result


def _with_label(file: Path) -> Rows:
    """The rows of a file of texts; where it has no header, the first column is the label."""
    rows = Rows(file)
    if "label" in rows.columns:
        return rows
    first, *others = rows.names
    if not first.isdecimal() and first not in rows.columns[first]:
        has = f"has no column 'label', only {', '.join(rows.names)}"
        raise DataError(f"{file}: {has}; or if that is its first row, no other has the label {first!r}")
    return Rows(file, ["label", *(f"text {i}" for i in range(1, len(others) + 1))])


def _npz(file: Path) -> dict[str, Any]:
    """The arrays; ``x_train``, ``y_train``, the same with ``test`` and perhaps ``validation`` are a split data set."""
    try:
        with np.load(file, allow_pickle=False) as opened:
            arrays: dict[str, Any] = dict(opened)
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file} cannot be read as plain NumPy arrays, series of one length ({error})") from error
    if odd := [key for key in arrays if key[:2] == "x_" and f"y_{key[2:]}" in arrays and key[2:] not in SPLITS]:
        raise DataError(f"{file}: {odd[0]!r} is of no part train, test or validation")
    parts = [part for part in ("train", "test", "validation") if {f"x_{part}", f"y_{part}"} <= arrays.keys()]
    if parts[:2] == ["train", "test"]:
        if len(shapes := {arrays[f"x_{part}"].shape[1:] for part in parts}) > 1:
            raise DataError(f"{file}: the parts {', '.join(parts)} differ in shape: {', '.join(map(str, shapes))}")
        arrays["inputs"] = np.concatenate([arrays[f"x_{part}"] for part in parts])
        arrays["labels"] = np.concatenate([arrays[f"y_{part}"] for part in parts])
        arrays["split"] = np.repeat(parts, [len(arrays[f"y_{part}"]) for part in parts])
    return {COLUMNS.get(key, key): array for key, array in arrays.items()}


# -- a function
def read_python(name: str, settings: DataSettings) -> RawData:
    """Data from a function of the user's: ``dataset = "module:function"``.

    It is called as ``function(data_dir)``, once on a machine until its package, or a file in ``data-dir``, changes, and
    returns a dictionary of arrays as `from_arrays` describes, or an object with attributes of these names.
    """
    function = load(name, "dataset")
    try:
        found = function(settings.data_dir)
    except Exception as error:  # a user's function may raise anything
        raise DataError(f"dataset = {name!r}: it failed ({type(error).__name__}: {error})") from error
    if not isinstance(found, Mapping):
        found = {key: getattr(found, key) for key in KEYS if hasattr(found, key)} or found
    if not isinstance(found, Mapping):
        raise DataError(f"dataset = {name!r}: it returned {type(found).__name__}, not a dictionary of arrays")
    if odd := [key for key in found if key not in KEYS and not str(key).startswith("_")]:
        raise DataError(f"dataset = {name!r}: it returned {odd[0]!r}; choose among {', '.join(KEYS)}")
    return from_arrays(found, f"dataset = {name!r}", settings.classes, gaps=settings.impute != "none")


def locate_python(name: str, settings: DataSettings) -> tuple[Path, ...]:
    """The files of the function's package, or its module's one file, and ``data-dir``."""
    load(name, "dataset")
    if not (files := files_of(module_of(name))):
        raise DataError(f"dataset = {name!r}: stands in no file, as in a notebook; save it as a module, or give arrays")
    return (*files, *((Path(settings.data_dir).expanduser().absolute(),) if settings.data_dir else ()))


# -- Hugging Face
def read_hugging_face(name: str, settings: DataSettings) -> RawData:
    """``dataset = "hf:NAME"``: the folder NAME in ``data-dir``, or else the hub's data set of that name.

    The folder is one that ``save_to_disk`` wrote, or that ``load_dataset`` reads. From the hub's cache without the
    network, unless ``download = true``. The parts ``test`` and ``validation`` are that, all others for training. The
    column ``label`` (or the only one of ``ClassLabel``) has the labels, ``client`` or ``domain`` the clients; the
    inputs are the column of images, else the columns of text, else those of numbers.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"dataset = {name!r}: needs the package datasets; pip install 'protofl[hf]'") from error
    make_private(cache := cache_folder(settings.cache_dir))
    # for copies of the user's data: not the cache of the package; a killed process leaves an entry that `purge` removes
    with TemporaryDirectory(f"-{digest(name)}", dir=cache) as scratch:
        try:
            opened = _opened(datasets, name, settings, scratch)
            parts = dict(opened) if isinstance(opened, Mapping) else {"train": opened}
            whole = datasets.concatenate_datasets(list(parts.values()))
        except Exception as error:  # the package raises many kinds
            reachable = settings.data_dir or settings.download
            hint = "" if reachable else "; set data-dir to a folder that has it, or download"
            raise DataError(f"dataset = {name!r}: cannot be read ({type(error).__name__}: {error}){hint}") from error
        kinds = whole.features
        names = [column for column, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
        if "label" not in kinds and len(names) != 1:
            raise DataError(f"dataset = {name!r}: has no column 'label'; its columns: {', '.join(kinds)}")
        label = "label" if "label" in kinds else names[0]
        if odd := [part for part in parts if part not in SPLITS and re.match("test|val|dev|eval", part.lower())]:
            raise DataError(f"dataset = {name!r}: would train on part {odd[0]!r}: call it test, validation or train_…")
        split = [part if part in ("test", "validation") else "train" for part in parts]
        inputs, joined = _inputs(datasets, whole, label, name, settings)
        arrays: dict[str, Any] = {"inputs": inputs, "labels": np.array(whole[label][:])}
        arrays["split"] = np.repeat(split, [len(part) for part in parts.values()])
        arrays["classes"] = kinds[label].names if label in names else None
        arrays |= {name: np.array(whole[name][:]) for name in ("domain", "client", "split") if name in kinds}
    where, gaps = f"dataset = {name!r}", settings.impute != "none"
    return replace(from_arrays(arrays, where, settings.classes, gaps=gaps), columns=checked_names(joined, where))


def locate_hugging_face(name: str, settings: DataSettings) -> tuple[Path, ...]:
    """The folder NAME in ``data-dir``; nothing where the data set is in the hub's cache."""
    if not settings.data_dir:
        return ()
    inside = Path(name.removeprefix("hf:"))
    folder = data_dir_of(settings) / inside
    if inside.is_absolute() or ".." in inside.parts or not folder.is_dir():
        raise DataError(f"dataset = {name!r}: there is no folder {name.removeprefix('hf:')!r} in data-dir")
    return (folder,)


def _opened(datasets: Any, name: str, settings: DataSettings, scratch: str) -> Any:
    if settings.data_dir:
        (folder,) = locate_hugging_face(name, settings)
        saved = any((folder / file).exists() for file in ("dataset_dict.json", "state.json"))
        return datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder), cache_dir=scratch)
    with patch.object(datasets.config, "HF_HUB_OFFLINE", not settings.download):
        return datasets.load_dataset(name.removeprefix("hf:"))


def _inputs(datasets: Any, whole: Any, label: str, name: str, settings: DataSettings) -> tuple[Any, list[str]]:
    """The inputs, and the columns of text that were joined for them, or of one number each."""
    kinds = {column: kind for column, kind in whole.features.items() if column not in (label, *COLUMNS)}
    images = [column for column, kind in kinds.items() if isinstance(kind, datasets.Image)]
    strings = [column for column, kind in kinds.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    texts = {column: whole[column][:] for column in strings if not images}
    check_no_label(texts, whole[label][:], f"dataset = {name!r}")
    try:
        if images:
            return np.stack([square_rgb(image, settings.image_size or DEFAULT_SIZE) for image in whole[images[0]]]), []
        if texts:
            joined = (" ".join(parts) for parts in zip(*texts.values(), strict=True))
            return tokens(joined, settings.text_length), [*texts]
        parts = {column: np.asarray(whole[column][:], np.float32).reshape(len(whole), -1) for column in kinds}
        numbers = {column: part[:, 0].tolist() for column, part in parts.items() if part.shape[1] == 1}
        check_no_label(numbers, whole[label][:], f"dataset = {name!r}", numbers=True)
        return np.concatenate([*parts.values()], axis=1), [*numbers] * (len(numbers) == len(parts))
    except (ValueError, TypeError) as error:
        what = f"images of column {images[0]}" if images else f"columns {', '.join(kinds)}"
        raise DataError(f"dataset = {name!r}: {what} cannot be used: {error}") from error

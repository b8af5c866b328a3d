"""Data of the user's own: a manifest, arrays, tables, texts, a function, or Hugging Face's."""

import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unicodedata import category

import numpy as np

from protofl_common.basics.files import cache_folder, digest, make_private
from protofl_common.basics.replaced import replaced
from protofl_common.basics.text import first_of, printable, with_composed_letters
from protofl_common.config.architectures import VOCABULARY
from protofl_common.config.lists import names_in
from protofl_common.config.python_code import files_of
from protofl_common.config.python_names import load, module_of
from protofl_common.config.sections import DataSettings
from protofl_common.data.door import (
    FEW_CLASSES,
    KEYS,
    SPLITS,
    from_arrays,
    is_number,
    number,
    say,
)
from protofl_common.data.images import (
    DEFAULT_SIZE,
    EXTENSIONS,
    data_dir_of,
    square_rgb,
    with_images,
)
from protofl_common.data.raw import DataError, Images, Ints, RawData, digests
from protofl_common.data.several_labels import JOINED, SeveralLabels
from protofl_common.data.table import (
    ANNOTATION_COLUMNS,
    TableFile,
    check_annotations,
    checked_names,
    chosen_columns,
    chosen_names,
    name_and_categories,
    read_columns,
)
from protofl_common.tasks import UNLABELLED

ARRAY_SUFFIXES = (".npz", ".csv", ".parquet")
_NO_BLANKS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Letters of Thai, Lao, Burmese, Khmer, Japanese and Chinese: no blanks between words."""
_MARKS = "".join(chr(code) for code in range(0x300, 0x10000) if category(chr(code))[0] == "M")
"""Signs that belong to the letter before them, as vowels in Hindi do: ``\\w`` has none of them."""
_LETTERS = rf"[^\W{_NO_BLANKS}]"
_WORD = re.compile(rf"[{_NO_BLANKS}]|{_LETTERS}+(?:[{_MARKS}\u200c\u200d]+{_LETTERS}*)*|[^\w\s]")


def file_of(settings: DataSettings, suffixes: Sequence[str]) -> Path:
    """Return the file ``data-dir``, or the only file in that folder with one of the ``suffixes``.

    DataError if there is none, or several.
    """
    kinds = ", ".join(f"*{suffix}" for suffix in suffixes)
    wanted = f"dataset {settings.dataset!r} needs one file ({kinds})"
    where = f"data-dir = {settings.data_dir!r}: {wanted}"
    if not settings.data_dir:
        raise DataError(f"{where}; set data-dir to it")
    path = _data_path(settings)
    if not (path.is_file() or path.is_dir()):  # a pipe can be read only once
        raise DataError(f"{where}; there is no such file or folder")
    candidates = [path]
    if path.is_dir():  # what begins so, other programs have made: ._a.csv, ~$a.csv
        candidates = [file for file in sorted(path.iterdir()) if file.name[0] not in ".~"]
    files = [file for file in candidates if file.suffix.lower() in suffixes]
    if not files:
        raise DataError(f"{where}; none there")
    if len(files) > 1:
        several = ", ".join(file.name for file in files)
        raise DataError(f"{where}; several: {several}; name one of them")
    return files[0]


def _data_path(settings: DataSettings) -> Path:
    return Path(settings.data_dir).expanduser().absolute()


def read_manifest(settings: DataSettings) -> RawData:
    """Read a CSV file ``file,label,client,split`` and the images that it lists.

    ``file`` is an image's path from the folder of the CSV file; ``client`` and ``split`` are
    optional. Images are decoded as those of folders are (`with_images`). DataError for a file that
    is not there.
    """
    rows = TableFile(file_of(settings, (".csv",)))
    several = SeveralLabels.of(settings)
    columns, of_labels = _annotations(rows, several, "file")
    unused = [name for name in rows.others if name not in {"file", *of_labels}]
    check_annotations(unused, rows.where, "left out")
    if several is not None:
        several.check_left_out(unused, columns.get("classes"), rows.where)
    files = [rows.file.parent / name for name in rows.columns["file"]]
    for row, name in enumerate(rows.columns["file"]):
        if not files[row].is_file():
            place = rows.place(row)
            raise DataError(f"{rows.file}, {place}, column 'file': there is no file {name!r}")
    _say_what_is_left_out("columns", unused, rows.where)
    return with_images(columns, files, rows.where, settings, rows.place)


def _annotations(
    rows: TableFile, several: SeveralLabels | None, *needed: str
) -> tuple[dict[str, Any], set[str]]:
    """Return the columns that are no inputs (`Columns.annotations`), and which have the labels."""
    if rows.note:
        say(rows.note)
    if several is None:
        return rows.annotations(*needed, "label"), {"label"}
    annotations = rows.annotations(*needed)
    labels, of_labels = several.in_table(rows.columns, rows.where)
    return annotations | labels, of_labels


def _say_what_is_left_out(kind: str, left_out: Sequence[str], where: str) -> None:
    if left_out:
        say(f"{where}: left out the {kind} {first_of(left_out)}")


def locate_manifest(settings: DataSettings) -> tuple[Path, ...]:
    """Return the manifest, and the images that it lists."""
    file = file_of(settings, (".csv",))
    names = TableFile(file).columns.get("file", ())
    return (file, *(Path(os.path.normpath(file.parent / name)) for name in names))


def read_arrays(settings: DataSettings) -> RawData:
    """Read a file of arrays ``inputs``, ``labels``, … (``.npz``), or a table (CSV, Parquet).

    A table has a column ``label``. DataError if an ``.npz`` file is to have columns.
    """
    file = file_of(settings, ARRAY_SUFFIXES)
    where = str(file)
    gaps = settings.impute != "none"
    several = SeveralLabels.of(settings)
    if file.suffix.lower() == ".npz":
        named = settings.columns or settings.drop or settings.one_hot
        if named:
            raise DataError(f"{file} has no columns that could be named; leave out {named!r}")
        arrays = _npz(file)
        # `_npz` has read x_train, y_train and the like: what follows "x_" is a part
        others = [name for name in arrays if name not in KEYS and name[2:] not in SPLITS]
        _say_what_is_left_out("arrays", others, where)
        return from_arrays(arrays, where, settings.classes, gaps=gaps, several=several)

    rows = TableFile(file)
    arrays, of_labels = _annotations(rows, several)
    label_columns = {*of_labels}
    if several is not None:
        label_columns |= {*several.meaning}  # also those that ``label-map`` leaves out
    candidates = [name for name in rows.others if name not in label_columns]
    chosen = chosen_columns(settings, candidates, where)
    names = [name_and_categories(column)[0] for column in chosen]
    used = {*of_labels, *names, *names_in(settings.drop)}  # what is dropped, the owner knows
    unused = [name for name in rows.others if name not in used]
    if several is not None:
        several.check_inputs(chosen, several.names, where)  # before an error of the column's values
        several.check_left_out(unused, arrays.get("classes"), where)
    arrays["inputs"] = read_columns(rows.columns, chosen, where, rows.place, gaps=gaps)
    data = from_arrays(
        arrays,
        where,
        settings.classes,
        rows.place,
        gaps=gaps,
        columns=chosen,
        several=several,
    )
    inputs_by_name = {name: rows.columns[name] for name in names}
    say_what_tells_labels(inputs_by_name, data.labels, data.classes, where)
    _say_what_is_left_out("columns", unused, where)
    return data


def locate_arrays(settings: DataSettings) -> tuple[Path, ...]:
    """The file of arrays, or of a table."""
    return (file_of(settings, ARRAY_SUFFIXES),)


def read_text(settings: DataSettings) -> RawData:
    """Read one or two CSV files of texts, and make tokens of these.

    A text is all columns beside ``label`` and the like, joined by spaces; a file without a header
    has the label first. Of two files one is for tests (`locate_text`). DataError if they have not
    the same columns, or if one of several columns of texts copies the label (`check_no_label`).
    """
    where = settings.data_dir
    parts = [with_label(file) for file in locate_text(settings)]
    joined = checked_names(parts[0].others, where)
    check_annotations(joined, where)
    only_in_one = set(parts[0].names) ^ set(parts[-1].names)
    if only_in_one:
        names = ", ".join(sorted(only_in_one))
        raise DataError(f"{where}: only one of its files has a column {names}")

    annotations = [_annotations(rows, None)[0] for rows in parts]
    texts = [rows.texts(joined) for rows in parts]
    arrays: dict[str, Any] = {}
    for key in annotations[0]:
        arrays[key] = list(chain.from_iterable(part[key] for part in annotations))
    texts_by_column = {
        name: list(chain.from_iterable(rows.columns[name] for rows in parts)) for name in joined
    }
    # in all files together: in a few texts a column may fit the labels by chance
    check_no_label(texts_by_column, arrays["labels"], where)
    if len(parts) == 2 and "split" not in arrays:  # test.csv comes first, see `locate_text`
        arrays["split"] = np.repeat(("test", "train"), [len(rows.lines) for rows in parts])
    all_texts = [*chain.from_iterable(texts)]
    arrays["inputs"] = tokens(all_texts, settings.text_length)
    places = [f"{rows.file.name}, line {line}" for rows in parts for line in rows.lines]
    columns = joined if parts[0].has_header else ()
    data = from_arrays(arrays, where, settings.classes, places.__getitem__, columns=columns)
    others = {file.name for file in parts[0].file.parent.glob("*.csv")} - {"test.csv", "train.csv"}
    if len(parts) == 2 and others:
        cure = "rows of another part belong into one of the two files, with a column split"
        say(f"{where}: left out {first_of(sorted(others))}; {cure}")
    return replace(data, contents=digests(text.encode() for text in all_texts))


def locate_text(settings: DataSettings) -> tuple[Path, ...]:
    """Return the only CSV file, or ``test.csv`` and ``train.csv`` if ``data-dir`` has both."""
    folder = _data_path(settings)
    both = (folder / "test.csv", folder / "train.csv")
    if all(file.is_file() for file in both):
        return both
    return (file_of(settings, (".csv",)),)


def check_no_label(columns: Mapping[str, Sequence[Any]], labels: Any, where: str) -> None:
    """Raise DataError for a column of texts that copies the label in other words (`_renames`).

    If there is only one column, it is no copy beside the input but the input, and passes.
    """
    texts = [str(label) for label in labels]
    for name, values in columns.items():
        if len(columns) > 1 and _renames(values, texts):
            copies = f"column {name!r} says the label in other words"
            raise DataError(f"{where}: {copies}; take it out of the data")


def say_what_tells_labels(
    columns: Mapping[str, Sequence[Any]], labels: Ints, names: Sequence[str], where: str
) -> None:
    """Print a line for each column of numbers that numbers the rows, or copies a label.

    It gives the label away, in rows that are sorted by it; but it may also fit it by chance, or be
    known before it. Of several labels a sample each has one of the ``names``.
    """
    with_few_values = {}
    num_classes = len(np.unique(labels))
    for name, values in columns.items():
        if _numbers_rows(values):
            say(f"{where}: column {name!r} numbers the rows; drop it, unless it is known of others")
        if _has_few_values(values, max(FEW_CLASSES, num_classes)):
            with_few_values[name] = list(values)
    for position, labels_N in enumerate(labels.reshape(len(labels), -1).T):
        label = f"the label {names[position]!r}" if labels.ndim == 2 else "the label"
        known = np.flatnonzero(labels_N != UNLABELLED).tolist()
        texts = [str(value) for value in labels_N[known].tolist()]
        for name, values in with_few_values.items():
            if _renames([values[row] for row in known], texts):
                copies = f"column {name!r} says {label} in other words"
                say(f"{where}: {copies}; drop it, unless it is known before the label")


def _numbers_rows(values: Sequence[Any]) -> bool:
    """True if the values are 0, 1, 2, … or 1, 2, 3, …, and more than `FEW_CLASSES`."""
    first = number(values[0])
    if len(values) <= FEW_CLASSES or first not in (0, 1):
        return False
    return all(number(value) == row for row, value in enumerate(values, int(first)))


def _renames(values: Sequence[Any], labels: list[str]) -> bool:
    """True if each value stands for one label, and each label for one value.

    False if that tells nothing: any constant column would rename a single label, and any column of
    distinct values would rename labels that are all different.
    """
    num_labels = len(set(labels))
    if num_labels == 1 or num_labels == len(labels):
        return False
    if not _has_few_values(values, num_labels) or len(set(values)) != num_labels:
        return False
    return len(set(zip(values, labels, strict=True))) == num_labels


def _has_few_values(values: Sequence[Any], most: int) -> bool:
    """Return whether the first rows have at most so many different values."""
    # most columns have more already in the very first rows, so that the others need not be read
    return all(len(set(values[:rows])) <= most for rows in (2 * most, 10_000))


def tokens(texts: Iterable[str], length: int) -> Ints:
    """Return the first ``length`` words and signs of each text as tokens, int64 [N, length].

    The token of a word is 1 + crc32(word) mod (`VOCABULARY` − 1): so all sites agree without a
    common list of words (feature hashing; Weinberger et al., ICML 2009). 0 fills up short texts.
    Letters are composed first, as programs write an accent in two ways.
    """
    words_of = [_WORD.findall(with_composed_letters(text.lower()))[:length] for text in texts]
    result = np.zeros((len(words_of), length), dtype=np.int64)
    for row, words in enumerate(words_of):
        hashes = [zlib.crc32(word.encode()) for word in words]
        result[row, : len(words)] = [1 + code % (VOCABULARY - 1) for code in hashes]
    return result


def with_label(file: Path) -> TableFile:
    """Read a file of texts; if it has no header, its first column is the label.

    A file without a column ``label`` has no header if the first value in its first row is a whole
    number, or occurs again below: then it is a label. The names ``text``, ``text 1`` and so on are
    a header, too. Otherwise the row may be a header that lacks that column, or a sample: DataError.
    """
    rows = TableFile(file)
    names_texts = all(re.fullmatch(r"text( \d+)?", name) for name in rows.names)
    if names_texts or "label" in rows.columns:
        return rows
    first, *others = rows.names  # read as a header so far
    if not first.isdecimal() and first not in rows.columns[first]:
        has = f"has no column 'label', only {', '.join(rows.names)}"
        no_other = f"or if that is its first row, no other has the label {first!r}"
        raise DataError(f"{file}: {has}; {no_other}; call columns of texts alone text, text 1, …")
    header = ["label"] + [f"text {number}" for number, _ in enumerate(others, 1)]
    return TableFile(file, header)


def _npz(file: Path) -> dict[str, Any]:
    """Read the arrays of an ``.npz`` file, by the names that `from_arrays` knows.

    ``x_train``, ``y_train``, ``x_test``, ``y_test``, and perhaps the same of ``validation``, are
    joined to ``inputs``, ``labels`` and ``split``. If those of ``train`` or ``test`` are missing,
    nothing is joined, and `from_arrays` will name what there is.
    """
    arrays: dict[str, Any] = {}
    name = ""  # of the array that is being read
    try:
        with np.load(file, allow_pickle=False) as opened:
            for name in opened.files:
                arrays[name] = opened[name]
    except Exception as error:  # what is raised of a broken file may be anything
        which = f", at the array {name!r}" if name else ""
        wanted = "plain NumPy arrays, series of one length, names as labels.astype(str)"
        reason = printable(str(error))
        raise DataError(f"{file} cannot be read as {wanted}{which} ({reason})") from error

    # the parts of which there are both: "train" for x_train and y_train
    named = [key[2:] for key in arrays if key.startswith("x_") and f"y_{key[2:]}" in arrays]
    if named and "inputs" in arrays:
        both = ", ".join(map(repr, arrays))
        raise DataError(f"{file}: has inputs, and x_… beside them ({both}); leave one out")
    for part in named:
        if part not in SPLITS:
            name = f"x_{part}"
            raise DataError(f"{file}: {name!r} is of no part train, test or validation")
    parts = [part for part in ("train", "test", "validation") if part in named]
    if parts[:2] == ["train", "test"]:
        inputs = [arrays[f"x_{part}"] for part in parts]
        labels = [arrays[f"y_{part}"] for part in parts]
        shapes = {array.shape[1:] for array in inputs}
        if len(shapes) > 1:
            differ = f"differ in shape: {', '.join(map(str, shapes))}"
            raise DataError(f"{file}: the parts {', '.join(parts)} {differ}")
        arrays["inputs"] = np.concatenate(inputs)
        arrays["labels"] = np.concatenate(labels)
        arrays["split"] = np.repeat(parts, [len(array) for array in labels])
    # an array may be called as a table's column: ``label``
    return {ANNOTATION_COLUMNS.get(key, key): array for key, array in arrays.items()}


# -- a function
def read_python(name: str, settings: DataSettings) -> RawData:
    """Read data from a function of the user's: ``dataset = "module:function"``.

    It is called as ``function(data_dir)``, once on a machine until its package, or a file in
    ``data-dir``, changes. It returns a dictionary of arrays as `from_arrays` describes.
    """
    where = f"dataset = {name!r}"
    function = load(name, "dataset")
    try:
        data = function(settings.data_dir)
    except Exception as error:  # a user's function may raise anything
        raise DataError(f"{where}: it failed ({type(error).__name__}: {error})") from error
    if not isinstance(data, Mapping):
        kind = type(data).__name__
        raise DataError(f"{where}: it returned {kind}, not a dictionary of arrays")
    for key in data:
        if key not in KEYS:
            raise DataError(f"{where}: it returned {key!r}; choose among {', '.join(KEYS)}")
    gaps = settings.impute != "none"
    several = SeveralLabels.of(settings)
    return from_arrays(data, where, settings.classes, gaps=gaps, several=several)


def locate_python(name: str, settings: DataSettings) -> tuple[Path, ...]:
    """Return the files on which a function's data depend: those of its code, and ``data-dir``.

    Those of its code are all files of the function's package, or the one file of its module.
    DataError for a function that stands in no file.
    """
    load(name, "dataset")
    files = files_of(module_of(name))
    if not files:
        cure = "save it as a module, or give arrays"
        raise DataError(f"dataset = {name!r}: stands in no file, as in a notebook; {cure}")
    if settings.data_dir:
        return (*files, _data_path(settings))
    return tuple(files)


# -- Hugging Face
def read_hugging_face(name: str, settings: DataSettings) -> RawData:
    """Read Hugging Face's data set ``hf:NAME``: the folder NAME in ``data-dir``, or the hub's.

    The folder is one that ``save_to_disk`` wrote, or that ``load_dataset`` reads. Without
    ``data-dir`` it is the hub's data set, from the local cache unless ``download = true``. Samples
    of the part ``test`` are for testing, those of ``validation`` for validation, and all others for
    training (`_splits`), unless a column ``split`` says otherwise. The column
    ``label`` (or the only one of ``ClassLabel``) has the labels, ``client`` or ``domain`` the
    clients; the inputs are the column of images, or the columns of text, or those of numbers. Where
    a sample has several labels, the column ``labels`` or ``label`` lists them.
    """
    where = f"dataset = {name!r}"
    try:
        import datasets
    except ImportError as error:
        cure = "pip install 'protofl[hf]'"
        raise DataError(f"{where}: needs the package datasets; {cure}") from error

    cache = cache_folder(settings.cache_dir)
    make_private(cache)
    # the package copies the user's data: into this folder and not its own cache; what a killed
    # process leaves there, `purge` removes
    with TemporaryDirectory(f"-{digest(name)}", dir=cache) as scratch:
        try:
            opened = _opened(datasets, name, settings, scratch)
            parts = dict(opened) if isinstance(opened, Mapping) else {"train": opened}
            whole = datasets.concatenate_datasets(list(parts.values()))
        except Exception as error:  # the package raises many kinds
            has_source = settings.data_dir or settings.download
            hint = "" if has_source else "; set data-dir to a folder that has it, or download"
            what = f"{type(error).__name__}: {error}"
            raise DataError(f"{where}: cannot be read ({what}){hint}") from error

        several = SeveralLabels.of(settings)
        label, classes = _label_column(datasets, whole.features, several is not None, where)
        labels: Any = whole[label][:]
        if several is None:
            if classes:  # the column has indices into these names
                name_by_index = dict(enumerate(classes))
                labels = [name_by_index.get(number, number) for number in labels]
            labels = np.array(labels)
        elif classes:
            labels = [[classes[number] for number in row] for row in labels]
        splits = _splits(parts, where)  # for each part
        inputs, columns = _inputs(datasets, whole, label, name, settings)
        arrays: dict[str, Any] = {
            "inputs": inputs,
            "labels": labels,
            "split": np.repeat(splits, [len(part) for part in parts.values()]),
            "classes": classes,
        }
        for column in ("domain", "client", "split"):
            if column in whole.features:
                arrays[column] = np.array(whole[column][:])
    data = from_arrays(
        arrays,
        where,
        settings.classes,
        gaps=settings.impute != "none",
        columns=checked_names(columns, where),
        several=several,
    )
    # no digests of the samples (`RawData.contents`): the inputs already depend on settings of a run
    # such as text-length and image-size, by which `test-from = "keyed"` must not divide
    return replace(data, contents=np.zeros((len(whole), 0), np.uint8))


def _label_column(
    datasets: Any, kinds: Any, several: bool, where: str
) -> tuple[str, list[str] | None]:
    """Return the column of the labels, and the names of their classes, or None without names.

    ``datasets`` is the package, ``kinds`` has the type of each column: the names are those of
    ``ClassLabel``, or of a list of them where a sample has ``several`` labels. DataError if no
    column has the labels.
    """
    wanted = "'label'"
    found = [name for name, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
    if "label" in kinds:
        found = ["label"]
    if several:
        wanted = "'labels' with a list of labels for each sample"
        found = [column for column in JOINED if column in kinds][:1]
    if len(found) != 1:
        raise DataError(f"{where}: has no column {wanted}; its columns: {', '.join(kinds)}")
    kind = kinds[found[0]]
    kind = getattr(kind, "feature", kind)  # of the entries of a list
    return found[0], getattr(kind, "names", None)


def _splits(parts: Mapping[str, Any], where: str) -> list[str]:
    """Return what each part of a data set is for: "test", "validation", or else "train".

    DataError for a part with a name such as ``testing`` or ``clean_test``, which would be trained
    on; but ``train_val`` is for training.
    """
    is_for_tests = re.compile(r"(?!train)(.*[\W_])?(test|val|dev|eval|hold_?out)")
    for part in parts:
        if part not in SPLITS and is_for_tests.match(part.lower()):
            cure = "call it test, validation or train_…"
            raise DataError(f"{where}: would train on part {part!r}: {cure}")
    return [part if part in ("test", "validation") else "train" for part in parts]


def locate_hugging_face(name: str, settings: DataSettings) -> tuple[Path, ...]:
    """Return the folder of the data set ``hf:NAME``, which is NAME in ``data-dir``.

    () without ``data-dir``: the data set then comes from the hub or its cache. DataError if
    ``data-dir`` has no such folder, or NAME leads out of it.
    """
    if not settings.data_dir:
        return ()
    folder_name = name.removeprefix("hf:")
    inside = Path(folder_name)
    folder = data_dir_of(settings) / inside
    if inside.is_absolute() or ".." in inside.parts or not folder.is_dir():
        raise DataError(f"dataset = {name!r}: there is no folder {folder_name!r} in data-dir")
    return (folder,)


def _opened(datasets: Any, name: str, settings: DataSettings, scratch: str) -> Any:
    """Open a data set of Hugging Face's: an object of the package, or a dictionary of its parts.

    ``scratch`` is a folder for the package's copies of files in ``data-dir``. The hub is asked only
    with ``download``.
    """
    if not settings.data_dir:
        with replaced(datasets.config, HF_HUB_OFFLINE=not settings.download):
            return datasets.load_dataset(name.removeprefix("hf:"))
    (folder,) = locate_hugging_face(name, settings)
    # ``save_to_disk`` writes one of these: of several parts, or of a single one
    if any((folder / file).exists() for file in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(str(folder))
    return datasets.load_dataset(str(folder), cache_dir=scratch)


def _inputs(
    datasets: Any, whole: Any, label: str, name: str, settings: DataSettings
) -> tuple[Any, list[str]]:
    """Return the inputs of a data set, and the columns that name its features.

    ``whole`` is the data set with all parts, ``label`` its column of labels. The settings
    ``columns`` and ``drop`` say which others are inputs: one column of images, or columns that are
    all texts, or all numbers. The columns are returned for texts, which are joined, and for numbers
    if each column has one number a sample; for other inputs [] is. DataError for other columns.
    """
    where = f"dataset = {name!r}"
    labels = whole[label][:]
    names = [column for column in whole.features if column not in (label, *ANNOTATION_COLUMNS)]
    picked = {*chosen_names(settings, names, where)}
    kinds = {column: whole.features[column] for column in names if column in picked}
    images = [column for column, kind in kinds.items() if isinstance(kind, datasets.Image)]
    texts = {}
    for column, kind in kinds.items():
        if getattr(kind, "dtype", "") in ("string", "large_string"):
            texts[column] = whole[column][:]
    num_others = len(kinds) - len(images) - len(texts)  # of numbers, or of what cannot be used
    are_mixed = sum(map(bool, (images, texts, num_others))) > 1
    if len(images) > 1 or are_mixed:
        what = f"{', '.join(kinds)}: one of images, all of text, or all of numbers can be inputs"
        raise DataError(f"{where}: its columns are {what}; say which by columns or drop")
    for column, values in texts.items():
        first = str(values[0]) if values else ""
        if Path(first).suffix.lower() in EXTENSIONS:
            cure = f"cast_column({column!r}, Image())"
            raise DataError(f"{where}: column {column!r} names files of images; {cure}")
        if None in values:
            row = values.index(None)
            raise DataError(f"{where}: sample {row} has no text in column {column!r}; fill it in")
    check_no_label(texts, labels, where)
    for column, values in texts.items():
        if all(map(is_number, values)):
            cure = f"cast_column({column!r}, Value('float32')), or drop it"
            raise DataError(f"{where}: column {column!r} has numbers written as texts; {cure}")
    if images:
        return _decoded(whole, images[0], settings.image_size or DEFAULT_SIZE, where), []
    try:
        if texts:
            joined = (" ".join(parts) for parts in zip(*texts.values(), strict=True))
            return tokens(joined, settings.text_length), list(texts)

        features = {}  # of each column, [N, numbers of a sample]
        for column in kinds:
            values = np.asarray(whole[column][:], np.float64)
            features[column] = values.reshape(len(whole), -1)
        single = {}  # columns with one number a sample
        for column, numbers in features.items():
            if numbers.shape[1] == 1:
                single[column] = numbers[:, 0].tolist()
        _, label_numbers = np.unique([str(label) for label in labels], return_inverse=True)
        say_what_tells_labels(single, label_numbers, (), where)
        inputs = np.concatenate(list(features.values()), axis=1)
        return inputs, list(single) if len(single) == len(features) else []
    except (ValueError, TypeError) as error:
        what = f"columns {', '.join(kinds)}"
        raise DataError(f"{where}: {what} cannot be used: {error}") from error


def _decoded(whole: Any, column: str, side: int, where: str) -> Images:
    """Return the images of a column, uint8 [N, 3, side, side]; DataError for an unreadable one."""
    images: list[Images] = []
    try:
        for image in whole[column]:
            images.append(square_rgb(image, side))
    except Exception as error:  # what decoders raise of a broken image may be anything
        what = f"the image of sample {len(images)}, column {column!r}, cannot be read ({error})"
        raise DataError(f"{where}: {what}; repair or remove it") from error
    return np.stack(images)

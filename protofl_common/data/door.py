"""The door: whatever becomes samples passes it, for training and for prediction alike.

`from_arrays` admits a data set, `checked_inputs` the inputs that an exported model is given, too
(`objects.inputs_for`). What they do not admit they name, with its place and what would be right.
"""

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.text import (
    first_of,
    is_short_and_printable,
    printable,
    problem_of_name,
    with_composed_letters,
)
from protofl_common.config.lists import as_list, parts_of
from protofl_common.data.raw import (
    VALIDATION,
    DataError,
    Images,
    Inputs,
    Ints,
    Place,
    RawData,
    any_place,
    described,
    digests,
)

T = TypeVar("T")
KEYS = ("inputs", "labels", "client", "split", "classes", "domain")
SPLITS = {
    "train": 0,
    "test": 1,
    "validation": VALIDATION,
    "0": 0,
    "1": 1,
    "2": VALIDATION,
    "False": 0,
    "True": 1,
}
NO_LABELS = frozenset(("", "nan", "<na>"))
"""Texts that never are a name, in lower case: no value at all, as NumPy and pandas write it."""
GAPS = NO_LABELS | frozenset(
    (
        *("?", ".", "-", "--", "na", "n/a", "n.a.", "null", "(null)", "<null>", "\\n", "nil"),
        *("none", "missing", "(blank)", "undefined", "not available", "unlabeled", "unlabelled"),
        *("-nan", "#n/a", "#n/a n/a", "#na", "1.#ind", "1.#qnan", "-1.#ind", "-1.#qnan"),
        *("#null!", "#div/0!", "#value!", "#ref!", "#name?", "#num!"),
    )
)
"""Texts that stand for no value, in lower case: pandas' own, Excel's errors, databases' nulls."""
CODES_OF_GAPS = frozenset((99, 999, 9999, 65535))
"""Numbers that stand for no label in surveys, and in images of two bytes a pixel."""
JOINTS = "|;,+&/"  # signs between several labels of a sample
FEW_CLASSES = 20  # different labels that are taken for classes, whatever they look like
MOST_CHANNELS = 4  # of usual images; a line tells of more
MOST_ROUNDED = 1e-4  # of a column's range: a number that float32 changes by more is worth a line
NUMBER_KINDS = "biuf"  # NumPy's signs for bool, whole numbers and floating point
WHOLE = re.compile(r"-?\d{1,18}")  # that fits into int64
PROGRESS_SECONDS = 5.0  # seconds between two lines of progress


_doubts: ContextVar[list[str]] = ContextVar("_doubts")


@contextmanager
def doubts() -> Iterator[list[str]]:
    """Collect what `say` prints in this block, for those who open the data from the cache later."""
    lines: list[str] = []
    before = _doubts.set(lines)
    try:
        yield lines
    finally:
        _doubts.reset(before)


def say(text: str) -> None:
    """Print a line, once, about data that are admitted, but perhaps not as their owner thinks."""
    lines = _doubts.get([])  # lost outside of `doubts`
    if text not in lines:
        lines.append(text)
        show(text)


def show(text: str) -> None:
    """Print a line for the owner of the data."""
    print(f"protofl: {text}", file=sys.stderr, flush=True)


def with_progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield each item; print a line with their number so far every `PROGRESS_SECONDS`."""
    reported = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        if time.monotonic() > reported + PROGRESS_SECONDS:
            reported = time.monotonic()
            show(f"{count:,} {what}")


# -- a data set
class LabelReader(Protocol):
    """Reads labels where a sample has several (`several_labels.SeveralLabels`)."""

    def read(
        self, values: Any, columns: tuple[str, ...], where: str, place: Place
    ) -> tuple[Ints, tuple[str, ...]]:
        """Return labels [N, L], and their names; ``columns`` are those that the data give."""

    def check_inputs(self, columns: Iterable[str], labels: Iterable[str], where: str) -> None:
        """Raise DataError for a column of inputs that has the name of a label."""


def from_arrays(
    arrays: Mapping[str, Any],
    where: str,
    classes: str = "",
    place: Place = any_place,
    *,
    gaps: bool = False,
    columns: tuple[str, ...] = (),
    several: LabelReader | None = None,
) -> RawData:
    """Check named arrays, and make a data set of them.

    Errors name the arrays' origin as ``where``, and a sample by ``place``. The arrays:

    ``inputs``   [N, …]: images uint8 [N, channels, H, W]; numbers, floating point (a table
                 [N, features], a signal [N, channels, steps], …); tokens, whole numbers from 0
                 [N, length], where 0 is padding; or a function that returns them, called after all
                 else is right.
    ``labels``   [N], an array also [N, 1]: names, or whole numbers.
    ``client``   [N], optional: whose it is (``partition = "natural"``, or a patient); or
                 ``domain``: of which scanner.
    ``split``    [N], optional: ``train`` or ``test`` (or 0 or 1), for ``test-from = "official"``
                 and its like; or ``validation`` (2), whatever ``test-from`` says.
    ``classes``  optional: names in label order; labels that are numbers are then indices into them.

    The argument ``classes``, a setting, replaces that array; if they share names, labels that are
    numbers are still indices into the array, whose order may be another. Without an array numbers
    are indices into the setting, but names if one of its names is a number (or True). Without
    either the classes are the labels that occur, sorted, which may differ between sites.

    DataError when something is missing, of the wrong type or length, or not finite; with ``gaps``,
    numbers may be NaN. ``columns`` are the names of the features. ``several`` reads the labels
    where a sample has several.
    """
    present = {key: value for key, value in arrays.items() if value is not None}
    for key in ("inputs", "labels"):
        if key not in present:
            names_present = ", ".join(map(repr, arrays)) or "nothing"
            raise DataError(f"{where}: has no {key!r}, only {names_present}")
    if "client" in present and "domain" in present:
        raise DataError(f"{where}: has both client and domain; leave one of them out")
    given_labels = present["labels"]
    if isinstance(given_labels, str | bytes) or not np.iterable(given_labels):
        shown = printable(repr(given_labels), 40)
        raise DataError(f"{where}: labels are {shown}, no list with one for each input")
    inputs = present["inputs"]
    if callable(inputs):  # it is called at the end, after all cheap checks
        samples = len(present["labels"])
    else:
        inputs = checked_inputs(inputs, where, place, gaps=gaps)
        samples = len(inputs)

    annotations = {}
    keys = ["client", "domain", "split"]
    if several is None:
        _check_one_label_each(given_labels, where)
        keys.insert(0, "labels")
    elif len(present["labels"]) != samples:
        raise DataError(f"{where}: {len(present['labels'])} labels; there are {samples} inputs")
    for key in keys:
        if key not in present:
            continue
        column = as_array(present[key], f"{where}: {key}", place)
        if key == "labels" and column.shape[1:] == (1,):  # as Keras and MATLAB give labels
            column = column[:, 0]
        if not samples or column.shape != (samples,):
            shape = list(column.shape)
            raise DataError(f"{where}: {key} has shape {shape}; there are {samples} inputs")
        _check_none_missing(column, key, where, place)
        annotations[key] = column

    from_array = _names_of_array(present.get("classes", ()), where)
    if several is None:
        from_setting = class_names(classes)
        if "classes" in present and not from_setting:
            which = f"{where}: classes = {present['classes']!r}"
            check_class_names(from_array, which, "in label order")
        labels, names = _labels(annotations["labels"], from_setting, from_array, where, place)
    else:
        labels, names = several.read(given_labels, from_array, where, place)
        several.check_inputs(columns, names, where)
    domains = np.zeros(samples, np.int64)
    domain_names: tuple[str, ...] = ()
    for key in ("client", "domain"):  # one of them at most, as is checked above
        if key in annotations:
            unique, domains = np.unique(annotations[key].astype(str), return_inverse=True)
            domain_names = tuple(unique.tolist())
            _say_which_are_alike(domain_names, f"{where}: {key}")
    official = np.zeros(samples, np.uint8)
    if "split" in annotations:
        official = _official(annotations["split"], where, place)
    if callable(inputs):
        inputs = checked_inputs(inputs(), where, place, gaps=gaps)
    return RawData(
        inputs,
        labels,
        domains,
        official,
        names,
        domain_names,
        columns,
        by_client="client" in annotations,
        place=place,
    )


def without_copies(data: RawData, where: str) -> RawData:
    """Return the data with each image or signal once; a line counts what is left out.

    If copies stayed, one of them could be trained on and another tested. Equal rows of a table,
    and equal texts, may be different samples: they stay, and the line counts them. If the data have
    no `RawData.contents`, these become the digests of the inputs. DataError for copies of one image
    that differ in label, part, client or domain.
    """
    contents = digests(sample.tobytes() for sample in data.inputs)
    if not len(data.contents):
        data = replace(data, contents=contents)
    as_single_values = contents.view("V16").ravel()  # the 16 bytes of a digest are one
    different = np.unique(as_single_values, return_index=True, return_inverse=True)
    _, first_rows, number_N = different  # a number for each different content
    first_N = first_rows[number_N]  # for each sample the first row with the same inputs
    is_first = first_N == np.arange(len(first_N))
    copies = np.flatnonzero(~is_first)
    if not len(copies):
        return data

    # a number for each different label, or set of labels where a sample has several
    _, labels = np.unique(data.labels, axis=0, return_inverse=True)
    annotations: dict[str, NDArray[Any]] = {"labels": labels, "parts": data.official}
    annotations["clients or domains"] = data.domains
    what = "are equal in all inputs"
    if data.inputs.ndim == 2:  # a table, or texts
        # of each copy, the number of annotations in which it differs from the first
        differing = sum(
            column[copies] != column[first_N[copies]] for column in annotations.values()
        )
        counts = f"{len(copies)} of {len(first_N)} samples {what} to others"
        cure = "leave them out if they are copies, which may be trained on and tested"
        elsewhere = f"{np.count_nonzero(differing)} of another label, part or client"
        say(f"{where}: {counts} ({elsewhere}); {cure}")
        return data
    for name, column in annotations.items():
        wrong = copies[column[copies] != column[first_N[copies]]]
        if len(wrong):
            copy = int(wrong[0])
            both = f"{data.place(int(first_N[copy]))} and {data.place(copy)}"
            many = f"of two {name} ({len(wrong)} such copies)"
            raise DataError(f"{where}: {both} {what}, and {many}; leave one of them out")
    example = data.place(int(copies[0]))
    say(f"{where}: left out {len(copies)} copies of other samples, such as {example}")
    kept = {}
    for field in ("inputs", "labels", "domains", "official", "contents"):
        kept[field] = getattr(data, field)[is_first]
    return replace(data, **kept)


# -- values
def as_array(
    value: Any, what: str, place: Place = any_place, *, are_names: bool = True
) -> NDArray[Any]:
    """Return an array of what a user gives as one: a list, a tensor, an array with a mask.

    A masked floating-point number becomes NaN. If the values are one column, and not all numbers,
    they become texts; None becomes the empty text. If they ``are_names``, DataError for a text that
    is too long or has a line break: a quote without its pair joins the rows of many patients to
    one.
    """
    if hasattr(value, "detach"):  # PyTorch's, perhaps with a gradient, or of a type of its own
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value
    if isinstance(value, list | tuple):  # `np.asarray` would forget the masks of the rows
        value = [_without_mask(row, what) for row in value]
    value = _without_mask(value, what)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{what} differ in shape ({error})") from error
    except (TypeError, RuntimeError) as error:  # of a sparse or quantised tensor
        raise DataError(f"{what} are no array ({printable(str(error))})") from error
    if array.dtype.kind in NUMBER_KINDS or array.ndim != 1 or not are_names:
        return array

    texts = []
    seen: set[str] = set()  # texts that are names already
    for row, text in enumerate(array.tolist()):
        if isinstance(text, str) and text in seen:
            texts.append(text)
            continue
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{what}: {place(row)} has {text!r}, no UTF-8") from error
        text = "" if text is None else with_composed_letters(str(text))
        problem = problem_of_name(text)
        if problem:
            shown = f"{place(row)} has '{printable(text, 40)}'"
            raise DataError(f"{what}: {shown}: {problem}")
        seen.add(text)
        texts.append(text)
    return np.array(texts, dtype=np.str_)


def _without_mask(value: Any, what: str) -> Any:
    """Return an array with NaN where it is masked; any other value is returned as it is."""
    if not isinstance(value, np.ma.MaskedArray):
        return value
    if value.dtype.kind == "f":
        return value.filled(np.nan)
    if np.ma.is_masked(value):
        raise DataError(f"{what} are masked, and no floating point; fill them in")
    return value


def checked_inputs(
    value: Any, where: str, place: Place = any_place, *, gaps: bool = False
) -> Inputs:
    """Return inputs as images, numbers or tokens (`RawData.inputs`), contiguous in memory.

    Floating point becomes float32, and a line is printed for a feature that loses digits by it
    (`warn_of_rounding`). With ``gaps``, numbers may be NaN. DataError names the first value that is
    wrong by ``where`` and ``place``.
    """
    array = as_array(value, f"{where}: inputs", are_names=False)
    shape = list(array.shape)
    is_empty = 0 in shape[1:]
    if array.ndim < 2 or is_empty or array.dtype.kind not in NUMBER_KINDS:
        wanted = "not numbers [N, …] of some samples"
        if array.dtype.kind in "US":
            wanted += "; texts are read from CSV files (dataset = 'text-csv')"
        raise DataError(f"{where}: inputs are {array.dtype} {shape}, {wanted}")
    # [N, H, W, channels], or a volume: the second axis is too long to be one of channels
    has_channels_last = (
        array.ndim >= 4 and shape[-1] in (1, 3, 4) and min(shape[1:-1]) > MOST_CHANNELS
    )
    if has_channels_last:
        wanted = "images are [N, channels, H, W], the channels first"
        raise DataError(f"{where}: inputs are {shape}: {wanted}")
    has_many_channels = array.ndim == 3 and shape[1] > MOST_CHANNELS and shape[1] >= shape[2]
    if has_many_channels and array.dtype.kind == "f":
        counts = f"{shape[1]} channels of {shape[2]} steps"
        say(f"{where}: inputs are {shape}, which are signals [N, channels, steps]: {counts}")
    if array.dtype.kind in "iu":
        return _whole_numbers(array, where, place)

    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite, and are refused
        numbers = np.ascontiguousarray(array, dtype=np.float32)
    wrong = np.isinf(numbers) if gaps else ~np.isfinite(numbers)
    if wrong.any():
        first = tuple(np.argwhere(wrong)[0].tolist())
        what = f"{place(first[0])} has {array[first]} at {list(first[1:])}"
        raise DataError(f"{where}: {what}; fill it in, or impute; a model takes float32")
    has_more_digits = array.dtype.itemsize > numbers.dtype.itemsize  # than float32, as float64
    if has_more_digits:
        for feature in range(shape[1]):
            name = f"feature {feature}"
            warn_of_rounding(array[:, feature], numbers[:, feature], where, place, name)
    return numbers


def _whole_numbers(array: NDArray[Any], where: str, place: Place) -> Inputs:
    """Return whole numbers as what they mean: bytes as images, uint8; others as tokens, int64."""
    are_bytes = array.dtype == np.uint8
    num_axes = 4 if are_bytes else 2
    if array.ndim != num_axes:
        kinds = "bytes must be images [N, channels, H, W], other whole numbers tokens [N, length]"
        cure = "give numbers as floating point, and images of more than 8 bits"
        raise DataError(f"{where}: inputs are {array.dtype} {list(array.shape)}: {kinds}; {cure}")
    if are_bytes:
        if array.shape[1] > MOST_CHANNELS:
            say(f"{where}: its images have {array.shape[1]} channels ({described(array)})")
        return np.ascontiguousarray(array)
    tokens = np.ascontiguousarray(array, dtype=np.int64)
    if (tokens < 0).any():  # also those that were above the range of int64
        row = int(np.argwhere(tokens < 0)[0][0])
        cure = "give numbers as floating point"
        raise DataError(f"{where}: {place(row)} has a token below 0, or from 2^63; {cure}")
    return tokens


def warn_of_rounding(
    exact: NDArray[Any], rounded: NDArray[np.float32], where: str, place: Place, name: str
) -> None:
    """Print a line if float32 loses digits in which the numbers [N, …] of a feature differ.

    ``exact`` are the numbers as they were given, ``rounded`` the same as float32. They are compared
    with the feature's range: an id of ten digits, or a date in seconds, may become the same number
    for many samples.
    """
    change = np.abs(exact - rounded)  # NaN for a gap
    if np.isnan(change).all():
        return
    spread = np.nanmax(exact) - np.nanmin(exact)
    is_constant = spread == 0  # then its digits tell nothing
    if is_constant or np.nanmax(change) <= MOST_ROUNDED * spread:
        return
    worst = np.unravel_index(int(np.nanargmax(change)), change.shape)
    row = int(worst[0])
    example = f"{exact[worst]:.17g} is {rounded[worst]:.17g} to a model (float32)"
    cure = "drop an id, or subtract what all share"
    say(f"{where}, {place(row)}, {name}: {example}; {cure}")


# -- labels and names
def class_names(classes: str) -> tuple[str, ...]:
    """Return the names in the setting ``classes``, in label order; () if it is "".

    DataError for fewer than two names, and for equal ones.
    """
    names = tuple(parts_of(classes))
    if names:
        check_class_names(names, f"classes = {classes!r}", "separated by commas")
    return names


def _names_of_array(value: Any, where: str) -> tuple[str, ...]:
    """Return the names in an array ``classes``; one text is no list of names."""
    if isinstance(value, str | bytes):
        return ("",)
    return tuple(as_array(value, f"{where}: classes").astype(str).tolist())


def check_class_names(names: Sequence[str], which: str, how: str) -> None:
    are_names = all(name and is_short_and_printable(name) for name in names)
    are_different = len(set(names)) == len(names)
    if not are_names or not are_different or len(names) < 2:
        raise DataError(f"{printable(which)}: must be different names, two or more, {how}")


def _check_one_label_each(labels: Any, where: str) -> None:
    """Raise DataError if a sample has a list of labels."""
    for label in labels:
        if not isinstance(label, str | np.generic) and np.size(label) > 1:
            several = "several labels of a sample need task = 'multi-label'"
            cure = "if each row has a single 1, give labels.argmax(1)"
            raise DataError(f"{where}: the first label is {label!r}: {several}; {cure}")


def _check_none_missing(column: NDArray[Any], key: str, where: str, place: Place) -> None:
    """Raise DataError for a missing value, as it would count as a class or a client of its own.

    ``key`` names the column: ``labels``, ``client``, ``domain`` or ``split``.
    """
    # "NA" may be a class that the setting `classes` lists; if it is not, `check_classes` refuses
    marks = NO_LABELS if key == "labels" else GAPS
    is_missing = column != column  # NaN
    if column.dtype.kind == "U":
        texts = [text for text in {*column.tolist()} if text.lower() in marks]
        is_missing = np.isin(column, texts)
    missing = np.flatnonzero(is_missing)
    if not len(missing):
        return
    row = int(missing[0])
    what = "label" if key == "labels" else key
    many = f"{column.tolist()[row]!r}; {len(missing)} in all"
    raise DataError(f"{where}: {place(row)} has no {what} ({many}); fill it in, or leave it out")


def _labels(
    column: NDArray[Any],
    from_setting: tuple[str, ...],
    from_array: tuple[str, ...],
    where: str,
    place: Place,
) -> tuple[Ints, tuple[str, ...]]:
    """Return the labels as indices into the classes, int64 [N], and the names of the classes.

    The names are those of the setting ``classes``, else of the array, else the labels that occur.
    `from_arrays` says when labels that are numbers are indices into them. DataError for a label
    that is none of the names.
    """
    names = from_setting or from_array
    if column.dtype.kind == "f" and (column == column.round()).all():  # as 1.0 for 1
        column = column.astype(np.int64)
    are_numbers = column.dtype.kind in "biu"
    if not names:
        unique, labels = np.unique(column, return_inverse=True)
        names = tuple(map(str, unique))
        check_classes(names, labels, where, place)
        return labels.astype(np.int64), names

    names_are_numbers = any(name.lstrip("-").isdecimal() or name == "True" for name in names)
    are_indices = are_numbers and not (from_setting and names_are_numbers)
    share_names = not {*from_setting}.isdisjoint(from_array)
    if are_indices and share_names:  # perhaps in another order, so that the names decide
        name_by_index = dict(enumerate(from_array))
        column = np.array([name_by_index.get(label, str(label)) for label in column.tolist()])
        are_indices = False
    if are_indices:
        labels = column.astype(np.int64)
        _check_indices(labels, names, where)
    else:
        index = {name: position for position, name in enumerate(names)}
        labels = np.array([index.get(str(value), -1) for value in column], dtype=np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(wrong):
        row = int(wrong[0])
        which = f"{place(row)} has the label '{printable(str(column[row]), 40)}', which is none of"
        key = f"classes = {as_list(names)!r}" if from_setting else f"classes {', '.join(names)}"
        raise DataError(f"{where}: {which} {key}")
    return labels, names


def _check_indices(labels: Ints, names: tuple[str, ...], where: str) -> None:
    """Raise DataError for numbers that are names of an array ``classes``, and perhaps indices.

    Such are 1 and 2 where the classes are 1, 2, 3, as ``np.unique(labels)`` has them.
    """
    counted = tuple(map(str, range(len(names))))
    occurring = set(map(str, np.unique(labels).tolist()))
    if names != counted and occurring <= {*names}:
        are = (
            f"labels that are numbers are indices into classes, from 0; these are {first_of(names)}"
        )
        raise DataError(f"{where}: {are}; give the labels as texts, or leave classes out")


def check_classes(classes: Sequence[str], labels: Ints, where: str, place: Place) -> None:
    """Raise DataError for labels that are no classes.

    ``classes`` are the different labels, and ``labels`` [N] has each sample's index into them. They
    are refused if there is only one, if they are quantities or names of samples, or if some are
    marks of a gap, several labels joined, or one class in two spellings. A line is printed for each
    class of a single sample.
    """
    named = f"{where}: the labels"
    cure = "correct them, or name them in `classes`"
    several_spellings = spelt_twice(classes)
    codes = _codes_of_gaps(classes)
    gaps = gaps_among(classes)
    doubtful = []
    for name in classes:
        # "none" may well be a class
        stands_for_none = name in codes or (name in gaps and meaning_of(name) != "none")
        if name in several_spellings or stands_for_none:
            doubtful.append(name)
    if doubtful:
        alike = "are alike but for capitals and spaces, or stand for none"
        raise DataError(f"{named} {first_of(map(repr, doubtful))} {alike}; {cure}")
    joined = [name for name in classes if joins_labels(name, {*classes})]
    if joined:
        several = "join other labels: several of a sample need task = 'multi-label'"
        raise DataError(f"{named} {first_of(map(repr, joined))} {several}; {cure}")
    if len(classes) == 1:
        alone = "is the only label: one class alone cannot be learned"
        raise DataError(f"{where}: {classes[0]!r} {alone}; name `classes` if others have more")

    num_classes = len(classes)
    single = np.flatnonzero(np.bincount(labels) == 1)  # classes (indices) of one sample
    samples = len(labels)
    counts = f"{named} have {num_classes} different values of {samples} samples"
    counts = f"{counts}, such as {classes[0]!r}"
    are_names = num_classes > samples / 2  # hardly two samples have the same label
    # more than a tenth of the values occur once, as those of measurements do
    are_scattered = not are_names and len(single) > num_classes / 10
    are_numbers = all(map(is_number, classes))
    have_fractions = not all(map(WHOLE.fullmatch, classes))
    are_quantities = are_numbers and (are_scattered or have_fractions)
    if num_classes > FEW_CLASSES and are_quantities:
        cure = "make classes of them, as low and high, or name `classes`"
        raise DataError(f"{counts}: quantities (regression) cannot be learned; {cure}")
    if num_classes > FEW_CLASSES and are_names:
        cure = "name `classes` if they are some"
        raise DataError(f"{counts}: no classes, but quantities or names of samples; {cure}")
    if samples > FEW_CLASSES:  # in a few samples a class of one is no surprise
        rows = [int(np.argmax(labels == label)) for label in single[:FEW_CLASSES]]
        for row in rows:
            name = classes[labels[row]]
            say(f"{where}, {place(row)}: alone has the label {name!r}; is it misspelt, or cut off?")


def _codes_of_gaps(classes: Sequence[str]) -> set[str]:
    """Return the classes that mark a missing label, if all classes are whole numbers.

    They are numbers below 0; 255 if there is no 254, which would make it the last of many; and
    `CODES_OF_GAPS` that are more than twice any other number: 99 may be an age. They are marks only
    beside two or more other classes: -1 and 1 alone are classes.
    """
    values = [number(name) for name in classes]  # of "-1.0" as of "-1"
    if not all(value.is_integer() for value in values):
        return set()
    codes = set()
    largest = max(values)
    is_far_above = all(largest > 2 * value for value in values if value != largest)
    for name, value in zip(classes, values, strict=True):
        is_code = value == largest and value in CODES_OF_GAPS and is_far_above
        is_fill = value == 255 and 254 not in values
        if value < 0 or is_code or is_fill:
            codes.add(name)
    return codes if len(classes) - len(codes) > 1 else set()


def joins_labels(label: str, labels: set[str]) -> bool:
    """True if ``label`` joins others of the ``labels``, as ``a|b`` does ``a`` and ``b``."""
    for sign in JOINTS:
        parts = {part.strip() for part in label.split(sign)}
        if sign in label and parts <= labels:
            return True
    return False


def _say_which_are_alike(names: Sequence[str], what: str) -> None:
    """Print a line if two names of clients may be one client's: ``P1`` and ``p1``, 1 and 1.0."""
    alike = spelt_twice(names)
    if alike:
        shown = first_of(map(repr, alike))
        say(f"{what}: {shown} are alike but for capitals, spaces or zeros; they count as several")


def letters_of(name: str) -> str:
    """Return the letters and digits of a name, in lower case, or the name if it has none.

    They are the same in spellings that differ only in case, spaces or signs. A looser comparison
    would take ``female`` for ``male``.
    """
    return re.sub(r"[\W_]", "", name.casefold()) or name


def spelt_twice(names: Sequence[str]) -> list[str]:
    """Return the names of which another of them is a second spelling (`meaning_of`)."""
    times = Counter(map(meaning_of, names))
    return [name for name in names if times[meaning_of(name)] > 1]


def meaning_of(label: str) -> float | str:
    """Return what two spellings of one label have in common.

    That is its number, or else its text in lower case without spaces.
    """
    if is_number(label):
        return float(label)
    return "".join(label.casefold().split())


def is_gap(value: Any) -> bool:
    """True for a value that says nothing: None, NaN, or a text such as "NA"."""
    return str(value).strip().lower() in GAPS


def gaps_among(values: Iterable[Any]) -> set[str]:
    """Return the texts of those values that say nothing.

    A "-" says something if there is a "+", as both are results of a test.
    """
    texts = {*map(str, values)}
    gaps = {text for text in texts if is_gap(text)}
    if any(re.fullmatch(r"\s*\++\s*", text) for text in texts):
        gaps = {text for text in gaps if text.strip() not in ("-", "--")}
    return gaps


def number(value: Any) -> float:
    """Return the number that a value is or spells; NaN for others.

    ``2_0`` is none: Python alone reads it as 20.
    """
    try:
        return math.nan if "_" in str(value) else float(value)
    except (ValueError, TypeError, OverflowError):
        return math.nan


def is_number(value: Any) -> bool:
    return math.isfinite(number(value))


def _official(column: NDArray[Any], where: str, place: Place) -> Images:
    """Return the part that each sample belongs to, as `RawData.official`, from a column ``split``.

    DataError for another word, and if no sample is for training.
    """
    parts = [SPLITS.get(str(value)) for value in column]  # 0 for training
    if None in parts:
        row = parts.index(None)
        wanted = "must be train, validation or test"
        raise DataError(f"{where}: {place(row)} has split {str(column[row])!r}; {wanted}")
    if all(parts):
        raise DataError(f"{where}: split marks no sample for training")
    return np.array(parts, np.uint8)

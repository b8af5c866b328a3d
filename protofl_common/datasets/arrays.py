"""Arrays of the user's own, from a file or a Python function: checked and made `RawData`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofl_common.datasets.folders import are_different, class_names
from protofl_common.datasets.raw import DataError, Images, Inputs, Ints, RawData

KEYS = ("inputs", "labels", "client", "split", "classes")
SPLITS = {"train": 0, "test": 1, "validation": 2, "0": 0, "1": 1, "2": 2, "False": 0, "True": 1}
Place = Callable[[int], str]
"""Number of a sample -> where it stands, for errors."""


def from_arrays(arrays: Mapping[str, Any], where: str, classes: str = "", place: Place = "sample {}".format) -> RawData:
    """A data set from named arrays; ``where`` and ``place`` say in errors what they are.

    ``inputs``   [N, …]: images uint8 [N, channels, H, W]; numbers, floating point (a table [N, features], a signal
                 [N, channels, steps], …); tokens, whole numbers from 0 [N, length], where 0 is padding.
    ``labels``   [N]: names, or whole numbers.
    ``client``   [N], optional: the client (or domain) that each sample belongs to, for ``partition = "natural"``.
    ``split``    [N], optional: ``train`` or ``test`` (or 0 or 1), for ``test-from`` other than ``split``; or
                 ``validation`` (2), which counts always.
    ``classes``  optional: names in label order; labels that are numbers are then indices into them.

    The setting ``classes`` comes before the array. Where its names are numbers, labels are names; else numbers are
    indices. Without either the classes are the labels that occur, sorted: sites with data of their own may then differ.

    Raises
    ------
    DataError
        When something is missing, of the wrong type or length, or not finite.
    """
    for key in ("inputs", "labels"):
        if arrays.get(key) is None:
            raise DataError(f"{where}: has no {key!r}, only {', '.join(map(repr, arrays)) or 'nothing'}")
    inputs = _inputs(arrays["inputs"], where, place)
    columns = {key: np.asarray(arrays[key]) for key in ("labels", "client", "split") if arrays.get(key) is not None}
    for key, column in columns.items():
        if column.shape != (len(inputs),):
            raise DataError(f"{where}: {key} has shape {list(column.shape)}; there are {len(inputs)} inputs")
        _check_none_missing(column, key, where, place)
    named = class_names(classes)
    given = named or _class_array(arrays.get("classes"), where)
    labels, names = _labels(columns["labels"], given, bool(named), where, place)
    clients = np.array(columns.get("client", ()), dtype=str)
    domain_names, domains = np.unique(clients, return_inverse=True) if len(clients) else ((), np.zeros_like(labels))
    official = np.zeros(len(inputs), np.uint8)
    if "split" in columns:
        official = _official(columns["split"], where, place)
        if official.all():
            raise DataError(f"{where}: split marks no sample for training")
    return RawData(inputs, labels, domains.astype(np.int64), official, names, tuple(map(str, domain_names)))


def _inputs(value: Any, where: str, place: Place) -> Inputs:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{where}: inputs differ in shape ({error})") from error
    if array.ndim < 2 or not len(array) or array.dtype.kind not in "biuf":
        raise DataError(f"{where}: inputs are {array.dtype} {list(array.shape)}, not numbers [N, …] of some samples")
    if array.dtype == np.uint8:
        if array.ndim != 4:
            raise DataError(f"{where}: inputs are uint8 {list(array.shape)}: bytes must be images [N, channels, H, W]")
        return np.ascontiguousarray(array)
    if array.dtype.kind in "iu":
        if (array < 0).any():
            row = int(np.argwhere(array < 0)[0][0])
            raise DataError(f"{where}: {place(row)} has a token below 0; give numbers as floating point")
        return np.ascontiguousarray(array, dtype=np.int64)
    array = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(array).all():
        first = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
        raise DataError(f"{where}: {place(first[0])} has {array[first]} at {list(first[1:])}; fill missing values in")
    return array


def _check_none_missing(column: NDArray[Any], key: str, where: str, place: Place) -> None:
    """DataError for None, NaN or "" among the values, which would be a class or a client of its own."""
    found = column.tolist()
    if missing := [row for row, value in enumerate(found) if value is None or value == "" or value != value]:
        row, what = missing[0], {"labels": "label"}.get(key, key)
        raise DataError(
            f"{where}: {place(row)} has no {what} ({found[row]!r}; {len(missing)} in all); fill it in, or leave it out"
        )


def _class_array(value: Any, where: str) -> tuple[str, ...]:
    """The names in the array ``classes``, where there is one; DataError if they are no different names."""
    if value is None:
        return ()
    names = () if isinstance(value, str | bytes) else tuple(map(str, value))
    if not names or not are_different(names):
        raise DataError(f"{where}: classes = {value!r}: must be different names, in label order")
    return names


def _labels(column: NDArray[Any], names: tuple[str, ...], named: bool, where: str, place: Place) -> tuple[Ints, Any]:
    if column.dtype.kind == "f" and (column == column.round()).all():
        column = column.astype(np.int64)
    numbers = column.dtype.kind in "biu"
    if not names:
        found, labels = np.unique(column if numbers else column.astype(str), return_inverse=True)
        return labels.astype(np.int64), tuple(map(str, found))
    if numbers and not (named and all(name.isdecimal() for name in names)):
        labels, wrong = column.astype(np.int64), (column < 0) | (column >= len(names))
    else:
        index = {name: position for position, name in enumerate(names)}
        labels = np.array([index.get(str(value), -1) for value in column], dtype=np.int64)
        wrong = labels < 0
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        key = f"classes = {','.join(names)!r}" if named else f"classes {', '.join(names)}"
        raise DataError(f"{where}: {place(row)} has the label {str(column[row])!r}, which is none of {key}")
    return labels, names


def _official(column: NDArray[Any], where: str, place: Place) -> Images:
    """uint8 [N], as `RawData.official`."""
    for row, value in enumerate(column):
        if str(value) not in SPLITS:
            raise DataError(f"{where}: {place(row)} has split {str(value)!r}; must be train, validation or test")
    return np.array([SPLITS[str(value)] for value in column], np.uint8)

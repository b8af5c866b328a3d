"""Tables in CSV or Parquet files: numbers, and categories that all sites define alike.

A category that the definition (``one-hot``) does not list is refused: it would be another input
than its owner means. So is a gap, unless ``impute`` fills gaps: then it is NaN here, which each
client replaces, or 0 in all columns of a category.
"""

import csv
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.text import LONGEST_NAME, names_in, with_composed_letters
from protofl_common.config.sections import DataSettings
from protofl_common.data.raw import GAPS, DataError, Place, is_number

ANNOTATION_COLUMNS = {"label": "labels", "domain": "domain", "client": "client", "split": "split"}
"""Columns of a file that are no inputs, and their names in `from_arrays`."""
MOST_CATEGORIES = 12  # different texts of a column up to which an error proposes one-hot
GAP = (
    "is not a finite number but a gap; have it filled in, or leave the column out",
    "impute=median",
)
_SIGNS = frozenset(",|:")  # that no category may have
_NUMBERS = ("double", "float", "int32", "int64")
"""Types of Parquet that are read as arrays: these take an eighth of the memory."""
_WHOLE_NUMBER = re.compile(r"-?\d{1,18}")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}\b.*")
MOST_ROUNDED = 1e-4  # of a column's range: a number that float32 changes by more is worth a line
Floats = NDArray[np.float32]


class TableFile:
    """A CSV or Parquet file, read: its columns by name, and where each row stands."""

    def __init__(self, file: Path, header: list[str] | None = None) -> None:
        """Read the file; a CSV file without a row of names is read with this ``header``."""
        self.file = file
        self.has_header = header is None
        if file.suffix.lower() == ".parquet":
            self._word = "row"
            self.names, self.lines, values = _parquet(file)
        else:
            self._word = "line"
            self.names, self.lines, values = _csv(file, header)
        if not self.lines:
            raise DataError(f"{file}: has no rows")
        self.columns = dict(zip(self.names, values, strict=True))

    @property
    def others(self) -> list[str]:
        """The columns that may be inputs: but for labels and the like, and pandas' index."""
        return [
            name
            for name in self.names
            if name not in ANNOTATION_COLUMNS and not name.startswith("__index_level_")
        ]

    def place(self, row: int) -> str:
        return f"{self._word} {self.lines[row]}"

    def annotations(self, *needed: str) -> dict[str, Any]:
        """The columns that are no inputs: labels, whose a row is, and its part.

        `ANNOTATION_COLUMNS` has their names in a file, and by what name of `from_arrays` they are
        returned. Labels that are all whole numbers become int64, and else stay names. DataError
        without a column that is ``needed``, and for any column without a name of its own.
        """
        for name in needed:
            if name not in self.columns:
                present = ", ".join(self.columns)
                raise DataError(f"{self.file}: has no column {name!r}; its columns: {present}")
        for number, name in enumerate(self.names, 1):
            # pandas' numbers of the rows, which may give the label away
            if not name or name.startswith("Unnamed: "):
                cure = "give it one, or leave it out (index=False)"
                raise DataError(f"{self.file}: column {number} has no name; {cure}")
            if self.names.count(name) > 1:
                raise DataError(f"{self.file}: several columns are called {name!r}; rename them")

        columns: dict[str, Any] = {}
        for name, key in ANNOTATION_COLUMNS.items():
            if name in self.columns:
                columns[key] = self.columns[name]
        labels = columns.get("labels")
        if labels is not None and all(_WHOLE_NUMBER.fullmatch(str(label)) for label in labels):
            columns["labels"] = np.array(labels, dtype=np.int64)
        return columns

    def texts(self, joined: Sequence[str]) -> list[str]:
        """The texts of each row, ``joined`` by spaces."""
        if not joined:
            present = ", ".join(self.columns)
            raise DataError(f"{self.file}: has no column of texts beside {present}")
        columns = [self.columns[name] for name in joined]
        return [" ".join(parts) for parts in zip(*columns, strict=True)]


def _csv(file: Path, header: list[str] | None) -> tuple[list[str], list[int], list[Sequence[Any]]]:
    """The names of the columns, the line of each row, and the values of each column."""
    lines: list[int] = []
    rows: list[list[str]] = []
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.reader(opened)
            filled = filter(None, reader)
            names = header or [with_composed_letters(name.strip()) for name in next(filled, [])]
            for row in filled:
                lines.append(reader.line_num)
                rows.append([value.strip() for value in row])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as CSV in UTF-8 ({error})") from error
    _check_separator(file, names, rows)
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(names):
            columns = f"there are {len(names)} columns"
            raise DataError(f"{file}, line {line}: {len(row)} values; {columns}")
    return names, lines, list(zip(*rows, strict=True))


def _check_separator(file: Path, names: list[str], rows: list[list[str]]) -> None:
    """DataError where columns are separated as spreadsheets of some languages do."""
    if len(names) != 1:
        return
    sign = re.search("[;\t|]", names[0])
    if sign and all(sign[0] in ",".join(row) for row in rows):
        separated = f"columns are separated by {sign[0]!r}"
        raise DataError(f"{file}: {separated}; save it with ',', and numbers with a point")


def _parquet(file: Path) -> tuple[list[str], list[int], list[Sequence[Any]]]:
    """The names of the columns, the number of each row, and the values of each column."""
    from pyarrow import ArrowException, parquet  # not for every command

    try:
        table = parquet.read_table(file)
    except (OSError, ArrowException) as error:
        raise DataError(f"{file} cannot be read as Parquet ({error})") from error
    values: list[Any] = []
    for column in table.columns:
        if str(column.type) in _NUMBERS and not column.null_count:
            array = np.array(column)
            if np.isfinite(array).all():
                values.append(array)
                continue
        values.append(column.to_pylist())
    names = [with_composed_letters(name) for name in table.column_names]
    return names, list(range(table.num_rows)), values


def definition_problems(settings: DataSettings) -> Iterator[str]:
    """Yield a line for each ``columns``, ``drop`` and ``one-hot`` that makes no definition."""
    definition = {"columns": settings.columns, "drop": settings.drop, "one-hot": settings.one_hot}
    for key, value in definition.items():
        if value and settings.dataset != "arrays":
            yield f"{key} = {value!r}: only for a table of your own, with dataset = 'arrays'"
    for column in names_in(settings.one_hot):
        name, categories = name_and_categories(column)
        different = {_category(category) for category in categories}
        if not name or not categories or len(different) < len(categories):
            wanted = f"{column!r} must be COLUMN:CATEGORY|CATEGORY, each another"
            yield f"one-hot = {settings.one_hot!r}: {wanted}"


def chosen_columns(settings: DataSettings, names: Sequence[str], where: str) -> tuple[str, ...]:
    """The columns of the inputs, in order: ``age``, or ``sex:f|m`` for categories.

    ``names`` are those of the file that may be inputs.
    """
    categories = {}
    for column in names_in(settings.one_hot):
        name, values = name_and_categories(column)
        categories[name] = f"{name}:{'|'.join(values)}"
    picked = names_in(settings.columns) or names
    dropped = names_in(settings.drop)
    left = [name for name in picked if name not in dropped]
    _check_present("columns", picked, names, where)
    _check_present("drop", dropped, names, where)
    _check_present("one-hot", categories, left, where)
    for name in left:
        if name.lower() in ANNOTATION_COLUMNS:
            cure = f"call it {name.lower()!r}, or drop it"
            raise DataError(f"{where}: column {name!r} would be an input; {cure}")
    if not left:
        besides = "besides label, client, domain, split and those of drop"
        raise DataError(f"{where} has no column for the inputs {besides}")
    return checked_names([categories.get(name, name) for name in left], where)


def _check_present(key: str, wanted: Iterable[str], names: Sequence[str], where: str) -> None:
    """DataError for a column in the setting ``key`` that is none of ``names``."""
    for name in wanted:
        if name not in names:
            those = f"those are: {', '.join(names)}"
            raise DataError(f"{key}: {where} has no column {name!r} for the inputs; {those}")


def checked_names(columns: Sequence[str], where: str) -> tuple[str, ...]:
    """``columns`` as a model file may name them: neither too long nor with control characters."""
    for column in columns:
        if len(column) > LONGEST_NAME or not column.isprintable():
            what = f"a name, or categories, of over {LONGEST_NAME} letters, or with a line break"
            raise DataError(f"{where}: column {column!r} has {what}")
    return tuple(with_composed_letters(column) for column in columns)


def name_and_categories(column: str) -> tuple[str, tuple[str, ...]]:
    """``sex:f|m`` -> ``sex`` and its categories; () for a column of numbers."""
    name, _, values = column.rpartition(":")
    if "|" not in values:
        return column, ()
    return name.strip(), tuple(value.strip() for value in values.split("|"))


class _Column(NamedTuple):
    """A column to read: numbers, or the ``categories`` if there are some."""

    name: str
    categories: tuple[str, ...]
    values: Sequence[Any]


class _Problem(NamedTuple):
    """Why a column cannot be used, and the setting that would do."""

    text: str  # "" where another problem of the column says it
    cure: str


def read_columns(
    columns: Mapping[str, Sequence[Any]],
    chosen: Sequence[str],
    where: str,
    place: Place,
    *,
    gaps: bool,
) -> Floats:
    """float32 [N, F] of the ``chosen`` columns, texts or values; with ``gaps``, NaN if missing.

    DataError names each column that cannot be used, its first such value, where that stands, and
    what to do. A line on standard error names a column whose numbers lose the digits in which they
    differ.
    """
    parts: list[Floats] = []
    problems: list[_Problem] = []
    for name, categories in map(name_and_categories, chosen):
        column = _Column(name, categories, columns[name])
        exact: NDArray[Any] = _one_hot(column) if categories else _numbers(column.values)
        with np.errstate(over="ignore"):
            part = exact.astype(np.float32)

        is_wrong = np.asarray(~np.isfinite(part).all(axis=1))
        if is_wrong.any():
            is_missing = np.array([_is_gap(value) for value in column.values])
            part[is_missing] = 0.0 if categories else np.nan
            problems += _problems(column, is_wrong, is_missing, place, gaps)
        if not problems:
            _warn_of_rounding(column, exact, part, where, place)
            parts.append(part)
    if problems:
        raise DataError(_together(where, problems))
    return np.concatenate(parts, axis=1)


def _is_gap(value: Any) -> bool:
    return value is None or str(value).strip().lower() in GAPS


def _problems(
    column: _Column,
    is_wrong: NDArray[np.bool_],
    is_missing: NDArray[np.bool_],
    place: Place,
    gaps: bool,
) -> Iterator[_Problem]:
    """Yield what is wrong with the values of a column; with ``gaps`` some may be missing."""
    is_unusable = is_wrong & ~is_missing
    any_unusable = is_unusable.any()
    if gaps and not any_unusable:
        return
    counted = is_unusable if any_unusable else is_missing
    row = int(counted.argmax())
    value = np.asarray(column.values[row]).tolist()  # no np.float64
    why, cure = _diagnosis(column, value, ~is_missing) if any_unusable else GAP
    many = f"{counted.sum()} of {len(column.values)} values"
    where = f"{place(row)}, column {column.name!r}"
    yield _Problem(f"{where}: {value!r} {why} ({many}): {cure}", cure)
    if is_missing.any():
        yield _Problem("", GAP[1])


def _warn_of_rounding(
    column: _Column, exact: NDArray[Any], part: Floats, where: str, place: Place
) -> None:
    """Print a line where float32 loses the digits in which the numbers of a column differ."""
    finite = exact[np.isfinite(exact)]
    if not finite.size:
        return
    change = np.nan_to_num(np.abs(exact - part))
    if change.max() > MOST_ROUNDED * np.ptp(finite) > 0:
        row = int(change.argmax())
        seen = f"{column.values[row]} is {part[row, 0]:.17g} to a model (float32)"
        cure = "drop an id, or subtract what all share"
        message = f"{where}, {place(row)}, column {column.name!r}: {seen}; {cure}"
        print(f"protofl: {message}", file=sys.stderr, flush=True)


def _numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    """float64 [N, 1]; NaN for a value that is no number."""
    try:
        numbers = np.fromiter(values, dtype=np.float64)
    except (ValueError, TypeError):  # ValueError for a list, as it is no number
        usable = [value if is_number(value) else math.nan for value in values]
        numbers = np.array(usable, dtype=np.float64)
    return numbers[:, None]


def _one_hot(column: _Column) -> Floats:
    """float32 [N, categories] of 0 and 1; NaN for a value that is none of them."""
    categories = [_category(category) for category in column.categories]
    rows = dict(zip(categories, np.eye(len(categories), dtype=np.float32), strict=True))
    unknown = np.full(len(categories), np.nan, dtype=np.float32)
    return np.stack([rows.get(_category(value), unknown) for value in column.values])


def _category(value: Any) -> str | float:
    """The meaning of a category: ``1``, ``"1"``, ``"1.0"`` are one in files of different origin."""
    return float(value) if is_number(value) else with_composed_letters(str(value).strip())


def _diagnosis(column: _Column, value: Any, is_present: NDArray[np.bool_]) -> tuple[str, str]:
    """Say what is wrong with a ``value`` of a column, and the setting that would do."""
    drop = f'drop="{column.name}"'
    if column.categories:
        why = "is none of the categories in one-hot; where it is one, add it at all sites alike"
        return why, drop
    if is_number(value):
        return "has a number that is too large; correct it, or leave the column out", drop
    if _DATE.fullmatch(str(value)):
        why = "is not a finite number but a date; make it one, such as days, or leave it out"
        return why, drop
    present = [str(column.values[row]).strip() for row in np.flatnonzero(is_present).tolist()]
    kinds = sorted(set(present))
    # where they are more, they may be the names of the samples
    are_few = 2 <= len(kinds) <= min(MOST_CATEGORIES, len(present) / 2)
    if are_few and not any(is_number(text) or set(text) & _SIGNS for text in kinds):
        why = "is not a finite number but text; name its categories"
        return why, f'one-hot="{column.name}:{"|".join(kinds)}"'
    why = f"is not a finite number ({len(kinds)} different values); correct it, or leave it out"
    return why, drop


def _together(where: str, problems: Sequence[_Problem]) -> str:
    """One message of all problems; of several, with the settings that mend them all."""
    lines = [problem.text for problem in problems if problem.text]
    if len(lines) == 1:
        return f"{where}, {lines[0]}"
    cures: dict[str, list[str]] = {}
    for problem in problems:
        key, _, value = problem.cure.partition("=")
        value = value.strip('"')
        values = cures.setdefault(key, [])
        if value not in values:
            values.append(value)
    settings = " ".join(f'{key}="{",".join(values)}"' for key, values in cures.items())
    title = f"{where}: {len(lines)} columns cannot be used as they are"
    return "\n  ".join([title, *lines, f"all: {settings}"])

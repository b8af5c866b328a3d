"""Tables in CSV or Parquet files: numbers, and categories by a definition that all sites share (``one-hot``).

A category that the definition does not list is refused: it would be another input than its owner means. So is a gap,
unless ``impute`` fills gaps: then it is NaN here, which each client replaces, or 0 in all columns of a category.
"""

import csv
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.text import LONGEST_NAME, composed, names_in
from protofl_common.config.sections import DataSettings
from protofl_common.data.raw import GAPS, DataError, Place, is_number

COLUMNS = {"label": "labels", "domain": "domain", "client": "client", "split": "split"}
"""Columns of a file that are no inputs, and their names in `from_arrays`."""
MOST_CATEGORIES = 12  # different texts of a column up to which an error proposes one-hot
GAP = "is not a finite number but a gap; have it filled in, or leave the column out", "impute=median"
_SIGNS = frozenset(",|:")  # that no category may have
_NUMBERS = ("double", "float", "int32", "int64")  # of Parquet: as arrays they take an eighth of the memory
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}\b.*")
MOST_ROUNDED = 1e-4  # of a column's range: a number that float32 changes by more is worth a line
Floats = NDArray[np.float32]


class Rows:
    """A CSV or Parquet file, read: its columns by name, and where each row stands."""

    def __init__(self, file: Path, header: list[str] | None = None) -> None:
        self.file, self._word = file, "row" if (of_parquet := file.suffix.lower() == ".parquet") else "line"
        self.has_header = header is None
        self.names, self.lines, values = _parquet(file) if of_parquet else _csv(file, header)
        if not self.lines:
            raise DataError(f"{file}: has no rows")
        self.columns = dict(zip(self.names, values, strict=True))
        index = "__index_level_"  # pandas'
        self.others = [name for name in self.names if name not in COLUMNS and not name.startswith(index)]

    def place(self, row: int) -> str:
        return f"{self._word} {self.lines[row]}"

    def annotations(self, *needed: str) -> dict[str, Any]:
        """The columns that are no inputs, by the names of `from_arrays`; DataError without one that is needed."""
        for name in needed:
            if name not in self.columns:
                raise DataError(f"{self.file}: has no column {name!r}; its columns: {', '.join(self.columns)}")
        for number, name in enumerate(self.names, 1):
            if not name or name.startswith("Unnamed: "):  # pandas' numbers of the rows, which may give the label away
                raise DataError(f"{self.file}: column {number} has no name; give it one, or leave it out (index=False)")
            if self.names.count(name) > 1:
                raise DataError(f"{self.file}: several columns are called {name!r}; rename them")
        columns: dict[str, Any] = {key: self.columns[name] for name, key in COLUMNS.items() if name in self.columns}
        if "labels" in columns and all(re.fullmatch(r"-?\d{1,18}", str(label)) for label in columns["labels"]):
            columns["labels"] = np.array(columns["labels"], dtype=np.int64)
        return columns

    def texts(self, joined: Sequence[str]) -> list[str]:
        if not joined:
            raise DataError(f"{self.file}: has no column of texts beside {', '.join(self.columns)}")
        return [" ".join(parts) for parts in zip(*(self.columns[name] for name in joined), strict=True)]


def _csv(file: Path, header: list[str] | None) -> tuple[list[str], list[int], list[Sequence[Any]]]:
    """The names of the columns, the line of each row, and the values of each column."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.reader(opened)
            names = header or [composed(name.strip()) for name in next(filter(None, reader), [])]
            numbered = [(reader.line_num, [value.strip() for value in row]) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as CSV in UTF-8 ({error})") from error
    sign = re.search("[;\t|]", names[0]) if len(names) == 1 else None  # as spreadsheets of some languages do
    if sign and all(sign[0] in ",".join(row) for _, row in numbered):
        raise DataError(f"{file}: columns are separated by {sign[0]!r}; save it with ',', and numbers with a point")
    for line, row in numbered:
        if len(row) != len(names):
            raise DataError(f"{file}, line {line}: {len(row)} values; there are {len(names)} columns")
    return names, [line for line, _ in numbered], list(zip(*(row for _, row in numbered), strict=True))


def _parquet(file: Path) -> tuple[list[str], list[int], list[Sequence[Any]]]:
    from pyarrow import ArrowException, parquet  # not for every command

    try:
        table = parquet.read_table(file)
    except (OSError, ArrowException) as error:
        raise DataError(f"{file} cannot be read as Parquet ({error})") from error
    arrays = [np.array(of if str(of.type) in _NUMBERS and not of.null_count else np.nan) for of in table.columns]
    values: list[Any] = [of if np.isfinite(of).all() else table[i].to_pylist() for i, of in enumerate(arrays)]
    return [*map(composed, table.column_names)], [*range(table.num_rows)], values


def definition_problems(settings: DataSettings) -> Iterator[str]:
    """Yield a line for each value of ``columns``, ``drop`` and ``one-hot`` that makes no definition."""
    for key, value in (("columns", settings.columns), ("drop", settings.drop), ("one-hot", settings.one_hot)):
        if value and settings.dataset != "arrays":
            yield f"{key} = {value!r}: only for a table of your own, with dataset = 'arrays'"
    for column in names_in(settings.one_hot):
        name, categories = name_and_categories(column)
        if not name or not categories or len(set(map(_category, categories))) < len(categories):
            yield f"one-hot = {settings.one_hot!r}: {column!r} must be COLUMN:CATEGORY|CATEGORY, each another"


def chosen_columns(settings: DataSettings, names: Sequence[str], where: str) -> tuple[str, ...]:
    """The columns of the inputs, in order, of those that a file has: ``age``, or ``sex:f|m`` for categories."""
    categories = {name: f"{name}:{'|'.join(of)}" for name, of in map(name_and_categories, names_in(settings.one_hot))}
    picked, dropped = names_in(settings.columns) or names, names_in(settings.drop)
    left = [name for name in picked if name not in dropped]
    for key, wanted, of in (("columns", picked, names), ("drop", dropped, names), ("one-hot", categories, left)):
        if absent := [name for name in wanted if name not in of]:
            raise DataError(f"{key}: {where} has no column {absent[0]!r} for the inputs; those are: {', '.join(of)}")
    if near := [name for name in left if name.lower() in COLUMNS]:
        raise DataError(f"{where}: column {near[0]!r} would be an input; call it {near[0].lower()!r}, or drop it")
    if not left:
        raise DataError(f"{where} has no column for the inputs besides label, client, domain, split and those of drop")
    return checked_names([categories.get(name, name) for name in left], where)


def checked_names(columns: Sequence[str], where: str) -> tuple[str, ...]:
    """``columns`` as a model file may name them; DataError for one that is too long or has control characters."""
    if odd := [column for column in columns if len(column) > LONGEST_NAME or not column.isprintable()]:
        what = f"a name, or categories, of over {LONGEST_NAME} letters, or with a line break"
        raise DataError(f"{where}: column {odd[0]!r} has {what}")
    return tuple(map(composed, columns))


def name_and_categories(column: str) -> tuple[str, tuple[str, ...]]:
    name, _, values = column.rpartition(":")
    return (name.strip(), tuple(value.strip() for value in values.split("|"))) if "|" in values else (column, ())


def read_columns(
    columns: Mapping[str, Sequence[Any]], chosen: Sequence[str], where: str, place: Place, *, gaps: bool
) -> Floats:
    """float32 [N, F] of the ``chosen`` columns, texts or values; with ``gaps``, NaN where one is missing.

    DataError names each column that cannot be used, its first such value, where that stands, and what to do. A line on
    standard error names a column whose numbers lose the digits in which they differ.
    """
    parts, problems = list[Floats](), list[tuple[str, str]]()
    for name, categories in map(name_and_categories, chosen):
        values = columns[name]
        exact: NDArray[Any] = _one_hot(values, categories) if categories else _numbers(values)
        with np.errstate(over="ignore"):
            part = exact.astype(np.float32)
        if (wrong := ~np.isfinite(part).all(axis=1)).any():
            missing = np.array([value is None or str(value).strip().lower() in GAPS for value in values])
            part[missing] = 0.0 if categories else np.nan
            if (odd := wrong & ~missing).any() or not gaps:
                row = int((bad := odd if odd.any() else missing).argmax())
                many, value = f"{bad.sum()} of {len(values)} values", np.asarray(values[row]).tolist()  # no np.float64
                present = [str(value).strip() for value, none in zip(values, missing, strict=True) if not none]
                why, cure = _diagnosis(name, value, present, bool(categories)) if odd.any() else GAP
                problems.append((f"{place(row)}, column {name!r}: {value!r} {why} ({many}): {cure}", cure))
                problems += [("", GAP[1])] * bool(missing.any())
        if problems:
            continue
        change, finite = np.nan_to_num(np.abs(exact - part)), exact[np.isfinite(exact)]
        if finite.size and change.max() > MOST_ROUNDED * np.ptp(finite) > 0:
            row = int(change.argmax())
            seen = f"{values[row]} is {part[row, 0]:.17g} to a model (float32); drop an id, or subtract what all share"
            print(f"protofl: {where}, {place(row)}, column {name!r}: {seen}", file=sys.stderr, flush=True)
        parts.append(part)
    if problems:
        raise DataError(_together(where, problems))
    return np.concatenate(parts, axis=1)


def _numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    try:
        return np.fromiter(values, dtype=np.float64)[:, None]  # of a list ValueError, as it is no number
    except (ValueError, TypeError):
        return np.array([[value] if is_number(value) else [math.nan] for value in values], dtype=np.float64)


def _one_hot(values: Sequence[Any], categories: Sequence[str]) -> Floats:
    """float32 [N, categories] of 0 and 1; NaN for a value that is none of them."""
    rows = dict(zip(map(_category, categories), np.eye(len(categories), dtype=np.float32), strict=True))
    nothing = np.full(len(categories), np.nan, dtype=np.float32)
    return np.stack([rows.get(_category(value), nothing) for value in values])


def _category(value: Any) -> str | float:
    """The same of ``1``, ``"1"`` and ``"1.0"``, which are one category in files of different origin."""
    return float(value) if is_number(value) else composed(str(value).strip())


def _diagnosis(name: str, value: Any, present: list[str], listed: bool) -> tuple[str, str]:
    """Say what is wrong with a ``value`` of a column, of those ``present``, and the setting that would do."""
    several = sorted(set(present))
    if listed:
        return "is none of the categories in one-hot; where it is one, add it at all sites alike", f'drop="{name}"'
    if is_number(value):
        return "has a number that is too large; correct it, or leave the column out", f'drop="{name}"'
    if _DATE.fullmatch(str(value)):
        return "is not a finite number but a date; make it one, such as days, or leave it out", f'drop="{name}"'
    few = 2 <= len(several) <= min(MOST_CATEGORIES, len(present) / 2)  # and not the names of the samples
    if few and not any(is_number(text) or set(text) & _SIGNS for text in several):
        return "is not a finite number but text; name its categories", f'one-hot="{name}:{"|".join(several)}"'
    return f"is not a finite number ({len(several)} different values); correct it, or leave it out", f'drop="{name}"'


def _together(where: str, problems: Sequence[tuple[str, str]]) -> str:
    lines, cures = [text for text, _ in problems if text], dict[str, dict[str, None]]()
    if len(lines) == 1:
        return f"{where}, {lines[0]}"
    for key, _, value in (cure.partition("=") for _, cure in problems):
        cures.setdefault(key, {})[value.strip('"')] = None
    all_of_them = " ".join(f'{key}="{",".join(values)}"' for key, values in cures.items())
    return "\n  ".join([f"{where}: {len(lines)} columns cannot be used as they are", *lines, f"all: {all_of_them}"])

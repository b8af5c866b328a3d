"""Tables in CSV or Parquet files: numbers, and categories that all sites define alike.

A category that the definition (``one-hot``) does not list is refused: it would be another input
than its owner means. So is a gap, unless ``impute`` fills gaps: then it is NaN here, which each
client replaces, or 0 in all columns of a category.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.text import (
    first_of,
    printable,
    problem_of_name,
    with_composed_letters,
)
from protofl_common.config.lists import as_setting, names_in
from protofl_common.config.sections import DataSettings
from protofl_common.data.csv_file import ArrowTexts, read_csv
from protofl_common.data.door import WHOLE, gaps_among, is_number, number, warn_of_rounding
from protofl_common.data.raw import DataError, Place

ANNOTATION_COLUMNS = {"label": "labels", "domain": "domain", "client": "client", "split": "split"}
"""Columns of a file that are no inputs, and their names in `from_arrays`."""
MOST_SHOWN = 20  # columns that an error names
MOST_CATEGORIES = 12  # different texts of a column up to which an error proposes one-hot
_NUMBERS = ("double", "float", "int32", "int64")
"""Types of Parquet that are read as arrays: these take an eighth of the memory."""
_IN_GROUPS = re.compile(r"[-+]?\d{1,3}([.,']\d{3})+([.,]\d+)?")  # 1,234 or 1.234,50
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}\b.*")
Floats = NDArray[np.float32]


class Columns:
    """A table that has been read: its columns by name, and where each row stands."""

    def __init__(
        self,
        where: str,
        word: str,
        names: list[str],
        lines: Sequence[int],
        values: Sequence[Sequence[Any]],
    ) -> None:
        """Take the columns' ``names`` and ``values``, and the number of each row for errors.

        ``word`` is "line" if ``lines`` are numbers of lines in a file, and otherwise "row".
        DataError without rows.
        """
        self.where = where
        self.names = names
        self.lines = lines
        self._word = word
        if not lines:
            raise DataError(f"{where}: has no rows")
        self.columns = dict(zip(names, values, strict=True))

    @classmethod
    def of_frame(cls, frame: Any, where: str) -> "Columns":
        """Return the columns of a data frame of pandas."""
        return cls(where, "row", *_columns_in(arrow_of(frame, where)))

    @property
    def others(self) -> list[str]:
        """Return the columns that may be inputs: all but labels and the like, and pandas' index."""
        return [
            name
            for name in self.names
            if name not in ANNOTATION_COLUMNS and not name.startswith("__index_level_")
        ]

    def place(self, row: int) -> str:
        return f"{self._word} {self.lines[row]}"

    def annotations(self, *needed: str) -> dict[str, Any]:
        """Return the columns that are no inputs: labels, client or domain, and split.

        Their keys are those of `from_arrays` (`ANNOTATION_COLUMNS`). Labels that are all whole
        numbers become int64, others stay texts. DataError if a ``needed`` column is missing, or if
        any column of the table has no name, or the name of another.
        """
        for name in needed:
            if name not in self.columns:
                present = ", ".join(self.columns)
                raise DataError(f"{self.where}: has no column {name!r}; its columns: {present}")
        times = Counter(self.names)
        for position, name in enumerate(self.names, 1):
            # pandas writes the numbers of its rows as a column without a name, and reads that as
            # "Unnamed: 0"; they may give the label away
            if not name or name.startswith("Unnamed: "):
                cure = "give it one, or leave it out (index=False)"
                raise DataError(f"{self.where}: column {position} has no name; {cure}")
            if times[name] > 1:
                raise DataError(f"{self.where}: several columns are called {name!r}; rename them")

        columns: dict[str, Any] = {}
        for name, key in ANNOTATION_COLUMNS.items():
            if name in self.columns:
                columns[key] = list(self.columns[name])
        labels = columns.get("labels")
        if labels is not None and all(map(_is_plain_whole_number, {*map(str, labels)})):
            columns["labels"] = np.array(labels, dtype=np.int64)
        return columns

    def texts(self, joined: Sequence[str]) -> list[str]:
        """Return for each row the texts in the columns ``joined``, with spaces between them.

        DataError for a value that is no text, as None in a data frame.
        """
        if not joined:
            present = ", ".join(self.columns)
            raise DataError(f"{self.where}: has no column of texts beside {present}")
        columns = [self.columns[name] for name in joined]
        for name, values in zip(joined, columns, strict=True):
            for row, value in enumerate(values):
                if not isinstance(value, str):
                    shown = printable(repr(value), 80)
                    place = f"{self.where}, {self.place(row)}, column {name!r}"
                    raise DataError(f"{place}: {shown} is no text")
        return [" ".join(parts) for parts in zip(*columns, strict=True)]


def _is_plain_whole_number(text: str) -> bool:
    """Return whether a text is a whole number as programs write it: "01" may be a name."""
    return WHOLE.fullmatch(text) is not None and str(int(text)) == text


class TableFile(Columns):
    """A CSV or Parquet file, read."""

    def __init__(self, file: Path, header: list[str] | None = None) -> None:
        """Read the file; ``header`` has the names of the columns of a CSV file that has none."""
        self.file = file
        self.has_header = header is None
        self.note = ""  # for the owner of the file
        if file.suffix.lower() == ".parquet":
            super().__init__(str(file), "row", *_parquet(file))
            return
        content = read_csv(file, header)
        rows = len(content.lines)
        lines_of_header = int(self.has_header)
        if content.last_line - rows > lines_of_header:  # lines are empty, or break within a text
            self.note = f"{file}: {rows} rows in {content.last_line} lines"
        super().__init__(str(file), "line", content.names, content.lines, content.columns)


def _parquet(file: Path) -> tuple[list[str], list[int], list[Sequence[Any]]]:
    """Read a Parquet file; return its columns' names, the rows' numbers, each column's values."""
    from pyarrow import ArrowException, parquet  # not for every command

    try:
        return _columns_in(parquet.read_table(file))
    except (OSError, ArrowException, UnicodeDecodeError) as error:
        reason = printable(str(error))
        raise DataError(f"{file} cannot be read as Parquet ({reason})") from error


def arrow_of(frame: Any, where: str) -> Any:
    """Return a data frame of pandas as Arrow's table.

    DataError for a column of several types, or for two columns of one name.
    """
    import pyarrow  # not for every command

    try:
        return pyarrow.Table.from_pandas(frame, preserve_index=False)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{where}: {error}") from error


def _columns_in(table: Any) -> tuple[list[str], list[int], list[Sequence[Any]]]:
    """Return the names of an Arrow table's columns, the rows' numbers, and each column's values.

    Values are an array for a column of numbers without gaps, and otherwise a list.
    """
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
    """Yield a line for each wrong setting among those that define a table's inputs.

    These are ``columns``, ``drop`` and ``one-hot``. They are wrong for a data set without such
    columns, and ``one-hot`` is wrong for a column without categories, or with one twice.
    """
    definition = {"columns": settings.columns, "drop": settings.drop, "one-hot": settings.one_hot}
    for key, value in definition.items():
        is_of_hub = key != "one-hot" and settings.dataset.startswith("hf:")
        has_meaning = is_of_hub or settings.dataset == "arrays"
        if value and not has_meaning:
            yield f"{key} = {value!r}: only for a table of your own, with dataset = 'arrays'"
    for column in names_in(settings.one_hot):
        name, categories = name_and_categories(column)
        different = {_category(category) for category in categories}
        if not name or not categories or len(different) < len(categories):
            wanted = f"{column!r} must be COLUMN:CATEGORY|CATEGORY, each another"
            yield f"one-hot = {settings.one_hot!r}: {wanted}"


def chosen_columns(settings: DataSettings, names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the columns of the inputs, in order: ``age``, or ``sex:f|m`` for categories.

    ``names`` are the columns of the file that may be inputs; ``columns``, ``drop`` and ``one-hot``
    choose among them. DataError for a setting with another column, for a column that `chosen_names`
    refuses, and if none is left.
    """
    categories = {}
    for column in names_in(settings.one_hot):
        name, values = name_and_categories(column)
        categories[name] = f"{name}:{'|'.join(values)}"
    chosen = chosen_names(settings, names, where)
    _check_present("one-hot", categories, chosen, where)
    if not chosen:
        besides = "besides label, client, domain, split and those of drop"
        raise DataError(f"{where} has no column for the inputs {besides}")
    columns = [categories.get(name) or _without_categories(name) for name in chosen]
    return checked_names(columns, where)


def chosen_names(settings: DataSettings, names: Sequence[str], where: str) -> list[str]:
    """Return the columns in ``columns``, or else all ``names``, without those in ``drop``.

    DataError if one of these settings has a column that is none of ``names``, or if a column is
    left whose name is nearly that of a column that is no input (`check_annotations`).
    """
    picked = names_in(settings.columns) or names
    dropped = {*names_in(settings.drop)}
    _check_present("columns", picked, names, where)
    _check_present("drop", dropped, names, where)
    chosen = [name for name in picked if name not in dropped]
    check_annotations(chosen, where)
    return chosen


def check_annotations(others: Iterable[str], where: str, fate: str = "an input") -> None:
    """Raise DataError for a column among ``others`` that may be of labels, clients or parts.

    Its name differs from theirs in capitals alone: ``Label``, ``Split``. ``fate`` says what would
    become of it.
    """
    for name in others:
        if name.lower() in ANNOTATION_COLUMNS:
            cure = f"call it {name.lower()!r}, or drop it from the data"
            raise DataError(f"{where}: column {name!r} would be {fate}; {cure}")


def _check_present(key: str, wanted: Iterable[str], names: Sequence[str], where: str) -> None:
    """Raise DataError for a column in the setting ``key`` that is none of ``names``."""
    present = {*names}
    for name in wanted:
        if name not in present:
            those = f"those are: {first_of(names, MOST_SHOWN)}"
            raise DataError(f"{key}: {where} has no column {name!r} for the inputs; {those}")


def checked_names(columns: Sequence[str], where: str) -> tuple[str, ...]:
    """Return ``columns`` as a model's card names them, with composed letters (NFC).

    DataError for one that is too long, or has a line break or another control character.
    """
    for column in columns:
        problem = problem_of_name(column)
        if problem:
            shown = printable(column, 40)
            raise DataError(f"{where}: column '{shown}', with its categories: {problem}")
    return tuple(with_composed_letters(column) for column in columns)


def name_and_categories(column: str) -> tuple[str, tuple[str, ...]]:
    """Split a column of inputs, such as ``sex:f|m``, into its name and its categories.

    A column of numbers, such as ``age``, has the categories (). If its name itself looks like
    categories, ``a:b|c``, it is written with a colon at the end (`_without_categories`).
    """
    name, colon, values = column.rpartition(":")
    if colon and not values:
        return name, ()
    if not colon or "|" not in values:
        return column, ()
    return name.strip(), tuple(value.strip() for value in values.split("|"))


def _without_categories(name: str) -> str:
    """Write the name of a column of numbers so that `name_and_categories` reads no categories."""
    return name if name_and_categories(name) == (name, ()) else f"{name}:"


class _Column(NamedTuple):
    """A column to read: numbers, or the ``categories`` if there are some."""

    name: str
    categories: tuple[str, ...]
    values: Sequence[Any]


Cure = tuple[str, str]  # a setting, and the name that it shall have
FILL_GAPS: Cure = ("impute", "median")


class _Problem(NamedTuple):
    """Why a column cannot be used, and the settings that would do."""

    value: str  # the first wrong one, and where it stands
    what: str
    advice: str
    share: str  # of such values
    cures: list[Cure]

    @property
    def text(self) -> str:
        return f"{self.value} {self.what}; {self.advice} ({self.share})"

    @property
    def line(self) -> str:
        key, name = self.cures[0]
        return f"{self.text}: {as_setting(key, [name]) or 'rename the column first'}"


def read_columns(
    columns: Mapping[str, Sequence[Any]],
    chosen: Sequence[str],
    where: str,
    place: Place,
    *,
    gaps: bool,
    proposes: bool = True,
) -> Floats:
    """Return the ``chosen`` columns as numbers, float32 [N, features].

    A column of numbers is one feature, a column of categories has a feature for each. With ``gaps``
    a missing number is NaN. DataError names each column that cannot be used, its first such value,
    where that stands, and which settings would do; without ``proposes``, as for an exported model,
    which has no settings, only the first such column. A line on standard error names a column whose
    numbers lose digits in which they differ.
    """
    parts, problems = _read(columns, chosen, where, place, gaps)
    if not problems:
        return np.concatenate(parts, axis=1)
    if not proposes:
        first = problems[0]
        raise DataError(f"{where}, {first.value} {first.what} ({first.share})")

    raise DataError(_message(where, problems, chosen))


def _read(
    columns: Mapping[str, Sequence[Any]],
    chosen: Sequence[str],
    where: str,
    place: Place,
    gaps: bool,
) -> tuple[list[Floats], list[_Problem]]:
    """Return the features of each chosen column, float32 [N, …], and what is wrong with some.

    With ``gaps`` a missing value is no problem: it is NaN, or 0 in each category. After the first
    problem no more features are returned. Prints a line for a column whose numbers lose digits in
    float32.
    """
    parts: list[Floats] = []
    problems: list[_Problem] = []
    for name, categories in map(name_and_categories, chosen):
        column = _Column(name, categories, columns[name])
        exact: NDArray[Any] = _one_hot(column) if categories else _numbers(column.values)[:, None]
        with np.errstate(over="ignore"):  # a number too large becomes infinite, and is refused
            part = exact.astype(np.float32)

        # also a text that is no number, and an unknown category: both have become NaN
        is_wrong = np.asarray(~np.isfinite(part).all(axis=1))
        if is_wrong.any():
            column = column._replace(values=list(column.values))
            # only a value that cannot be used is a gap: "none" is none where it is a category
            is_missing = np.zeros_like(is_wrong)
            texts_of_gaps = gaps_among(column.values)
            for row in np.flatnonzero(is_wrong).tolist():
                is_missing[row] = str(column.values[row]) in texts_of_gaps
            part[is_missing] = 0.0 if categories else np.nan
            if gaps:  # they are filled in later
                is_wrong &= ~is_missing
            if is_wrong.any():
                problems.append(_problem(column, is_wrong, is_missing, place))
        if not problems:
            warn_of_rounding(exact, part, where, place, f"column {name!r}")
            parts.append(part)
    return parts, problems


def _problem(
    column: _Column, is_wrong: NDArray[np.bool_], is_missing: NDArray[np.bool_], place: Place
) -> _Problem:
    """Return what is wrong with a column.

    ``is_wrong`` [N] are the values that cannot be used, ``is_missing`` those that are gaps. The
    problem is that of the first wrong value that is no gap. If all are gaps, it is that of the
    first gap.
    """
    is_unusable = is_wrong & ~is_missing
    is_gap = is_wrong & is_missing
    is_named = is_unusable if is_unusable.any() else is_gap
    row = int(is_named.argmax())  # the first
    value = column.values[row]
    if isinstance(value, np.generic):
        value = value.item()  # which is shown as 1.5, not as np.float64(1.5)

    what = "is not a finite number but a gap"
    advice = "have it filled in, or leave the column out"
    cures = [FILL_GAPS] if is_gap.any() else []
    if is_unusable.any():
        what, advice, cure = _diagnosis(column, value, ~is_missing)
        cures.insert(0, cure)
    where = f"{place(row)}, column {column.name!r}"
    shown = printable(repr(value), 80)
    share = f"{is_named.sum()} of {len(column.values)} values"
    return _Problem(f"{where}: {shown}", what, advice, share, cures)


def _numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    """Return the values as float64 [N]; NaN for one that is no number."""
    if isinstance(values, np.ndarray):
        return values.astype(np.float64)
    if isinstance(values, ArrowTexts):
        return values.numbers()
    return np.array([number(value) for value in values])


def _one_hot(column: _Column) -> Floats:
    """Return a feature of 0 and 1 for each category, float32 [N, categories].

    A value that is none of the categories has NaN in all of them.
    """
    categories = [_category(category) for category in column.categories]
    # a row for each category, and a last one for values that are none of them
    unknown = len(categories)
    features = np.eye(unknown + 1, unknown, dtype=np.float32)
    features[unknown] = np.nan
    index: dict[str, int] = {}  # text of a value -> its row of ``features``
    for value in column.values:
        text = str(value)
        if text not in index:
            category = _category(value)
            index[text] = categories.index(category) if category in categories else unknown
    return features[[index[str(value)] for value in column.values]]


def _category(value: Any) -> str | float:
    """Return what categories are compared by: ``1``, ``"1"`` and ``"1.0"`` are the same one."""
    return float(value) if is_number(value) else with_composed_letters(str(value).strip())


def _diagnosis(column: _Column, value: Any, is_present: NDArray[np.bool_]) -> tuple[str, str, Cure]:
    """Return what is wrong with a ``value`` of a column, an advice, and the setting that would do.

    ``is_present`` [N] tells which rows have a value at all. The setting is ``one-hot`` for a column
    of a few different texts, which may be categories, and otherwise ``drop``.
    """
    drop = ("drop", column.name)
    if isinstance(value, dict) and "bytes" in value:  # as Hugging Face writes it to Parquet
        advice = "read it as dataset = 'hf:NAME', or leave the column out"
        return "is an image", advice, drop
    if isinstance(value, list | np.ndarray):  # as programs store the vectors of a network
        advice = "store vectors as inputs [N, numbers] in an .npz file, or leave the column out"
        return "is a list", advice, drop
    if column.categories:
        advice = "where it is one, add it at all sites alike"
        return "is none of the categories in one-hot", advice, drop
    if _IN_GROUPS.fullmatch(str(value)):
        advice = "write decimals alike everywhere, and thousands without a sign"
        return "may be thousands or decimals", advice, drop
    if is_number(value):
        advice = "correct it, or leave the column out"
        return "has a number that is too large", advice, drop
    if _DATE.fullmatch(str(value)):
        advice = "make it one, such as days, or leave it out"
        return "is not a finite number but a date", advice, drop
    texts = [str(column.values[row]).strip() for row in np.flatnonzero(is_present).tolist()]
    different = sorted(set(map(with_composed_letters, texts)))
    # if they are more than half as many as the samples, they may be names of these
    are_few = 2 <= len(different) <= min(MOST_CATEGORIES, len(texts) / 2)
    # numbers among texts are not meant as categories, and some signs cannot be written
    proposal = f"{column.name}:{'|'.join(different)}"
    can_be_written = name_and_categories(proposal) == (column.name, tuple(different))
    if are_few and can_be_written and not any(map(is_number, different)):
        one_hot = ("one-hot", proposal)
        return "is not a finite number but text", "name its categories", one_hot
    what = f"is not a finite number ({len(different)} different values)"
    return what, "correct it, or leave it out", drop


def _message(where: str, problems: Sequence[_Problem], chosen: Sequence[str]) -> str:
    """Return one message of all problems of the ``chosen`` columns, each with a setting that helps.

    It ends with the settings that mend the file together, unless these would leave no column, or
    cannot be written, because a column's name has signs that a list may not have.
    """
    names_by_key: dict[str, list[str]] = {}  # of all cures
    for problem in problems:
        for key, name in problem.cures:
            names_by_key.setdefault(key, []).append(name)
    settings = [as_setting(key, dict.fromkeys(names)) for key, names in names_by_key.items()]
    can_be_written = all(settings)
    leaves_none = can_be_written and len(names_by_key.get("drop", ())) == len(chosen)
    if len(problems) == 1:
        if leaves_none:
            return f"{where}, {problems[0].text}: there is no other column"
        return f"{where}, {problems[0].line}"
    title = f"{where}: {len(problems)} columns cannot be used as they are"
    lines = [problem.line for problem in problems[:MOST_SHOWN]]
    if len(problems) > MOST_SHOWN:
        lines.append("…: name those to use in `columns`")
    elif leaves_none:
        lines.append("all: together these would not do; mend the file")
    elif can_be_written:
        lines.append(f"all: {' '.join(settings)}")
    return "\n  ".join([title, *lines])

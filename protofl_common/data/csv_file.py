"""CSV files: PyArrow reads the plain ones, Python's reader all others, to the same texts.

PyArrow is twenty times as fast, and less strict: so it only gets files in which both see the same
rows (`_plain_lines`). What it refuses Python's reader reads again, and names the line.
"""

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.text import with_composed_letters
from protofl_common.data.door import number, with_progress
from protofl_common.data.raw import DataError

BLOCK_BYTES = 2**24  # that PyArrow reads at a time
# as PyArrow's RE2 has them
_DECIMAL_COMMA = r"^[-+]?\p{Nd}*,\p{Nd}+([eE][-+]?\p{Nd}+)?$"
_ONE_GROUP = r"^[-+]?[1-9]\p{Nd}{0,2},\p{Nd}{3}$"  # 1,234 may be 1.234 or 1234
_GROUPS_BY_POINTS = r"^[-+]?[1-9]\p{Nd}{0,2}(\.\p{Nd}{3})+$"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, eq=False)
class ArrowTexts(Sequence[str]):
    """A column of texts in PyArrow's memory, which become Python's when they are asked for."""

    texts: Any
    """pyarrow.ChunkedArray, not yet stripped of spaces."""
    are_unclear: bool = False
    """A comma or point may stand before decimals or between thousands: such a text is no number."""

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(ArrowTexts(self.texts[index]))
        return str(self.texts[index]).strip()

    def __iter__(self) -> Iterator[str]:
        for chunk in self.texts.chunks:
            encoded = chunk.dictionary_encode()  # so that equal values are one text in memory
            texts = [text.strip() for text in encoded.dictionary.to_pylist()]
            yield from map(texts.__getitem__, encoded.indices.to_numpy().tolist())

    def numbers(self) -> NDArray[np.float64]:
        """Return the number that each text spells, NaN if it spells none, as `door.number` does.

        PyArrow casts a column at once, but refuses all of it if a single text spells no number. So
        it is tried as it is, then without spaces and with gaps as NaN; then each text by itself.
        """
        import pyarrow  # not for every command
        from pyarrow import compute

        if self.are_unclear:
            return np.array(
                [math.nan if re.search("[.,]", text) else number(text) for text in self]
            )
        double = pyarrow.float64()
        with suppress(pyarrow.ArrowInvalid):
            return np.array(compute.cast(self.texts, double))
        with suppress(pyarrow.ArrowInvalid):
            stripped = compute.ascii_trim_whitespace(self.texts)
            filled = compute.if_else(compute.equal(stripped, ""), "nan", stripped)
            return np.array(compute.cast(filled, double))
        return np.array([number(text) for text in self])

    def all_with(self, signs: str, pattern: str) -> bool:
        """Return whether some texts have one of the signs, and all that have it match the pattern.

        Both are regular expressions.
        """
        from pyarrow import compute  # not for every command

        with_sign = self.texts.filter(compute.match_substring_regex(self.texts, signs))
        trimmed = compute.utf8_trim_whitespace(with_sign)
        are_such = compute.match_substring_regex(trimmed, pattern)
        return len(with_sign) > 0 and bool(compute.all(are_such).as_py())


class CsvContent(NamedTuple):
    """What a CSV file has."""

    names: list[str]
    lines: Sequence[int]
    """The line in which each row begins."""
    columns: list[ArrowTexts]
    last_line: int


def read_csv(file: Path, header: list[str] | None = None) -> CsvContent:
    """Read a CSV file, whose first row has the names of the columns unless ``header`` has them.

    DataError if a row has more or fewer values than there are columns, if a quote has no pair, or
    if the file is no UTF-8.
    """
    return _by_arrow(file, header) or _by_python(file, header)


def _by_arrow(file: Path, header: list[str] | None) -> CsvContent | None:
    """Read a CSV file by PyArrow; None if Python's reader might see other rows, or refuse it.

    None, too, where PyArrow fails: Python's reader then reads the file, or says what is wrong.
    """
    import pyarrow  # not for every command
    from pyarrow import csv as arrow_csv

    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            separator, lines_before = _separator(opened)
            names = header
            if names is None:
                first_row = next(csv.reader([opened.readline()], delimiter=separator, strict=True))
                names = [with_composed_letters(name.strip()) for name in first_row]
                lines_before += 1
        last_line = _plain_lines(file, separator)
        if not last_line or not names:
            return None

        # all columns as texts; called by their positions, as two of them may have one name
        texts = pyarrow.string()
        numbered = {str(position): texts for position, _ in enumerate(names)}
        table = arrow_csv.read_csv(
            file,
            arrow_csv.ReadOptions(
                block_size=BLOCK_BYTES, skip_rows=lines_before, column_names=list(numbered)
            ),
            arrow_csv.ParseOptions(delimiter=separator),
            arrow_csv.ConvertOptions(column_types=numbered, strings_can_be_null=False),
        )
        table = table.combine_chunks()  # each column is then worked on at once
    except (OSError, UnicodeDecodeError, csv.Error, StopIteration, pyarrow.ArrowException):
        return None

    lines = range(lines_before + 1, last_line + 1)
    has_empty_lines = len(lines) != table.num_rows
    if not lines or has_empty_lines or _may_repeat_names(names, table):
        return None
    return CsvContent(names, lines, _texts_of(table.columns, separator), last_line)


def _plain_lines(file: Path, separator: str) -> int:
    """Return the number of lines of a file, 0 if it is not plain.

    PyArrow and Python's reader see the same rows in a plain file: quotes only enclose whole values
    without another quote or a line break; and lines end with a line feed, perhaps after a carriage
    return.
    """
    lines = 0
    with file.open("rb") as opened:
        if opened.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
            opened.seek(0)
        while True:
            chunk = opened.read(BLOCK_BYTES) + opened.readline()  # whole lines
            if not chunk:
                return lines
            lines += chunk.count(b"\n")
            if not chunk.endswith(b"\n"):  # the last line of the file may end without one
                lines += 1
            has_returns = chunk.count(b"\r") > chunk.count(b"\r\n")  # alone
            has_other_signs = has_returns or b"\0" in chunk
            if has_other_signs or not _quotes_enclose_values(chunk, separator):
                return 0


def _quotes_enclose_values(lines: bytes, separator: str) -> bool:
    """Return whether all quotes in whole lines enclose values, which have neither quote nor break.

    Lines end with a line feed, perhaps after a carriage return.
    """
    if b'"' not in lines:
        return True
    signs = np.frombuffer(b"\n%b\n" % lines, np.uint8)
    quotes = np.flatnonzero(signs == ord('"'))
    if len(quotes) % 2:
        return False
    opening = quotes[::2]
    closing = quotes[1::2]
    begins_value = np.isin(signs[opening - 1], [*separator.encode(), *b"\n"])
    ends_value = np.isin(signs[closing + 1], [*separator.encode(), *b"\r\n"])
    breaks = np.flatnonzero(signs == ord("\n"))
    in_one_line = np.searchsorted(breaks, opening) == np.searchsorted(breaks, closing)
    return bool(begins_value.all() and ends_value.all() and in_one_line.all())


def _may_repeat_names(names: list[str], table: Any) -> bool:
    """Return whether a row may have the columns' names again, which `_by_python` refuses.

    If there is a column "label", that row has the value "label" in it.
    """
    from pyarrow import compute  # not for every command

    if "label" not in names:
        return False
    labels = table.column(names.index("label"))
    return bool(compute.any(compute.match_substring(labels, "label")).as_py())


def _by_python(file: Path, header: list[str] | None) -> CsvContent:
    """Read a CSV file by Python's reader, without empty lines; DataError as for `read_csv`."""
    import pyarrow  # not for every command

    lines: list[int] = []
    rows: list[list[str]] = []
    texts: dict[str, str] = {}  # so that equal values are one text in memory
    last = 0  # the last line read, not counting `lines_before`, which the reader does not see
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            separator, lines_before = _separator(opened)
            reader = csv.reader(opened, delimiter=separator, strict=True)
            names = header
            for row in with_progress(reader, f"rows read of {file}"):
                first = lines_before + last + 1
                last = reader.line_num
                if not row:
                    continue
                values = [texts.setdefault(value, value) for value in map(str.strip, row)]
                if names is None:
                    names = [with_composed_letters(name) for name in values]
                    continue
                if len(values) != len(names):
                    wanted = f"there are {len(names)} columns"
                    raise DataError(f"{file}, line {first}: {len(values)} values; {wanted}")
                # without a column "label" the first row may be a sample, which may occur again
                if values == names and "label" in names:
                    again = "is the row of names again; take it out"
                    raise DataError(f"{file}, line {first}: {again}")
                lines.append(first)
                rows.append(values)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as CSV in UTF-8 ({error})") from error
    except csv.Error as error:
        begins = f"the row that begins in line {lines_before + last + 1}"
        ends = f"cannot be read, up to line {lines_before + reader.line_num} ({error})"
        cure = 'is a quote (") without its pair? One within a text is ""'
        raise DataError(f"{file}: {begins} {ends}; {cure}") from error
    columns = [
        pyarrow.chunked_array([values], pyarrow.string()) for values in zip(*rows, strict=True)
    ]
    return CsvContent(names or [], lines, _texts_of(columns, separator), lines_before + last)


def _separator(opened: TextIO) -> tuple[str, int]:
    """Return the sign between columns, and the number of lines before the first row.

    The sign is a comma. If the first row has none, it is the commonest of ``;``, tab and ``|``
    there: spreadsheets of some languages save so. Excel may say it in a line before, ``sep=;``.
    The file is left at the beginning of the first row.
    """
    first = re.sub('"[^"]*"', "", opened.readline())  # without texts in quotes
    excel_line = re.fullmatch(r"sep=(.)\s*", first)
    if excel_line:
        return excel_line[1], 1
    opened.seek(0)
    signs = re.findall("[;\t|]", first)
    if "," in first or not signs:
        return ",", 0
    return Counter(signs).most_common(1)[0][0], 0


def _texts_of(columns: Iterable[Any], separator: str) -> list[ArrowTexts]:
    """Return PyArrow's columns as texts.

    Where commas do not separate columns, they may be decimal ones: these become points. But 1,234
    may be 1234: it is a number only if another column shows that the file's commas are decimal
    ones, as 18,5 does. In such a file 1.234 is unclear.
    """
    from pyarrow import compute  # not for every command

    texts = [ArrowTexts(column) for column in columns]
    if separator == ",":
        return texts
    # with a point in the column, too, commas may separate words
    are_decimal = [column.all_with("[.,]", _DECIMAL_COMMA) for column in texts]
    may_be_groups = [column.all_with(",", _ONE_GROUP) for column in texts]
    is_file_of_decimal_commas = any(
        decimal and not groups for decimal, groups in zip(are_decimal, may_be_groups, strict=True)
    )
    result = []
    for column, decimal in zip(texts, are_decimal, strict=True):
        if decimal and is_file_of_decimal_commas:
            column = ArrowTexts(compute.replace_substring(column.texts, ",", "."))
        elif decimal or (is_file_of_decimal_commas and column.all_with(r"\.", _GROUPS_BY_POINTS)):
            column = ArrowTexts(column.texts, are_unclear=True)
        result.append(column)
    return result

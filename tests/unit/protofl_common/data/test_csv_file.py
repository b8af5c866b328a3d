"""The two readers of CSV files: what PyArrow may read, Python's reader reads alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofl_common.data import csv_file
from protofl_common.data.csv_file import _by_arrow, _by_python, _plain_lines
from protofl_common.data.table import _numbers, read_columns
from tests.unit.protofl_common.data.conftest import refused

NUMBERS = ["1", "-0", "+1", "1.", ".5", "1e400", "-1e-400", "nan", "NaN(1)", "Infinity", "1_0"]
NUMBERS += [
    "9007199254740993",
    "16777217",
    "1" * 30,
    "0.1e-7",
    "1d5",
    "0x10",
    "٣",
    "1,5",
    "1,234,5",
]
TEXTS = [
    "",
    " ",
    " 1 ",
    "\x1f2\x1c",
    "\u00a03\u3000",
    "1.000,5",
    "2021-03-04",
    "04/03/2021",
    "true",
]
TEXTS += ["?", "NA", "label", "männlich", "\u2028", '"', '""', '"a"', '"a,b"', '"a;b"', '"a""b"']
TEXTS += ['"a\nb"', 'a"b"', '"a"b', ' "a"', "\0", "\ufeff", "=1+1", "#", "\\", "'", "\x85"]
SIGNS = [",", ";", "\t", "|"]
ENDS = ["\n", "\r\n", "\r", "\n\n", "\n \n"]


def content_of(read):
    """Return everything that a reader has found, and the numbers that its columns become."""
    texts = [list(column) for column in read.columns]
    slices = [list(column[1:3]) for column in read.columns]
    numbers = [_numbers(column).tobytes() for column in read.columns]  # NaN equals NaN in bytes
    return read.names, list(read.lines), read.last_line, texts, slices, numbers


@given(st.data())
def test_what_pyarrow_may_read_pythons_reader_reads_alike(tmp_path_factory, data):
    """Whatever a file contains: if PyArrow reads it at all, both find the same."""
    sign = data.draw(st.sampled_from(SIGNS))
    plain = ["1", "2"] * 30  # most cells, so that PyArrow reads some of the files
    cells = st.lists(st.sampled_from(NUMBERS + TEXTS + plain), min_size=2, max_size=2)
    rows = [["a", "label"], *data.draw(st.lists(cells, max_size=6))]
    ragged = data.draw(st.sampled_from(["", "", "", sign, "x"]))  # after the last row
    end = data.draw(st.sampled_from(["\n", *ENDS]))
    start = data.draw(st.sampled_from(["", "", "\ufeff", f"sep={sign}\n", "\n"]))
    text = start + end.join(map(sign.join, rows)) + ragged + data.draw(st.sampled_from(["", end]))
    file = tmp_path_factory.mktemp("csv") / "t.csv"
    file.write_bytes(text.encode())

    by_arrow = _by_arrow(file, None)
    if by_arrow is not None:
        assert content_of(by_arrow) == content_of(_by_python(file, None))


@pytest.mark.parametrize("text", [
    "a,label\n1,x\n2.5,y\n",
    "a,label\r\n1,x\r\n2.5,y",
    '\ufeff"a","label"\n1,"x, y"\n,"männlich"\n',
    "sep=;\na;label\n1,5; x \n2;y\n",
    " 1 ,x\n+2,\x1fy\n",
])  # fmt: skip
def test_plain_files_are_read_by_pyarrow(text, tmp_path):
    file = tmp_path / "t.csv"
    file.write_bytes(text.encode())
    read = _by_arrow(file, None)
    assert read is not None
    assert content_of(read) == content_of(_by_python(file, None))


@pytest.mark.parametrize("text", [
    b"a,label\n1\n", b"a,label\n1,x,\n", b"a,label\n\xff,x\n", b'a,label\n1,"x\n',
    b"a,label\n1,x\na,label\n", b"a,label\n\n1,x,y\n",
])  # fmt: skip
def test_what_is_refused_is_refused_by_pythons_reader(text, tmp_path):
    file = tmp_path / "t.csv"
    file.write_bytes(text)
    assert _by_arrow(file, None) is None
    with refused(r"t\.csv"):
        csv_file.read_csv(file)


def test_blocks_do_not_change_what_is_read(tmp_path, monkeypatch):
    """PyArrow reads a file in blocks, whose borders fall anywhere in its lines."""
    monkeypatch.setattr(csv_file, "BLOCK_BYTES", 64)  # of a file of some thousand bytes
    file = tmp_path / "t.csv"
    lines = [f'{row / 7},"{row}, {row}",c{row % 3}' for row in range(100)]
    file.write_text("\n".join(["a,b,label", *lines]))
    assert _plain_lines(file, ",") == 1 + len(lines)
    read = _by_arrow(file, None)
    assert read is not None
    assert len(read.columns) == 3
    assert content_of(read) == content_of(_by_python(file, None))


def test_a_category_may_be_called_none_although_that_stands_for_a_gap_elsewhere():
    column = {"smoker": ["none", "some", "", "none"]}
    chosen = ("smoker:none|some",)
    read = read_columns(column, chosen, "here", "row {}".format, gaps=True)
    assert np.array_equal(read, [[1, 0], [0, 1], [0, 0], [1, 0]])

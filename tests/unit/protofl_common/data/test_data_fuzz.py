"""Valid files of each kind with random damage: read as samples, or refused in one line.

``make fuzz`` tries 1,000 of each of the 15 kinds.
"""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from protofl_common.basics.text import is_short_and_printable
from protofl_common.config.sections import DataSettings
from protofl_common.data.images import read_folder
from protofl_common.data.own import read_arrays, read_manifest, read_text
from protofl_common.data.raw import DataError
from protofl_common.tools.cli.predict import read_batches
from tests.support.hangs import computes_at_most

EXAMPLES = max(15, settings().max_examples // 10)  # of each kind
HANG = 30
"""Seconds of computing, on however busy a machine, after which reading never ends."""
LONGEST_LINE = 2000  # letters of an error
TABLE = SimpleNamespace(input_type="float32", input_shape=(2,), fill=(), columns=("a", "b"))
FRAGMENTS = [b'"', b",", b";", b"\n", b"\r", b"nan", b"inf", b"1e999", b"_", b"|", b"\xff", b"\0"]
FRAGMENTS += [b"label", b"split", b"client", b"../", b"\xef\xbb\xbf", b"0" * 40, b"\xff" * 8]


@st.composite
def damage(draw):
    """Draw a function that makes one to four changes to a file's bytes.

    R replaces bytes, I inserts some, D deletes a range, M repeats one, C keeps the start or end.
    """
    places = st.floats(0, 1, allow_nan=False)
    new = st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=8))
    change = st.tuples(st.sampled_from("RIDMC"), places, places, new)
    changes = draw(st.lists(change, min_size=1, max_size=4))

    def damaged(content):
        """Return ``content`` after all changes: replaced, inserted, deleted, repeated or cut."""
        for kind, first, second, inserted in changes:
            start = int(first * len(content))
            length = int(second**4 * (len(content) - start))  # the power makes most ranges short
            end = start + length
            match kind:
                case "R":
                    content = content[:start] + inserted + content[start + len(inserted) :]
                case "I":
                    content = content[:start] + inserted + content[start:]
                case "D":
                    content = content[:start] + content[end:]
                case "M":
                    content = content[:end] + content[start:end] + content[end:]
                case "C":
                    content = content[:end] if second else content[:start]
        return content

    return damaged


def table_of(rows):
    """Return columns of a table with ``rows`` rows, of two clients and two classes."""
    return {
        "a": [row / 7 for row in range(rows)],
        "b": [float(row % 3) for row in range(rows)],
        "client": [f"p{row % 2}" for row in range(rows)],
        "label": ["sick" if row % 2 else "well" for row in range(rows)],
    }


def as_csv(sign, quote):
    columns = table_of(12)
    rows = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    lines = [sign.join(f"{quote}{value}{quote}" for value in row) for row in rows]
    return "\n".join(lines).encode()


def as_npz(compressed):
    file = io.BytesIO()
    save = np.savez_compressed if compressed else np.savez
    save(file, inputs=np.eye(12, 2, dtype=np.float32), labels=np.arange(12) % 2)
    return file.getvalue()


def as_npy():
    file = io.BytesIO()
    np.save(file, np.eye(12, 2))
    return file.getvalue()


def as_parquet():
    file = io.BytesIO()
    parquet.write_table(pa.table(table_of(12)), file)
    return file.getvalue()


def as_image(kind):
    file = io.BytesIO()
    pixels = np.arange(20 * 10 * 3, dtype=np.uint8).reshape(20, 10, 3)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


CONTENTS = {
    "arrays.csv": as_csv(",", ""),
    "quoted.csv": as_csv(";", '"'),
    "arrays.npz": as_npz(compressed=False),
    "packed.npz": as_npz(compressed=True),
    "table.parquet": as_parquet(),
    "inputs.npy": as_npy(),
    "texts.csv": b'label,text\nx,"one, two"\ny,three\nx,four\ny,five\n',
    "manifest.csv": b"file,label,client,split\n0.png,x,p,train\n1.png,y,q,train\n0.png,x,p,test\n",
}
KINDS = [*CONTENTS, "x.png", "x.jpg", "x.tif", "x.gif", "x.bmp", "x.webp", "x.ppm"]


def read(kind, folder, damaged):
    """Damage a file of this kind, and read it as training does; arrays also as prediction does.

    Return what training reads; None for ``inputs.npy``, which is for prediction alone.
    """
    if kind in CONTENTS:
        file = folder / kind
        file.write_bytes(damaged(CONTENTS[kind]))
        if kind.endswith((".npy", ".npz")):
            _predict(file)
        settings = DataSettings(data_dir=str(file), image_size=8)
        if kind == "inputs.npy":
            return None
        if kind == "manifest.csv":
            for number in range(2):
                Image.new("RGB", (9, 9), (number, 0, 0)).save(folder / f"{number}.png")
            return read_manifest(settings)
        return read_text(settings) if kind == "texts.csv" else read_arrays(settings)

    valid = as_image(Image.registered_extensions()[Path(kind).suffix])
    for name in ("sick", "well"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / kind).write_bytes(valid)
    (folder / "sick" / kind).write_bytes(damaged(valid))
    return read_folder(DataSettings(dataset="image-folder", data_dir=str(folder), image_size=8))


def _predict(file):
    """Read a file to predict: its samples are numbers that a model takes, or have a reason."""
    (samples,) = read_batches([file], TABLE)
    if samples.inputs is not None:
        assert np.isfinite(samples.inputs).all()
        assert samples.inputs.shape[1:] == (2,)
    for reason in samples.problems.values():
        assert len(reason) < LONGEST_LINE


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")  # of Pillow and NumPy, about what is damaged
@given(damaged=damage())
@settings(max_examples=EXAMPLES)
def test_a_damaged_file_is_read_as_samples_or_refused_in_a_line(kind, tmp_path_factory, damaged):
    """Reading ends in time; what is read has finite inputs, and labels of plain class names."""
    folder = tmp_path_factory.getbasetemp() / f"fuzz-{kind}"
    folder.mkdir(exist_ok=True)
    data = None
    refusal = ""
    try:
        with computes_at_most(HANG, "a file that is never read"):
            data = read(kind, folder, damaged)
    except DataError as error:
        refusal = str(error)
    event("refused" if refusal else "read")
    assert len(refusal) < LONGEST_LINE
    assert all(line.isprintable() for line in refusal.split("\n"))
    if data is None:
        return
    assert len(data.inputs) == len(data.labels) > 0
    assert set(data.labels.tolist()) <= set(range(len(data.classes)))
    assert all(map(is_short_and_printable, data.classes))
    if data.inputs.dtype.kind == "f":
        assert np.isfinite(data.inputs).all()
    else:
        assert data.inputs.dtype in (np.uint8, np.int64)

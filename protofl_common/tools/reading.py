"""Files that `protofl predict` reads, decoded by threads while the model computes, and those that it writes."""

import csv
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from protofl_common.basics.files import replacing
from protofl_common.config.options import SettingsError
from protofl_common.data.images import read_image
from protofl_common.data.own import tokens
from protofl_common.data.raw import DataError, Inputs
from protofl_common.data.table import Rows, name_and_categories, read_columns

if TYPE_CHECKING:
    from protofl_common.models.trained import ModelCard  # PyTorch, seconds

ARRAYS = (".npy", ".npz")
_FORMULA = re.compile(r"(?s)\A(?=[=+\-@\t\r].)(?![+-][\d.e-]+\Z)")  # before what a spreadsheet would compute
FILES = 256  # of a batch; the next one is decoded ahead

Row = dict[str, Any]  # column -> text, number, truth value, or None
Add = Callable[[Sequence[Row]], None]


class Samples(NamedTuple):
    names: list[str]  # of each: an image's file, or ``FILE:ROW``
    inputs: Inputs | None  # [N, …]; None where no file could be read
    problems: dict[str, str]  # file that could not be read -> why


def read_ahead(files: Sequence[Path], card: "ModelCard") -> Iterator[Samples]:
    """Yield the samples of ``files`` in batches, as the model of the ``card`` takes them, in their order."""
    read = partial(_read, card=card)
    batches = [files[start : start + FILES] for start in range(0, len(files), FILES)]
    with ThreadPoolExecutor() as pool:
        ahead = pool.map(read, batches[0])
        for following in [*batches[1:], []]:
            ready, ahead = ahead, pool.map(read, following)
            names, inputs, problems = zip(*ready, strict=True)
            whole = [part for part in inputs if part is not None]
            reasons = {file: reason for of_file in problems for file, reason in of_file.items()}
            yield Samples([*chain(*names)], np.concatenate(whole) if whole else None, reasons)


def _read(file: Path, card: "ModelCard") -> Samples:
    shape, kind = card.input_shape, card.input_type
    name = os.fsencode(file).decode(errors="backslashreplace")  # a name need not be text
    try:
        if kind == "uint8" and file.suffix not in ARRAYS:
            image = read_image(file, shape[1])  # stretched to the model's size
            if shape[0] == 1:
                image = np.asarray(Image.fromarray(image.transpose(1, 2, 0)).convert("L"))[None]
            return Samples([name], image[None], {})
        rows = _rows(file, card)
        if rows.shape[1:] != shape:
            raise DataError(f"a sample is {list(rows.shape[1:])}; the model takes {list(shape)}")
        if not np.can_cast(rows.dtype, kind, "same_kind"):
            raise DataError(f"samples are {rows.dtype}; the model takes {kind}")
        return Samples([f"{name}:{row}" for row in range(len(rows))], rows.astype(kind, copy=False), {})
    except Exception as error:  # what decoders raise of a broken file may be anything
        return Samples([], None, {name: str(error) if isinstance(error, DataError) else repr(error)})


def _rows(file: Path, card: "ModelCard") -> Inputs:
    """The samples of a file: ``.npy``, ``.npz`` with ``inputs``, or CSV or Parquet with the columns of the training."""
    if file.suffix == ".npy":
        return np.asarray(np.load(file, allow_pickle=False))
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            if "inputs" not in arrays:
                raise DataError(f"has no array 'inputs', only {', '.join(map(repr, arrays))}")
            return np.asarray(arrays["inputs"])
    rows = Rows(file)
    is_text = card.input_type == "int64"
    names = [column if is_text else name_and_categories(column)[0] for column in card.columns]
    if absent := [name for name in names if name not in rows.columns]:
        raise DataError(f"has no column {absent[0]!r}; the model takes {', '.join(names)}")
    if is_text:
        return tokens(rows.texts(card.columns or rows.others), card.input_shape[0])
    return read_columns(rows.columns, card.columns or rows.others, str(file), rows.place, gaps=bool(card.fill))


@contextmanager
def rows_file(path: Path) -> Iterator[Add]:
    """Yield a function for rows of equal columns, which in the end replace ``path``; SettingsError if they cannot."""
    if path.suffix != ".csv":
        raise SettingsError(f"--out {path}: must end in .csv")
    try:
        with replacing(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")

            def add(rows: Sequence[Row]) -> None:
                if not file.tell():
                    writer.writerow(rows[0])
                cells = ([_FORMULA.sub("'", of) if isinstance(of, str) else of for of in row.values()] for row in rows)
                writer.writerows(cells)

            yield add
    except OSError as error:
        raise SettingsError(f"--out {path}: cannot be written ({error})") from error

"""Rows of a long table into a CSV or a Parquet file, as they come."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from protofl_common.basics.files import replacing
from protofl_common.config.options import SettingsError

Row = dict[str, Any]  # column -> text, number, truth value, or None
Add = Callable[[Sequence[Row]], None]


@contextmanager
def rows_file(path: Path) -> Iterator[Add]:
    """Yield a function for rows of equal columns, at least one. In the end, but for an error, they replace ``path``.

    SettingsError for a name that ends in neither ``.csv`` nor ``.parquet``, and where a package or the folder is
    missing.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise SettingsError(f"--out {path}: must end in .csv or .parquet")
    try:
        with replacing(path) as beside, (_csv if path.suffix == ".csv" else _parquet)(beside) as add:
            yield add
    except ImportError as error:
        cure = f"{error.name} is not installed; pip install pyarrow, or name a .csv"
        raise SettingsError(f"--out {path}: {cure}") from error
    except OSError as error:
        raise SettingsError(f"--out {path}: cannot be written ({error})") from error


@contextmanager
def _csv(path: Path) -> Iterator[Add]:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")

        def add(rows: Sequence[Row]) -> None:
            if not file.tell():
                writer.writerow(rows[0])
            writer.writerows(row.values() for row in rows)

        yield add


@contextmanager
def _parquet(path: Path) -> Iterator[Add]:
    import pyarrow
    from pyarrow import parquet

    writers: list[Any] = []
    with ExitStack() as stack:

        def add(rows: Sequence[Row]) -> None:
            table = pyarrow.Table.from_pylist(list(rows), schema=writers[0].schema if writers else None)
            if not writers:
                writers.append(stack.enter_context(parquet.ParquetWriter(path, table.schema)))
            writers[0].write_table(table)

        yield add

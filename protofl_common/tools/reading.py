"""Files as a model wants them, read ahead of it in threads: decoding goes on while PyTorch loads and while it computes.

It imports no PyTorch.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from protofl_common.config.options import SettingsError
from protofl_common.data.images import read_image
from protofl_common.data.own import Rows, tokens
from protofl_common.data.raw import DataError, Images, Inputs
from protofl_common.runs.folder import CARD, MOST_NUMBERS

ARRAYS = (".npy", ".npz")
FILES = 256
"""Of a batch; up to twice as many are decoded ahead."""


@dataclass(frozen=True)
class Samples:
    """Read one file, or several."""

    names: list[str]
    """Of each: an image's file, or ``FILE:ROW``."""
    inputs: Inputs | None
    """[N, …]; None where no file could be read."""
    problems: dict[str, str]
    """File that could not be read -> why."""


def input_of(folder: Path) -> tuple[tuple[int, ...], str]:
    """Shape and type of a sample, as the card of an exported model says them; whoever loads the model checks them.

    SettingsError if there is no card, or it is none.
    """
    if (folder / "clients").is_dir():
        raise SettingsError(f"{folder} is a run; first take a model out of it: protofl export {folder} --out model")
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
        shape, kind = tuple(map(int, card["input-shape"])), str(card["input-type"])
        if not 0 < math.prod(shape) <= MOST_NUMBERS or min(shape) < 1:
            raise ValueError(f"input-shape = {list(shape)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(
            f"{folder / CARD} cannot be read ({error}); give a folder that protofl export wrote"
        ) from error
    return shape, kind


def read_ahead(files: Sequence[Path], shape: tuple[int, ...], kind: str, *, fast: bool = False) -> Iterator[Samples]:
    """Batches of the samples of ``files``, in their order; threads begin with the first ones before this returns."""
    pool, rest = ThreadPoolExecutor(), iter(files)
    read = partial(_read, shape=shape, kind=kind, fast=fast)
    ahead = deque(pool.submit(read, file) for file in islice(rest, 2 * FILES))

    def batches() -> Iterator[Samples]:
        try:
            while ahead:
                done: list[Future[Samples]] = [ahead.popleft() for _ in range(min(FILES, len(ahead)))]
                ready = [one.result() for one in done]
                ahead.extend(pool.submit(read, file) for file in islice(rest, len(done)))
                yield _joined(ready)
        finally:
            pool.shutdown(cancel_futures=True)

    return batches()


def _joined(parts: list[Samples]) -> Samples:
    inputs = [part.inputs for part in parts if part.inputs is not None]
    names = [name for part in parts for name in part.names]
    problems = {file: reason for part in parts for file, reason in part.problems.items()}
    return Samples(names, np.concatenate(inputs) if inputs else None, problems)


def _read(file: Path, shape: tuple[int, ...], kind: str, fast: bool) -> Samples:
    """The samples of a file, or why there are none: image files have one, others one a row."""
    name = os.fsencode(file).decode(errors="backslashreplace")  # a name need not be text
    try:
        if kind == "uint8" and file.suffix not in ARRAYS:
            colour = read_image(file, shape[1], fast=fast)[None]  # stretched to the model's size
            return Samples([name], colour if shape[0] == 3 else _grey(colour), {})
        rows = _rows(file, shape, kind)
        if rows.shape[1:] != shape:
            raise DataError(f"a sample is {list(rows.shape[1:])}; the model takes {list(shape)}")
        if not np.can_cast(rows.dtype, kind, "same_kind"):
            raise DataError(f"samples are {rows.dtype}; the model takes {kind}")
        return Samples([f"{name}:{row}" for row in range(len(rows))], rows.astype(kind, copy=False), {})
    except Exception as error:  # what decoders raise of a broken file may be anything
        return Samples([], None, {name: str(error) if isinstance(error, DataError) else repr(error)})


def _rows(file: Path, shape: tuple[int, ...], kind: str) -> Inputs:
    """The samples of a file: ``.npy``, ``.npz`` with ``inputs``, or CSV with the columns of the training data."""
    if file.suffix == ".npy":
        array: Inputs = np.load(file, allow_pickle=False)
        return array
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            if "inputs" not in arrays:
                raise DataError(f"has no array 'inputs', only {', '.join(map(repr, arrays))}")
            return np.asarray(arrays["inputs"])
    rows = Rows(file)
    if kind == "int64":
        return tokens(rows.texts(), shape[0])
    return rows.numbers(rows.others)


def _grey(colour: Images) -> Images:
    """[N, 3, H, W] -> [N, 1, H, W]: luma as PIL computes it (ITU-R 601-2), so that a grey file stays as it is."""
    weights = np.array([19595, 38470, 7471], dtype=np.int64)
    return np.asarray((np.tensordot(weights, colour, axes=(0, 1)) + 0x8000) >> 16, dtype=np.uint8)[:, None]

"""Predict by an exported model: the class of each input, with probability, and the nearest prototype.

protofl predict model photo.jpg
protofl predict model photos/ --out classes.csv
protofl predict model patients.csv --by head --json
protofl predict runs/mine --out mine.csv             # all clients of a simulated run, on their test samples

An input that is farther from every prototype than the site's own ones are is called unknown. A file that cannot be read
is left out and named at the end, with the reason. Exits with 0 where all files were read, 3 where some were left out, 1
where none could be read. Of a folder, files are read whose names end as those of images do. In a CSV file a text that
a spreadsheet would take for a formula, as the name =1+1.png, has an apostrophe before it.

Columns for a run: client, domain, sample (its row in the data set), label, name; where the model predicts by its head:
head (the label) and head-0, head-1, … (logits of the classes); where by prototypes: prototype and prototype-0, …
(-d²/T, d the distance from the nearest prototype of the class; empty for a class without). Softmax makes probabilities.
"""

import argparse
import csv
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import track

from protofl_common.basics.files import replacing
from protofl_common.basics.text import in_order
from protofl_common.config.options import SettingsError
from protofl_common.data.division import placed, shares_of
from protofl_common.data.images import image_files, read_image
from protofl_common.data.own import tokens
from protofl_common.data.raw import DataError, Inputs
from protofl_common.data.store import open_data
from protofl_common.data.table import Rows, name_and_categories, read_columns
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.runs.folder import CARD, RunFolder
from protofl_common.tools.cli.arguments import add_allow_python, print_json, read_recipe, run_named
from protofl_common.tools.cli.export import models_in

if TYPE_CHECKING:
    from protofl_common.models.trained import ModelCard  # PyTorch, seconds

UNKNOWN = "unknown"
SOME_LEFT_OUT = 3  # exit status
CLOSE = 0.005  # another processor's rounding may change a prediction or two of hundreds
ARRAYS = (".npy", ".npz")
_FORMULA = re.compile(r"(?s)\A(?=[=+\-@\t\r].)(?![+-][\d.e-]+\Z)")  # before what a spreadsheet would compute
FILES = 256  # of a batch; the next one is decoded ahead

Row = dict[str, Any]  # column -> text, number, truth value, or None
Add = Callable[[Sequence[Row]], None]


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder that protofl export wrote, or of a run")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help=_FILES)
    parser.add_argument("--by", default="", help="head or prototype (default: right more often); of a run both, always")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="a row per sample (of a run: RUN/predictions.csv)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--json", action="store_true", help="a line of JSON per sample, and per file left out")
    add_allow_python(parser, "the model", backbones=True)


_FILES = "image files, or folders of them; .npy, or .npz with inputs; for models of numbers or texts also CSV"


def act(arguments: argparse.Namespace) -> int:
    if not arguments.files:
        return _of_a_run(arguments)
    if ((run := arguments.model) / "clients").is_dir():
        raise SettingsError(f"{run} is a run; first take a model out of it: protofl export {run} --out model")
    from protofl_common.tools.inference import Predictor  # PyTorch, seconds

    files, console = _files(arguments.files), Console(stderr=True)
    warnings.filterwarnings("ignore", module="PIL")  # of odd metadata: what matters is whether pixels can be read
    predictor = Predictor.load(arguments.model, arguments.device, arguments.allow_backbones)
    batches = read_ahead(files, predictor.card)
    by, width = predictor.way(arguments.by), max(map(len, predictor.card.classes)) + len(f"{UNKNOWN} (?)")
    shows_rows, problems = not (arguments.json or arguments.out), dict[str, str]()
    hidden = not console.is_terminal or (not arguments.out and sys.stdout.isatty())
    with rows_file(arguments.out) if arguments.out else nullcontext() as add:
        if shows_rows:
            print(_line(f"class (by {by})", "probability", "nearest", "distance", "file", width))
        for samples in track(batches, "files", -(-len(files) // FILES), console=console, disable=hidden):
            answers = predictor.predict(samples.inputs, by) if samples.inputs is not None else []
            named = zip(samples.names, answers, strict=True)
            rows: list[Row] = [{"file": name, "by": by, **vars(answer)} for name, answer in named]
            problems |= samples.problems
            if add and rows:
                add(rows)
            left_out = [{"file": file, "error": reason} for file, reason in samples.problems.items()]
            for row in [*rows, *left_out] if arguments.json else rows if shows_rows else ():
                print(json.dumps(row) if arguments.json else _text(row, width))
        for file, reason in problems.items():
            print(f"left out: {_one_line(file)}: {_one_line(reason.removeprefix(f'{file} '))}", file=sys.stderr)
        if len(problems) == len(files):
            raise SettingsError("none of these files could be read")
    if problems or arguments.out:
        where = f"; {arguments.out}" if arguments.out else ""
        print(f"{len(files) - len(problems):,} files read, {len(problems):,} left out{where}", file=sys.stderr)
    return SOME_LEFT_OUT if problems else 0


def _of_a_run(arguments: argparse.Namespace) -> int:
    if (arguments.model / CARD).exists():
        raise SettingsError("FILE: which files? Images, folders of them, .npy, .npz or CSV")
    from server_app.checkpoint import alone_in  # PyTorch, seconds

    run = run_named(str(arguments.model))
    files, out = models_in(run), arguments.out or run / "predictions.csv"
    recipe, count = read_recipe(str(run / "settings.toml")), 0
    settings = Settings.from_run_config(default_run_config() | recipe.settings)
    RunFolder(run).check_division(settings.data.partition)
    inside = out.absolute().parent == run.absolute()  # where a resumption would remove what is being written
    with alone_in(run) if inside else nullcontext(), rows_file(out) as add:
        for site in in_order(files):
            if rows := _rows_of(files[site], settings, int(recipe.federation["num-supernodes"]), arguments):
                add(rows)
            count += len(rows)
    if arguments.json:
        print_json("predict", {"file": str(out), "rows": count, "clients": in_order(files)})
    else:
        print(f"{out}: {count:,} test samples of {len(files)} clients")
    return 0


def _rows_of(file: Path, settings: Settings, clients: int, arguments: argparse.Namespace) -> list[Row]:
    from protofl_common.models.trained import TrainedModel
    from protofl_common.tools.inference import Predictor

    trained = TrainedModel.read(file)
    card, data, number = trained.card, open_data(settings.data), trained.card.site.removeprefix("site-")
    if not number.isdigit() or int(number) >= clients:
        raise SettingsError(f"{card.site}: no simulated client; its data are on a machine of its own")
    client, of = placed(settings.data, int(number), clients)
    rows_N = shares_of(data, settings.data, settings.run.seed, of)[client].test
    if len(rows_N) != card.test_samples:
        wanted = f"not {card.test_samples} as in the run; the data changed"
        raise DataError(f"{card.site}: {len(rows_N)} test samples, {wanted}")
    predictor = Predictor(trained, device=arguments.device, allow=arguments.allow_backbones)
    labels_N, scores = data.labels[rows_N], predictor.scores(data.inputs[rows_N])
    named = {"client": card.site, "domain": card.domain}
    rows: list[Row] = [
        named | {"sample": row, "label": label, "name": card.classes[label]}
        for row, label in zip(rows_N.tolist(), labels_N.tolist(), strict=True)
    ]
    for way, scores_NC in scores.items():
        right = float((scores_NC.argmax(1).numpy() == labels_N).mean()) if rows else 0.0
        if abs(right - card.accuracy[way]) > CLOSE:
            shares = f"{100 * right:.1f} % right by {way}, {100 * card.accuracy[way]:.1f} % in the run"
            print(f"warning: {card.site}: {shares}; the data, or what computes, are not the same", file=sys.stderr)
        for row, label, scores_C in zip(rows, scores_NC.argmax(1).tolist(), scores_NC.tolist(), strict=True):
            row[way] = label
            row |= {f"{way}-{c}": score if score > float("-inf") else None for c, score in enumerate(scores_C)}
    return rows


def _text(row: Row, width: int) -> str:
    answer = f"{UNKNOWN} ({row['name']}?)" if row["unknown"] else row["name"]
    nearest, distance = ("–", "–") if row["distance"] is None else (row["nearest"], f"{row['distance']:.4g}")
    return _line(answer, f"{row['probability']:.3f}", nearest, distance, _one_line(row["file"]), width)


def _line(said: str, probability: str, nearest: str, distance: str, file: str, width: int) -> str:
    return f"{said:{width}} {probability:>11}  {nearest:{width - len(UNKNOWN)}} {distance:>9}  {file}"


def _one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]


def _files(given: list[Path]) -> list[Path]:
    files: list[Path] = []
    for path in given:
        if not path.exists():
            raise SettingsError(f"{path}: there is no such file")
        if not (inside := image_files(path) if path.is_dir() else [path]):
            raise SettingsError(f"{path}: no images in this folder")
        files += inside
    return list(dict.fromkeys(files))


# -- the files that are read, decoded by threads while the model computes, and those that are written
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
        if (rows := _rows(file, card)).shape[1:] != shape:
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
    rows, is_text = Rows(file), card.input_type == "int64"
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

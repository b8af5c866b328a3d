"""Predict by an exported model: the class of each input, with probability, and the nearest
prototype.

protofl predict model photo.jpg
protofl predict model photos/ --out classes.csv
protofl predict model patients.csv --by head --json
protofl predict runs/mine --out mine.csv     # all clients of a simulated run, on their test samples
protofl predict runs/mine --figures mine      # confusion matrices, and a map of the features

An input is called unknown if it is farther from every prototype than the site's own inputs are. A
file that cannot be read is left out and named at the end, with the reason. The command exits with 0
if all files were read, with 3 if some were left out, and with 1 if none could be read. From a
folder it reads the files whose names end like those of images. In a CSV file a text that a
spreadsheet would take for a formula, such as the name =1+1.png, has an apostrophe before it.

For a run the columns are client, domain, sample (its row in the data set), label and name. If the
model predicts by its head, there are head (the label) and head-0, head-1, … (logits of the
classes). If it predicts by prototypes, there are prototype and prototype-0, … (-d²/T, where d is
the distance from the nearest prototype of the class; empty for a class without a prototype).
Softmax turns these numbers into probabilities. Where a sample has several labels, the columns are
called head-NAME and prototype-NAME. They are above 0 for a label that is predicted, a sigmoid turns
them into the label's probability, and prototype-NAME is empty if there are no prototypes of the
samples with the label, or of those without it.

For a run, --features FILE.npz keeps features [N, D] of all test samples, with client, sample and
label [N] of each; --figures DIR draws, as SVG and PDF, a confusion matrix for each way to predict,
and features (a map by t-SNE; of fewer than 50 samples by principal components).
"""

import csv
import json
import math
import os
import re
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from protofl_common.basics.files import replacing
from protofl_common.basics.text import in_order, printable
from protofl_common.config.options import SettingsError
from protofl_common.data.division import number_in_division, shares_of
from protofl_common.data.images import counts_of, image_files, read_image
from protofl_common.data.objects import inputs_for
from protofl_common.data.raw import DataError, Inputs
from protofl_common.data.store import StoredData, open_data
from protofl_common.data.table import TableFile
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.runs.folder import CARD, RunFolder
from protofl_common.tasks import MultiLabel
from protofl_common.tasks.metrics import KINDS
from protofl_common.tools.arguments import (
    FIGURES_HELP,
    add_allow_python,
    print_json,
    read_recipe,
    run_named,
)
from protofl_common.tools.cli.export import models_in

if TYPE_CHECKING:
    from protofl_common.models.trained import ModelCard, TrainedModel  # PyTorch, seconds
    from protofl_common.tools.inference import Predictor

LINE = "{:20}  {:>11}  {:10} {:>9}  {}"  # of the table on the screen
SOME_LEFT_OUT = 3  # exit status
# another processor's rounding may change a prediction or two of hundreds
ACCURACY_TOLERANCE = 0.005
ARRAYS = (".npy", ".npz")
# The empty place before a text that a spreadsheet would compute: one that begins with such a
# character and has more than that. A signed number, as -1.5e-3, is no formula.
_FORMULA = re.compile(r"(?s)\A(?=[=+\-@\t\r].)(?![+-][\d.e-]+\Z)")
FILES_PER_BATCH = 256

Row = dict[str, Any]  # column -> text, number, truth value, or None
AddRows = Callable[[Sequence[Row]], None]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder that protofl export wrote, or of a run"
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="image files, or folders of them; .npy, or .npz with inputs; for models of numbers or "
        "texts also CSV",
    )
    parser.add_argument(
        "--by",
        default="",
        help="head or prototype (default: right more often); of a run both, always",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.csv",
        help="a row per sample (of a run: RUN/predictions.csv)",
    )
    of_run = "of a run: the features of all test samples"
    parser.add_argument("--features", type=Path, metavar="FILE.npz", help=of_run)
    parser.add_argument("--figures", type=Path, metavar="DIR", help=f"of a run: {FIGURES_HELP}")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument(
        "--json", action="store_true", help="a line of JSON per sample, and per file left out"
    )
    add_allow_python(parser, "the model", backbones=True)


def act(arguments: Namespace) -> int:
    """Predict the files, or without any the test samples of a run; return the exit status."""
    if not arguments.files:
        return _predict_run(arguments)
    run = arguments.model
    if arguments.features or arguments.figures:
        raise SettingsError("--features, --figures: of a run only, as in protofl predict runs/mine")
    if (run / "clients").is_dir():
        raise SettingsError(
            f"{run} is a run; first take a model out of it: protofl export {run} --out model"
        )
    return _predict_files(arguments)


# -- files
def _predict_files(arguments: Namespace) -> int:
    """Predict each input of the files; return 0, or `SOME_LEFT_OUT`.

    Print a table, or with --json lines of JSON; with --out, write a CSV file and print no table.
    Files that cannot be read are named on stderr; SettingsError where none can be read.
    """
    from protofl_common.tools.inference import Predictor  # PyTorch, seconds

    files = _files(arguments.files)
    # PIL warns of odd metadata; only whether the pixels can be read matters here
    warnings.filterwarnings("ignore", module="PIL")
    predictor = Predictor.load(arguments.model, arguments.device, arguments.allow_backbones)
    by = predictor.chosen_inference(arguments.by)
    shows_table = not arguments.json and not arguments.out

    problems: dict[str, str] = {}
    with rows_file(arguments.out) if arguments.out else nullcontext() as add_rows:
        if shows_table:
            print(LINE.format(f"class (by {by})", "probability", "nearest", "distance", "file"))
        for samples in read_batches(files, predictor.card):
            rows = _rows_of_samples(samples, predictor, by)
            problems |= samples.problems
            if add_rows and rows:
                add_rows(rows)
            if arguments.json:
                rows += [{"file": file, "error": why} for file, why in samples.problems.items()]
            for row in rows:
                if arguments.json:
                    print(json.dumps(row))
                elif shows_table:
                    print(_table_line(row))
        for file, reason in problems.items():
            print(f"left out: {_one_line(file)}: {printable(reason)}", file=sys.stderr)
        if len(problems) == len(files):
            raise SettingsError("none of these files could be read")

    read = len(files) - len(problems)
    print(f"{read:,} files read, {len(problems):,} left out", file=sys.stderr)
    return SOME_LEFT_OUT if problems else 0


def _files(paths: list[Path]) -> list[Path]:
    """Return the files among ``paths``, and the images in the folders among them, each once.

    SettingsError for a path that does not exist, and for a folder without images. Say on stderr how
    many other files of the folders are left out.
    """
    files: list[Path] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        if not (path.is_file() or path.is_dir()):  # a pipe can be read only once
            raise SettingsError(f"{path}: there is no such file")
        inside = image_files(path, left_out) if path.is_dir() else [path]
        if not inside:
            raise SettingsError(f"{path}: no images in this folder")
        files += inside
    if left_out:
        print(f"left out of the folders: {counts_of(left_out)}", file=sys.stderr)
    return list(dict.fromkeys(files))


class Samples(NamedTuple):
    names: list[str]  # of each sample: the file of an image, or ``FILE:ROW``
    inputs: Inputs | None  # [N, …]; None where no file could be read
    problems: dict[str, str]  # file that could not be read -> why


def read_batches(files: Sequence[Path], card: "ModelCard") -> Iterator[Samples]:
    """Read files in batches of `FILES_PER_BATCH`, as inputs for the model of the ``card``.

    A file that cannot be read is among the ``problems`` of its batch.
    """
    for start in range(0, len(files), FILES_PER_BATCH):
        names: list[str] = []
        inputs: list[Inputs] = []
        problems: dict[str, str] = {}
        for file in files[start : start + FILES_PER_BATCH]:
            samples = _read(file, card)
            names += samples.names
            problems |= samples.problems
            if samples.inputs is not None:
                inputs.append(samples.inputs)
        yield Samples(names, np.concatenate(inputs) if inputs else None, problems)


def _read(file: Path, card: "ModelCard") -> Samples:
    """Return the samples of one file, or the reason why it cannot be read; nothing is raised.

    An image is one sample; in other files each row is one.
    """
    name = os.fsencode(file).decode(errors="backslashreplace")  # a name need not be UTF-8
    try:
        takes_images = card.input_type == "uint8"
        if takes_images and file.suffix.lower() not in ARRAYS:
            image = inputs_for(card, _image(file, card)[None], str(file))  # [1, C, H, W]
            return Samples([name], image, {})
        rows = inputs_for(card, _content(file), str(file))
        return Samples([f"{name}:{row}" for row in range(len(rows))], rows, {})
    except Exception as error:  # what decoders raise of a broken file may be anything
        reason = str(error) if isinstance(error, DataError) else printable(repr(error))
        return Samples([], None, {name: reason})


def _image(file: Path, card: "ModelCard") -> Inputs:
    """Return an image's pixels [channels, height, width], stretched to the model's size."""
    channels, size = card.input_shape[:2]
    image_CHW = read_image(file, size)  # in three colours
    if channels == 1:
        image_HWC = image_CHW.transpose(1, 2, 0)
        grey = Image.fromarray(image_HWC).convert("L")
        return np.asarray(grey)[None]
    return image_CHW


def _content(file: Path) -> Any:
    """Return the array of a ``.npy`` file, the arrays of ``.npz`` by name, or a CSV table."""
    if file.suffix.lower() not in ARRAYS:
        return TableFile(file)
    values = np.load(file, allow_pickle=False)
    if file.suffix.lower() == ".npy":
        return values
    with values:
        return dict(values)


def _rows_of_samples(samples: Samples, predictor: "Predictor", by: str) -> list[Row]:
    """Predict the samples that could be read, and return a row of the output for each."""
    if samples.inputs is None:
        return []
    rows = []
    answers = predictor.predict(samples.inputs, by)
    for name, answer in zip(samples.names, answers, strict=True):
        row = {"file": name, "by": by, **vars(answer)}
        # where a sample has several labels, a column for each
        for label, probability in row.pop("probabilities").items():
            row[f"probability of {label}"] = probability
        rows.append(row)
    return rows


def _table_line(row: Row) -> str:
    """Return a row as a line of the table on the screen."""
    answer = f"unknown ({row['name']}?)" if row["unknown"] else row["name"]
    nearest = row["nearest"] or "–"
    distance = "–" if row["distance"] is None else f"{row['distance']:.4g}"
    probability = f"{row['probability']:.3f}"
    return LINE.format(answer, probability, nearest, distance, _one_line(row["file"]))


def _one_line(text: str) -> str:
    """Return the text, with escapes such as ``\\n`` where it has unprintable characters."""
    return text if text.isprintable() else repr(text)[1:-1]  # without the quotes of repr


# -- a simulated run
def _predict_run(arguments: Namespace) -> int:
    """Predict the test samples of every client of a run into a CSV file, and return 0.

    With --features or --figures, write the samples' features, or draw them, too. SettingsError for
    an exported model (which needs files), a run without models, or one whose data were divided by
    another version of the code.
    """
    if (arguments.model / CARD).exists():
        raise SettingsError("FILE: which files? Images, folders of them, .npy, .npz or CSV")
    from server_app.run.checkpoint import locked_run  # PyTorch, seconds

    run = run_named(str(arguments.model))
    files = models_in(run)
    out = arguments.out or run / "predictions.csv"
    recipe = read_recipe(str(run / "settings.toml"))
    settings = Settings.from_run_config(default_run_config() | recipe.settings)
    if arguments.figures and settings.task is MultiLabel:
        raise SettingsError("--figures: needs one label per sample; these samples have several")
    RunFolder(run).check_division(settings.data.partition)
    # a run that goes on would remove what is being written in its folder, so it is locked then
    is_inside = out.absolute().parent == run.absolute()
    count = 0
    kept: list[Row] = []  # for the features and figures, if they are asked for
    features = []
    with locked_run(run) if is_inside else nullcontext(), rows_file(out) as add_rows:
        for site in in_order(files):
            clients = int(recipe.federation["num-supernodes"])
            client = _open_client(files[site], settings, clients, arguments)
            rows = _rows_of_client(client)
            if rows:
                add_rows(rows)
            count += len(rows)
            if arguments.features or arguments.figures:
                kept += rows
                features.append(client.predictor.features(client.inputs).numpy())
    if kept:
        # all clients have the same classes
        classes = client.predictor.card.classes
        _write_features_and_figures(kept, np.concatenate(features), classes, arguments)
    if arguments.json:
        print_json("predict", {"file": str(out), "rows": count, "clients": in_order(files)})
    else:
        print(f"{out}: {count:,} test samples of {len(files)} clients")
    return 0


class Client(NamedTuple):
    """A client's model, and the samples that it was tested on."""

    predictor: "Predictor"
    rows_N: np.ndarray  # in the data set
    inputs: Inputs
    labels_N: np.ndarray


def _open_client(file: Path, settings: Settings, clients: int, arguments: Namespace) -> Client:
    """Read the model in ``file``, and find the test samples of its client."""
    from protofl_common.models.trained import TrainedModel
    from protofl_common.tools.inference import Predictor

    trained = TrainedModel.read(file)
    data = open_data(settings.data)
    rows_N = _test_rows(trained, data, settings, clients)
    predictor = Predictor(trained, device=arguments.device, allow=arguments.allow_backbones)
    return Client(predictor, rows_N, data.inputs[rows_N], data.labels[rows_N])


def _rows_of_client(client: Client) -> list[Row]:
    """Predict the test samples of a client by its head and by prototypes; return a row for each.

    Warn on stderr where the accuracy is not that of the run.
    """
    card = client.predictor.card
    rows_N = client.rows_N
    labels_N = client.labels_N
    task = card.task
    scores = client.predictor.scores(client.inputs)

    rows: list[Row] = []
    names = task.names(task.tensor(labels_N))
    for sample, label, name in zip(rows_N.tolist(), labels_N.tolist(), names, strict=True):
        row = {"client": card.site, "domain": card.domain, "sample": sample, "label": label}
        rows.append({**row, "name": name})
    for inference, scores_NC in scores.items():  # by the head, and by prototypes
        predicted_N = task.predicted(scores_NC)
        right = int(task.correct(predicted_N, task.tensor(labels_N)))
        accuracy = right / max(1, len(rows))  # 0 for a client without test samples
        if abs(accuracy - card.accuracy[inference]) > ACCURACY_TOLERANCE:
            in_run = 100 * card.accuracy[inference]
            shares = f"{100 * accuracy:.1f} % right by {inference}, {in_run:.1f} % in the run"
            print(
                f"warning: {card.site}: {shares}; the data, or what computes, are not the same",
                file=sys.stderr,
            )
        answers = zip(rows, predicted_N.tolist(), scores_NC.tolist(), strict=True)
        for row, predicted, scores_C in answers:
            row[inference] = predicted
            for output, score in zip(task.output_names, scores_C, strict=True):
                # empty for a class without a prototype, whose score is infinite, and for NaN
                row[f"{inference}-{output}"] = score if math.isfinite(score) else None
    return rows


def _column(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows])


def _write_features_and_figures(
    rows: Sequence[Row],
    features_ND: np.ndarray,
    classes: Sequence[str],
    arguments: Namespace,
) -> None:
    """Write the features [N, D] of all clients' test samples, and draw the figures, as asked.

    ``rows`` are the N rows of `_rows_of_client`, in the same order.
    """
    labels_N = _column(rows, "label")
    sites_N = _column(rows, "client")
    if arguments.features:
        samples_N = _column(rows, "sample")
        with replacing(arguments.features) as beside, beside.open("wb") as file:
            np.savez_compressed(
                file, features=features_ND, label=labels_N, client=sites_N, sample=samples_N
            )
        print(arguments.features, file=sys.stderr)
    if not arguments.figures:
        return

    from protofl_common.report import paper  # matplotlib, half a second

    for way in KINDS:
        predicted = [row for row in rows if way in row]
        if predicted:
            drawing = paper.confusion(_column(predicted, "label"), _column(predicted, way), classes)
            drawing.save(arguments.figures, f"confusion-{way}")
    _, owners_N = np.unique(sites_N, return_inverse=True)  # a number for each client
    paper.features(features_ND, labels_N, classes, owners_N).save(arguments.figures)
    print(arguments.figures, file=sys.stderr)


def _test_rows(
    trained: "TrainedModel", data: StoredData, settings: Settings, clients: int
) -> np.ndarray:
    """Return the rows of the data set on which a client was tested, [N].

    SettingsError for a client that was not simulated among ``clients``; DataError where the data
    have changed.
    """
    card = trained.card
    number = card.site.removeprefix("site-")  # as simulated clients are called
    if not number.isdigit() or int(number) >= clients:
        raise SettingsError(
            f"{card.site}: no simulated client; its data are on a machine of its own"
        )
    # (0, 1) where no other client has a share of its data
    share, num_shares = number_in_division(settings.data, int(number), clients)
    rows_N = shares_of(data, settings.data, settings.run.seed, num_shares)[share].test
    if len(rows_N) != card.test_samples:
        wanted = f"not {card.test_samples} as in the run; the data changed"
        raise DataError(f"{card.site}: {len(rows_N)} test samples, {wanted}")
    return rows_N


# -- the file that is written
@contextmanager
def rows_file(path: Path) -> Iterator[AddRows]:
    """Yield a function that adds rows to a CSV file, the names of their columns first.

    All rows have the same columns. At the end of the block the file takes the place of ``path``; if
    the block fails, what was there stays. SettingsError if it cannot be written.
    """
    if path.suffix != ".csv":
        raise SettingsError(f"--out {path}: must end in .csv")
    try:
        with replacing(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")

            def add(rows: Sequence[Row]) -> None:
                if not file.tell():  # nothing is written yet
                    writer.writerow(rows[0])  # its keys: the names of the columns
                for row in rows:
                    writer.writerow([_without_formula(value) for value in row.values()])

            yield add
    except OSError as error:
        raise SettingsError(f"--out {path}: cannot be written ({error})") from error


def _without_formula(value: Any) -> Any:
    """Return the value; a text that a spreadsheet would compute gets an apostrophe before it."""
    return _FORMULA.sub("'", value) if isinstance(value, str) else value

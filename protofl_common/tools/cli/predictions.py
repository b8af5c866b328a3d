"""Write the predictions of every client's model on its test samples: a row per sample, in one file.

protofl predictions runs/mine
protofl predictions mine --out mine.parquet      # a name in runs/

Columns: client, domain, sample (its row in the data set), label, name; where the model predicts by its head: head (the
label it says) and head-0, head-1, … (logits of the classes); where by prototypes: prototype and prototype-0, … (-d²/T,
d the distance from the nearest prototype of the class; their softmax is the probability; empty for a class without).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from protofl_common.basics.text import in_order
from protofl_common.config.options import SettingsError
from protofl_common.data import DataError
from protofl_common.data.division import client_share, placed
from protofl_common.data.store import open_data
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.tools.cli.as_json import add_json, print_json
from protofl_common.tools.cli.assignments import add_allow_python
from protofl_common.tools.cli.export import models_in
from protofl_common.tools.cli.recipes import read_recipe, run_named
from protofl_common.tools.rows import Row, rows_file

if TYPE_CHECKING:
    from protofl_common.models.trained import TrainedModel


CLOSE = 0.005
"""Another processor's rounding may change a prediction or two of hundreds."""


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("run", metavar="RUN", help="folder of a simulated run, or its name in runs/")
    parser.add_argument("--out", type=Path, metavar="FILE", help=".csv or .parquet (default: RUN/predictions.csv)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    add_allow_python(parser, "the run")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    """Write the file."""
    from protofl_common.models.trained import TrainedModel

    run = run_named(arguments.run)
    files, out = models_in(run), arguments.out or run / "predictions.csv"
    recipe, count = read_recipe(str(run / "settings.toml")), 0
    settings = Settings.from_run_config(default_run_config() | recipe.settings)
    with rows_file(out) as add:
        for site in in_order(files):
            rows = list(
                _rows(
                    TrainedModel.read(files[site]), settings, int(recipe.federation["num-supernodes"]), arguments.device
                )
            )
            count += len(rows)
            add(rows)
    if arguments.json:
        print_json("predictions", {"file": str(out), "rows": count, "clients": in_order(files)})
    else:
        print(f"{out}: {count:,} test samples of {len(files)} clients")
    return 0


def _rows(trained: TrainedModel, settings: Settings, clients: int, device: str) -> Iterator[Row]:
    from protofl_common.tools.inference.predictor import Predictor

    card, data = trained.card, open_data(settings.data)
    number = card.site.removeprefix("site-")
    if not number.isdigit() or int(number) >= clients:
        raise SettingsError(f"{card.site}: no simulated client; its data are on a machine of its own")
    client, of = placed(settings.data, int(number), clients, "")
    rows_N = client_share(data, settings.data, seed=settings.run.seed, client=client, clients=of, domain="").test
    if len(rows_N) != card.test_samples:
        raise DataError(
            f"{card.site}: {len(rows_N)} test samples, not {card.test_samples} as in the run; the data changed"
        )
    predictor = Predictor(trained, device=device)
    labels_N, found = data.labels[rows_N], predictor.scores(data.inputs[rows_N])
    for way, scores in found.items():
        right = float((scores.argmax(1).numpy() == labels_N).mean()) if len(labels_N) else 0.0
        if abs(right - card.accuracy[way]) > CLOSE:
            said = f"{100 * right:.1f} % right by {way}, {100 * card.accuracy[way]:.1f} % in the run"
            print(f"warning: {card.site}: {said}; the data, or what computes, are not the same", file=sys.stderr)
    for i, row in enumerate(rows_N.tolist()):
        label = int(labels_N[i])
        told: Row = {
            "client": card.site,
            "domain": card.domain,
            "sample": row,
            "label": label,
            "name": card.classes[label],
        }
        for way, scores in found.items():
            told[way] = int(scores[i].argmax())
            told |= {
                f"{way}-{c}": score if score > float("-inf") else None for c, score in enumerate(scores[i].tolist())
            }
        yield told

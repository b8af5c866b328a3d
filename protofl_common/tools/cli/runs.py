"""The runs in a folder, the latest first: how far they are, how good, how large.

protofl runs                # those in runs/
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from protofl_common.basics.text import human_bytes, printable
from protofl_common.config.options import SettingsError
from protofl_common.runs.figures import best_text, results_of
from protofl_common.runs.folder import MALFORMED
from protofl_common.runs.over_clients import in_percent
from protofl_common.tools.arguments import RUNS, add_json, print_json
from protofl_common.tools.known_runs import SECONDS_PER_DAY, KnownRun, runs_in

NOTE = "Mean test accuracy over the clients, %; @ after which round."
NOTE_ON_SEVERAL_LABELS = " Where a run has an AUC, its accuracy is exact match."


def add_arguments(parser: ArgumentParser) -> None:
    about = "the folder of runs (runs)"
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS, metavar="DIR", help=about)
    add_json(parser)


def act(arguments: Namespace) -> None:
    """Print the runs; one whose files are malformed is named on stderr, and left out."""
    if not arguments.folder.is_dir():
        cure = f"runs are in {RUNS} unless out-dir says otherwise"
        raise SettingsError(f"{arguments.folder}: no such folder; {cure}")
    runs = []
    for run in runs_in(arguments.folder):
        try:
            runs.append(_as_dict(run))
        except MALFORMED as error:  # hides no other run
            reason = f"{type(error).__name__}: {error}"
            print(printable(f"left out: {run.path}: {reason}"), file=sys.stderr)
    if arguments.json:
        print_json("runs", {"runs": runs})
    else:
        Console().print(_table(runs))


def _as_dict(run: KnownRun) -> dict[str, Any]:
    """Return what is shown of a run, as `_table` and JSON take it.

    ``best`` and ``final`` are texts, for each way to predict. A run that has not finished has none.
    """
    settings = run.settings()
    summary = run.summary()
    rounds, wanted_rounds = run.rounds
    if summary:
        state = "finished"
        final = []
        for result in results_of(summary).values():
            if not in_percent(result.name):
                final.append(f"{result.name} {summary['metrics'][result.name]['mean']:.4f}")
        for kind, figures in summary["accuracy"].items():
            final.append(f"{kind} {100 * figures['mean']:.2f}")
        best = [f"{kind} {best_text(result)}" for kind, result in summary["best-accuracy"].items()]
        rounds = summary["rounds"]
    else:
        state = "running" if run.is_under_way else "stopped"
        final = []
        best = []

    has_own_data = settings.get("partition") == "own"
    dataset = "own data of the sites" if has_own_data else str(settings.get("dataset", ""))
    return {
        "name": run.path.name,
        "folder": str(run.path),
        "state": state,
        "algorithm": str(settings.get("algo", "")),
        "dataset": dataset,
        "seed": int(settings.get("seed", 0)),
        "rounds": rounds,
        "wanted": wanted_rounds,
        "best": ", ".join(best),
        "final": ", ".join(final),
        "bytes": run.bytes,
        "days": run.age / SECONDS_PER_DAY,
    }


def _table(runs: list[dict[str, Any]]) -> Table:
    """Return the table of runs for a terminal: three lines a run, as 80 columns are narrow."""
    note = NOTE
    if any("/" in run["final"] for run in runs):
        note += NOTE_ON_SEVERAL_LABELS
    run_column = Column("run", no_wrap=True)  # so that a name can be copied
    table = Table(
        run_column,
        "final",
        "best",
        "size",
        box=SIMPLE,
        pad_edge=False,
        caption=note,
        caption_justify="left",
    )
    for run in runs:
        about = [
            run["name"],
            f"{run['algorithm']} · {run['dataset']} · seed {run['seed']}",
            f"{run['rounds']}/{run['wanted']} rounds, {run['state']}",
        ]
        finals = run["final"].split(", ")  # of each way to predict
        bests = run["best"].split(", ")
        table.add_row(_lines(about), _lines(finals), _lines(bests), human_bytes(run["bytes"]))
    return table


def _lines(texts: list[str]) -> Text:
    """Return texts, one a line, without a stranger's control characters; markup is not read."""
    return Text("\n".join(map(printable, texts)))

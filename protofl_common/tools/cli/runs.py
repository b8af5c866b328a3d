"""The runs in a folder, the latest first: how far they are, how good, how large.

protofl runs                # those in runs/
"""

import argparse
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protofl_common.basics.text import human_bytes, printable
from protofl_common.config.options import SettingsError
from protofl_common.runs.figures import best_text
from protofl_common.tools.cli.arguments import RUNS, add_json, print_json
from protofl_common.tools.known_runs import KnownRun, runs_in, size_of

NOTE = "Mean test accuracy over the clients, %; @ after which round.\n* chosen on test data, and so too good."


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS, metavar="DIR", help="the folder of runs (runs)")
    add_json(parser)


def act(arguments: argparse.Namespace) -> None:
    if not arguments.folder.is_dir():
        raise SettingsError(f"{arguments.folder}: no such folder; runs are in {RUNS} unless out-dir says otherwise")
    runs = runs_in(arguments.folder)
    if arguments.json:
        print_json("runs", {"runs": [_as_dict(run) for run in runs]})
    else:
        Console().print(_table(runs))


def _as_dict(run: KnownRun) -> dict[str, Any]:
    settings, summary, (rounds, wanted) = run.settings(), run.summary(), run.rounds
    final, best = (summary["accuracy"], summary["best-accuracy"]) if summary else ({}, {})
    return {
        "name": run.path.name,
        "folder": str(run.path),
        "state": "finished" if summary else "running" if run.goes_on else "stopped",
        "algorithm": str(settings.get("algo", "")),
        "dataset": str(settings.get("dataset", "")),
        "seed": int(settings.get("seed", 0)),
        "rounds": summary["rounds"] if summary else rounds,
        "wanted": wanted,
        "best": ", ".join(f"{kind} {best_text(result)}" for kind, result in best.items()),
        "final": ", ".join(f"{kind} {100 * figures['mean']:.2f}" for kind, figures in final.items()),
        "bytes": size_of(run.path),
        "days": run.age / 86400,
    }


def _table(runs: list[KnownRun]) -> Table:
    table = Table("run", "final", "best", box=SIMPLE, pad_edge=False, caption=NOTE, caption_justify="left")
    for known_run in runs:
        run = _as_dict(known_run)
        state = "" if run["state"] == "finished" else f", {run['state']}"
        facts = f"{run['algorithm']} · {run['dataset']} · seed {run['seed']}"
        size = f"{run['rounds']}/{run['wanted']} rounds{state} · {human_bytes(run['bytes'])}"
        best = run["best"].replace(" (chosen on test data)", "*").replace(" (chosen on validation data)", "")
        figures = (plain(run["final"]).replace(", ", "\n"), plain(best).replace(", ", "\n"))
        table.add_row(f"{plain(run['name'])}\n[dim]{plain(facts)}\n{size}", *figures)
    return table


def plain(text: object) -> str:
    """Return ``text`` for a table on a terminal, without markup and control characters of a stranger's run."""
    return escape(printable(str(text)))

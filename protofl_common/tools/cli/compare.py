"""Finished runs side by side: their figures, and the settings in which they differ.

protofl compare runs/20261121-103501-fedproto-mnist-4711 runs/another
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protofl_common.config.sections import keys_that_change
from protofl_common.metrics import best_text, human_bytes, human_seconds
from protofl_common.run_folder import RunFolder, Summary


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")


def act(arguments: argparse.Namespace) -> int:
    """Print the table."""
    Console().print(comparison([Path(run) for run in arguments.runs]))
    return 0


def comparison(folders: list[Path]) -> Table:
    """A column per run; figures first, then settings that are not the same everywhere."""
    summaries = [RunFolder(folder).finished_summary() for folder in folders]
    table = Table(show_lines=False)
    table.add_column("")
    for folder in folders:
        table.add_column(escape(folder.resolve().name), justify="right", overflow="fold")
    for name, figure in FIGURES.items():
        table.add_row(name, *(figure(summary) for summary in summaries))
    table.add_section()
    for key in dict.fromkeys(key for summary in summaries for key in summary["settings"]):
        values = [summary["settings"].get(key) for summary in summaries]
        if key not in keys_that_change("name") and any(value != values[0] for value in values):
            table.add_row(escape(key), *("–" if value is None else escape(str(value)) for value in values))
    return table


def _accuracy(kind: str, name: str) -> Callable[[Summary], str]:
    def text(summary: Summary) -> str:
        if not summary["accuracy"].get(kind):
            return "–"
        best = summary["best-accuracy"][kind]
        if name == "best":
            return best_text(best)
        return f"{100 * summary['accuracy'][kind][name]:.2f}"

    return text


FIGURES: dict[str, Callable[[Summary], str]] = {
    "algorithm": lambda summary: str(summary["algorithm"]),
    "clients": lambda summary: str(len(summary["clients"])),
    "rounds": lambda summary: str(summary["rounds"]),
    **{
        f"{kind}: {name}": _accuracy(kind, name)
        for kind in ("prototype", "head")
        for name in ("mean", "weighted", "worst-10%", "std", "best")
    },
    "bytes up": lambda summary: human_bytes(summary["bytes"]["up"]),
    "bytes down": lambda summary: human_bytes(summary["bytes"]["down"]),
    "seconds": lambda summary: human_seconds(summary["seconds"]),
    "seconds per round": lambda summary: human_seconds(summary["seconds-per-round"]),
    "lost replies": lambda summary: str(sum(summary["trouble"].values())),
}

"""Finished runs side by side: their figures, and the settings in which they differ.

protofl compare runs/20261121-103501-fedproto-mnist-4711 runs/another
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protofl_common.metrics import human_bytes, human_seconds
from protofl_common.options import SettingsError

UNLIKE_ANYWAY = ("run-name", "out-dir")
"""Settings that say nothing about the run."""


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")


def act(arguments: argparse.Namespace) -> int:
    """Print the table."""
    Console().print(comparison([Path(run) for run in arguments.runs]))
    return 0


def comparison(folders: list[Path]) -> Table:
    """A column per run; figures first, then settings that are not the same everywhere."""
    summaries = [read_summary(folder) for folder in folders]
    table = Table(show_lines=False)
    table.add_column("")
    for folder in folders:
        table.add_column(escape(folder.resolve().name), justify="right", overflow="fold")
    for name, figure in FIGURES.items():
        table.add_row(name, *(figure(summary) for summary in summaries))
    table.add_section()
    for key in dict.fromkeys(key for summary in summaries for key in summary["settings"]):
        values = [summary["settings"].get(key) for summary in summaries]
        if key not in UNLIKE_ANYWAY and any(value != values[0] for value in values):
            table.add_row(escape(key), *("–" if value is None else escape(str(value)) for value in values))
    return table


def read_summary(folder: Path) -> dict[str, Any]:
    """A finished run's ``summary.json``.

    Raises
    ------
    SettingsError
        When the folder has none.
    """
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SettingsError(f"{folder}: no summary.json in it; give the folder of a finished run") from None
    return summary


def _accuracy(kind: str, name: str) -> Callable[[dict[str, Any]], str]:
    def text(summary: dict[str, Any]) -> str:
        figures = summary["best-accuracy" if name == "best" else "accuracy"].get(kind)
        if figures is None:
            return "–"
        shown = f"{100 * figures['mean' if name == 'best' else name]:.2f}"
        return f"{shown} @{figures['after-round']}" if name == "best" else shown

    return text


FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
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

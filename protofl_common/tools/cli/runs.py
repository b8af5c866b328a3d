"""The runs in a folder, the latest first: how far they are, how good, how large.

protofl runs                # those in runs/
"""

import argparse
import json
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors import safe_open

from protofl_common.basics.text import human_bytes, printable
from protofl_common.config.options import SettingsError
from protofl_common.runs.figures import best_text
from protofl_common.runs.folder import CHECKPOINTS, MALFORMED, METRICS, SETTINGS, RunFolder, checkpoints, troubles
from protofl_common.tools.cli.arguments import RUNS, add_json, print_json

NOTE = "Mean test accuracy over the clients, %; @ after which round.\n* chosen on test data, and so too good."
HEAVY = ("clients", CHECKPOINTS)  # what a finished run can do without: the clients' models, and what lets it go on


@dataclass
class KnownSite:
    node: int
    last: int = 0  # the round of its last valid reply; 0: none
    trouble: dict[str, int] = field(default_factory=dict)  # kind of trouble -> how often
    reason: str = ""  # of the latest


class KnownRun(RunFolder):
    """A run's folder, and what stands in its checkpoints."""

    @property
    def age(self) -> float:
        return time.time() - (self.path / METRICS).stat().st_mtime

    @property
    def goes_on(self) -> bool:
        with suppress(Timeout), FileLock(self.lock, timeout=0) if self.lock.exists() else nullcontext():
            return False
        return True

    @property
    def rounds(self) -> tuple[int, int]:
        """Rounds with a checkpoint, and how many there shall be."""
        return next((int(path.stem) for path in checkpoints(self.path)), 0), int(self.settings().get("rounds", 0))

    def known_sites(self) -> dict[str, KnownSite]:
        sites = dict[str, KnownSite]()
        if whole := checkpoints(self.path):
            with safe_open(whole[0], framework="numpy") as file:
                owners = json.loads(file.metadata()["facts"])["owners"]
            sites = {site: KnownSite(node) for site, node in owners.items()}
        for row in self.rows():
            for site in row["clients"]:
                sites.setdefault(site, KnownSite(0)).last = row["round"]
            for kind, site, reason in troubles(row):
                facts = sites.setdefault(site, KnownSite(0))
                facts.trouble[kind] = facts.trouble.get(kind, 0) + 1
                facts.reason = f"round {row['round']}: {reason}"
        return sites


def runs_in(folder: Path) -> list[KnownRun]:
    """The runs in a folder of results, the latest first."""
    runs = [KnownRun(path.parent) for path in folder.glob(f"*/{METRICS}") if (path.parent / SETTINGS).exists()]
    return sorted(runs, key=lambda run: run.age)


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS, metavar="DIR", help="the folder of runs (runs)")
    add_json(parser)


def act(arguments: argparse.Namespace) -> None:
    if not arguments.folder.is_dir():
        raise SettingsError(f"{arguments.folder}: no such folder; runs are in {RUNS} unless out-dir says otherwise")
    runs = []
    for run in runs_in(arguments.folder):
        try:
            runs.append(_as_dict(run))
        except MALFORMED as error:  # hides no other run
            Console(stderr=True).print(plain(f"left out: {run.path}: {type(error).__name__}: {error}"))
    if arguments.json:
        print_json("runs", {"runs": runs})
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
        "dataset": "own data of the sites" if settings.get("partition") == "own" else str(settings.get("dataset", "")),
        "seed": int(settings.get("seed", 0)),
        "rounds": summary["rounds"] if summary else rounds,
        "wanted": wanted,
        "best": ", ".join(f"{kind} {best_text(result)}" for kind, result in best.items()),
        "final": ", ".join(f"{kind} {100 * figures['mean']:.2f}" for kind, figures in final.items()),
        "bytes": sum(file.lstat().st_size for file in run.path.rglob("*") if not file.is_dir()),  # of a link only it
        "days": run.age / 86400,
    }


def _table(runs: list[dict[str, Any]]) -> Table:
    table = Table("run", "final", "best", box=SIMPLE, pad_edge=False, caption=NOTE, caption_justify="left")
    for run in runs:
        state = "" if run["state"] == "finished" else f", {run['state']}"
        facts = f"{run['algorithm']} · {run['dataset']} · seed {run['seed']}"
        size = f"{run['rounds']}/{run['wanted']} rounds{state} · {human_bytes(run['bytes'])}"
        best = run["best"].replace(" (chosen on test data)", "*").replace(" (chosen on validation data)", "")
        figures = (plain(run["final"]).replace(", ", "\n"), plain(best).replace(", ", "\n"))
        table.add_row(f"{plain(run['name'])}\n[dim]{plain(facts)}\n{plain(size)}", *figures)
    return table


def plain(text: object) -> str:
    """Return ``text`` for a table on a terminal, without markup and control characters of a stranger's run."""
    return escape(printable(str(text)))

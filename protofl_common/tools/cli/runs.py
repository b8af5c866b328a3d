"""The runs in a folder: how far they are, how good, how large; what old ones keep removed.

  protofl runs                                       # those in runs/, the latest first
  protofl runs --prune --keep-last 5                 # remove clients/ and checkpoints/ of finished runs but the last 5
  protofl runs --prune --older-than 30 --whole       # remove finished runs of which the last round is 30 days ago

Pruning says what would be freed, and asks. Runs that go on, or were stopped and may go on, stay as they are. Without
clients/ no model can be exported any more; the figures stay.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from protofl_common.basics.files import remove
from protofl_common.config.options import SettingsError
from protofl_common.runs.figures import best_text
from protofl_common.runs.metrics import human_bytes
from protofl_common.tools.cli.arguments import RUNS, add_json, print_json
from protofl_common.tools.cli.screen import plain
from protofl_common.tools.known_runs import HEAVY, KnownRun, runs_in, size_of

NOTE = "Mean test accuracy over the clients, %; @ after which round.\n* chosen on test data, and so too good."


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS, metavar="DIR", help="the folder of runs (runs)")
    parser.add_argument("--prune", action="store_true", help="remove what finished runs can do without")
    parser.add_argument("--keep-last", type=int, metavar="N", help="prune: leave the last N runs as they are")
    parser.add_argument("--older-than", type=float, metavar="DAYS", help="prune: only runs that ended before")
    parser.add_argument("--whole", action="store_true", help="prune: whole runs, figures too")
    parser.add_argument("--yes", action="store_true", help="prune without asking")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    if not arguments.folder.is_dir():
        raise SettingsError(f"{arguments.folder}: no such folder; runs are in {RUNS} unless out-dir says otherwise")
    rules = ("keep_last", "older_than", "whole", "yes")
    if not arguments.prune and any(getattr(arguments, rule) not in (None, False) for rule in rules):
        raise SettingsError("--keep-last, --older-than, --whole and --yes say how to prune: give --prune, too")
    runs = runs_in(arguments.folder)
    freed = _prune(runs, arguments) if arguments.prune else 0
    if arguments.json:
        print_json("runs", {"runs": [_as_dict(run) for run in runs if run.path.exists()], "freed": freed})
    elif not arguments.prune:
        Console().print(_table(runs))
    return 0


def _as_dict(run: KnownRun) -> dict[str, Any]:
    settings, summary, (rounds, wanted) = run.settings(), run.summary(), run.rounds
    final = summary["accuracy"] if summary else {}
    best = summary["best-accuracy"] if summary else {}
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


def _prune(runs: list[KnownRun], arguments: argparse.Namespace) -> int:
    """Bytes that were freed; SettingsError without a rule, or where nobody can be asked."""
    last, days = arguments.keep_last, arguments.older_than
    if last is None and days is None:
        raise SettingsError("--prune: which runs? Give --keep-last N, --older-than DAYS, or both")
    if (last or 0) < 0 or (days or 0) < 0:
        raise SettingsError("--keep-last and --older-than: must be at least 0")
    old = [run for run in runs[last or 0 :] if run.age >= (days or 0) * 86400]
    removable = {run: parts for run in old if (parts := list(_parts(run, arguments.whole)))}
    sizes = {run: sum(map(size_of, parts)) for run, parts in removable.items()}
    out = sys.stderr if arguments.json else sys.stdout
    for run, parts in removable.items():
        named = "the whole run" if arguments.whole else " and ".join(f"{part.name}/" for part in parts)
        print(f"{run.path.name}: {named}, {human_bytes(sizes[run])}", file=out)
    print(f"{len(removable)} of {len(runs)} runs, {human_bytes(sum(sizes.values()))} to free", file=out)
    if not removable or not (arguments.yes or _agreed(out)):
        return 0
    return sum(sizes[run] for run, parts in removable.items() if _removed(run, parts))


def _parts(run: KnownRun, whole: bool) -> Iterator[Path]:
    """List what would be removed of a finished run; no link, which may lead anywhere."""
    if run.path.is_symlink() or not run.finished or run.goes_on:
        return
    for part in [run.path] if whole else [run.path / name for name in HEAVY]:
        if part.is_dir() and not part.is_symlink():
            yield part


def _agreed(out: Any) -> bool:
    if not sys.stdin.isatty():
        raise SettingsError("--prune: nobody can be asked here; --yes agrees")
    print("Remove this? [y/N] ", end="", file=out, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _removed(run: KnownRun, parts: list[Path]) -> bool:
    lock = FileLock(run.lock)
    with suppress(Timeout):
        with lock.acquire(timeout=0):
            for part in parts:
                remove(part)
            run.lock.unlink(missing_ok=True)
        return True
    return False

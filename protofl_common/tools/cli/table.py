"""A table, a paper's or your own: a matrix of runs, one after another, with the paper's numbers beside.

  protofl table configs/tables/fedplvm-office10.yaml --data-dir /data
  protofl table configs/tables/fedtgp-fmnist.yaml --only FedTGP --seeds 1 rounds=20

Start it again to go on: finished runs are not repeated, interrupted ones go on after their last round. A run that fails
does not stop the others, and rows whose data are not here are skipped. KEY=VALUE overrides a setting of all runs.
Several processes may work on one table: each run is made by one of them. --shard 3/16 makes every 16th run from the
third on; the command without it makes what is left and writes the whole table.
Results stand in OUT/TABLE.md, .tex and .csv, those of each seed in OUT/TABLE.long.csv, the runs in OUT/runs (shared by
all tables), their logs in OUT/logs. protofl compare OUT/runs shows intervals and tests.

With --search the settings that the table names under `search` are chosen first, by as many trials for each cell, on the
clients' validation data and other seeds (OUT/trials); then the best ones run with the table's seeds.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from protofl_common.basics.files import write_text
from protofl_common.config.options import SettingsError
from protofl_common.tools.cli.arguments import add_allow_python, add_json, file_named, print_json, read_assignments
from protofl_common.tools.cli.run import add_resources, with_resources
from protofl_common.tools.tables import render
from protofl_common.tools.tables.plan import Cell, Launch, Run, Runs, launch, plan, runs_of
from protofl_common.tools.tables.search import Search, check_search
from protofl_common.tools.tables.spec import TableFile, read_table

Make = Callable[[Run, Runs], bool]  # makes a run unless it is finished; whether it did
ALL = slice(None)


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="+", metavar="TABLE.yaml|KEY=VALUE", help="tables, and settings of all runs")
    place = "replaces the first folder, data/, of each recipe's data-dir"
    parser.add_argument("--data-dir", default="", metavar="D", help=place)
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="this row only; may be repeated")
    parser.add_argument("--seeds", default="", metavar="1,2,3", help="instead of the table's")
    parser.add_argument("--out", default="runs/tables", metavar="DIR", help="where results go (runs/tables)")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="of N jobs the I-th: every N-th run")
    parser.add_argument("--dry-run", action="store_true", help="show what would run, and start nothing")
    parser.add_argument("--search", action="store_true", help="choose settings on validation data first (Optuna)")
    parser.add_argument("--keep-models", action="store_true", help="keep models of runs made now, for protofl export")
    add_allow_python(parser, "the table")
    add_json(parser)
    add_resources(parser)


def act(arguments: argparse.Namespace) -> int | None:
    files = [word for word in arguments.what if word.endswith((".yaml", ".yml"))]
    overrides = read_assignments(word for word in arguments.what if word not in files)
    if len({Path(file).stem for file in files}) < max(1, len(files)):  # results stand in OUT/NAME.md
        raise SettingsError(f"which table? Give a YAML file, or several of different names: {' '.join(files)}")
    if "seed" in overrides:
        raise SettingsError(f"seed = {overrides['seed']}: a table has several; say --seeds {overrides['seed']}")
    if arguments.dry_run and arguments.json:
        raise SettingsError("--json: a plan has no JSON; leave it out, or --dry-run")
    if not re.fullmatch(r"(\d+(, *\d+)*)?", arguments.seeds):
        raise SettingsError(f"--seeds {arguments.seeds!r}: must be whole numbers of at least 0, such as 1,2,3")
    seeds, shard = tuple(int(word) for word in arguments.seeds.split(",") if word), _shard(arguments.shard)
    rows = {"data_dir": arguments.data_dir, "seeds": seeds, "only": tuple(arguments.only), "overrides": overrides}
    more = bool(overrides) * f"\n\nAll runs with {', '.join(f'{key} = {value}' for key, value in overrides.items())}."
    tables = [replace(table, note=(table.note + more).strip()) for table in map(read_table, map(file_named, files))]
    planned = [(table, plan(table, **rows)) for table in tables]
    out, console = Path(arguments.out), Console(stderr=arguments.json)
    runs = Runs(out / "runs", arguments.keep_models)
    trials = Runs(out / "trials", patience=-1) if arguments.search else None
    for table, cells in planned:
        if trials:
            check_search(table, [cell for cell in cells if cell.asked])
        elif table.trials and (out / "trials").is_dir():
            console.print(f"{table.name}: without --search the settings of {out}/trials do not count", highlight=False)
    if arguments.dry_run:
        show_plan(planned, runs, trials, console)
        return None

    resources = partial(with_resources, arguments=arguments, clients=None)
    if todo := [run for _, cells in planned for run in runs_of(cells) if not runs.finished(run)]:
        from protofl_common.tools.local import workers_for  # PyTorch and Flower, two seconds

        device = str(overrides.get("device", "auto"))
        workers_for(resources(todo[0].federation), device)  # before a thread draws on the screen (`local.pool`)
    failed = execute(planned, runs, partial(launch, resources=resources), out, console, trials, shard)
    if arguments.json:
        print_json("table", {"tables": [json.loads((out / f"{table.name}.json").read_text()) for table, _ in planned]})
    return failed


def execute(
    planned: list[tuple[TableFile, list[Cell]]],
    runs: Runs,
    launch: Launch,
    out: Path,
    console: Console,
    trials: Runs | None = None,
    shard: slice = ALL,
) -> int:
    """Make the runs of a shard (with a search, its cells) of each table, and write all files after each."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    for table, planned_cells in planned:
        with Progress(*columns, console=console) as progress:
            make = partial(_one, launch=launch, progress=progress)
            mine = [cell for cell in planned_cells if cell.asked][shard if trials else ALL]  # their trials in turn
            cells = [_searched(table, replace(cell, asked=cell in mine), trials, make) for cell in planned_cells]
            todo = runs_of(cells)[ALL if trials else shard]
            write = partial(_write, table, cells, runs, out)
            write()
            for run in progress.track(todo, total=len(todo), description=table.name):
                if make(run, runs):
                    write()
        console.print(Markdown((out / f"{table.name}.md").read_text(encoding="utf-8")))
        console.print(f"results: {out / table.name}.md, .tex, .csv, .json")
    nothing_ran = {not cell.runs for _, cells in planned for cell in cells if cell.asked} == {True}
    return 1 if runs.failed or nothing_ran else 0


def _searched(table: TableFile, cell: Cell, trials: Runs | None, make: Make | None) -> Cell:
    """The cell with the best settings on validation data; of a finished search only, unless it is asked for."""
    if not (trials and cell.runs and cell.spaces):
        return cell
    return Search(table, cell, trials).tuned(make if cell.asked else None)


def show_plan(planned: list[tuple[TableFile, list[Cell]]], runs: Runs, trials: Runs | None, console: Console) -> None:
    """A line per cell: which seeds are to run, which are finished, and the settings in which it differs from others."""
    for table, every in planned:
        asked = [cell for cell in every if cell.asked]
        cells = [_searched(table, cell, trials, None) for cell in asked]
        heads = ("row", "column", "to run: seed", "finished", "clients", "rounds", Column("settings", overflow="fold"))
        shown = Table(*heads, box=None, pad_edge=False)
        for cell in cells:
            if cell.runs:
                shown.add_row(*map(escape, (cell.row, cell.column, *_planned(cell, cells, runs))))
        console.print(f"[bold]{escape(table.name)}[/bold]: {escape(table.title)}", highlight=False)
        if shown.row_count:
            console.print(shown)
        for reason, count in Counter(cell.skipped for cell in cells if cell.skipped).items():
            console.print(f"{count} cells are skipped: {reason}", markup=False, highlight=False, soft_wrap=True)
        todo = [run for run in runs_of(cells) if not runs.finished(run)]
        rounds, finished = sum(run.settings.run.rounds for run in todo), len(runs_of(cells)) - len(todo)
        text = f"{len(todo)} runs to make, {rounds:,} rounds in all; {finished} runs are finished"
        console.print(text, highlight=False)
        if trials and (waiting := [cell for cell, now in zip(asked, cells, strict=True) if cell.runs and not now.runs]):
            tried = sum(len(Search(table, cell, trials).made) for cell in waiting)
            left = (len(waiting) * table.trials - tried) * len(table.trial_seeds)
            console.print(f"to search: {left} runs of trials; then {len(runs_of(waiting))} runs of what they choose")


def _planned(cell: Cell, cells: list[Cell], runs: Runs) -> tuple[str, ...]:
    finished = {seed for seed, run in cell.runs.items() if runs.finished(run)}
    seeds = [", ".join(str(seed) for seed in cell.runs if (seed in finished) == done) or "–" for done in (False, True)]
    configs = [next(iter(other.runs.values())).settings.given for other in cells if other.runs]
    first = next(iter(cell.runs.values()))
    given = first.settings.given.items()
    settings = " ".join(f"{key}={value}" for key, value in given if any(other.get(key) != value for other in configs))
    return (*seeds, str(first.federation["num-supernodes"]), str(first.settings.run.rounds), settings)


def _one(run: Run, runs: Runs, *, launch: Launch, progress: Progress) -> bool:
    if runs.finished(run):
        return False
    bar = progress.add_task(f"  {run.name}", total=run.settings.run.rounds)
    show = partial(progress.console.print, markup=False, highlight=False)

    def on_round(number: int) -> None:
        progress.update(bar, completed=number)
        if not progress.console.is_terminal:
            show(f"  {run.name}: round {number}/{run.settings.run.rounds}")

    here = runs.execute(run, launch, on_round)
    progress.remove_task(bar)
    reason = runs.failed.get(run.name)
    if not here:
        show(f"  another process makes {run.name}")
    elif reason or not progress.console.is_terminal:
        show(f"  failed: {run.name}: {reason}" if reason else f"  done: {run.name}")
    return here


def _write(table: TableFile, cells: list[Cell], runs: Runs, out: Path) -> None:
    with runs.lock("tables"):  # of several processes the last one knows all runs that have ended
        results = {(cell.row, cell.column): render.result_of(cell, runs) for cell in cells}
        files = {
            ".json": json.dumps(render.as_dict(table, results), indent=2, ensure_ascii=False) + "\n",
            ".md": render.markdown(table, results),
            ".tex": render.cells_of(table, results).as_latex(),
            ".csv": render.csv_of_cells(table, results),
            ".long.csv": render.csv_of_seeds(results),
        }
        files |= {".against.tex": render.differences(table, results).as_latex()} if table.against else {}
        for suffix, text in files.items():
            write_text(out / f"{table.name}{suffix}", text)


def _shard(text: str) -> slice:
    """``"3/16"`` -> every 16th from the third on."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise SettingsError(f"--shard {text!r}: must be I/N with I from 1 to N, such as 3/16")
    return slice(int(numbers[1]) - 1, None, int(numbers[2]))

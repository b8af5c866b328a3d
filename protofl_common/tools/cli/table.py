"""A table, a paper's or your own: a matrix of runs, one after another,
with the paper's numbers beside.

  protofl table configs/tables/fedplvm-office10.yaml --data-dir /data
  protofl table configs/tables/fedtgp-fmnist.yaml --only FedTGP --seeds 1 rounds=20

To go on after a stop, start the command again: finished runs are not repeated, and interrupted runs
go on after their last round. A run that fails does not stop the others. Rows whose data are not on
this machine are skipped. KEY=VALUE overrides a setting of all runs.
Several processes may work on one table; each run is made by one of them. --shard 3/16 makes every
16th run from the third on. The command without --shard makes the runs that are left, and writes the
whole table.
Results stand in OUT/TABLE.md, .tex and .json, those of each seed in OUT/TABLE.csv, the runs in
OUT/runs (shared by all tables), their logs in OUT/logs. protofl compare OUT/runs shows intervals
and tests. With --figures DIR the finished runs of each column are drawn as SVG and PDF: curves over
the rounds, and boxes over the clients.

With --search the command first chooses the settings that the table names under `search`, by the
same number of trials for each cell, on the clients' validation data and with other seeds
(OUT/trials). Then the best settings run with the table's seeds.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from protofl_common.basics.files import write_text
from protofl_common.basics.text import as_file_name
from protofl_common.config.options import Config, SettingsError
from protofl_common.tools.arguments import (
    FIGURES_HELP,
    add_allow_python,
    add_json,
    file_named,
    print_json,
    read_assignments,
)
from protofl_common.tools.cli.run import add_resources, with_resources
from protofl_common.tools.tables import render
from protofl_common.tools.tables.figure import COUNTS, Figure
from protofl_common.tools.tables.plan import Cell, Launch, Run, Runs, launch, plan, runs_of
from protofl_common.tools.tables.search import Search, check_search
from protofl_common.tools.tables.spec import TableFile, read_table

Make = Callable[[Run, Runs], bool]
"""Makes a run unless it is finished; returns whether it did."""
Planned = list[tuple[TableFile, list[Cell]]]
ALL = slice(None)  # the shard of a process that makes all runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="+", metavar="TABLE.yaml|KEY=VALUE", help="tables, and settings of all runs"
    )
    place = "replaces the first folder, data/, of each recipe's data-dir"
    parser.add_argument("--data-dir", default="", metavar="D", help=place)
    parser.add_argument(
        "--only", action="append", default=[], metavar="ROW", help="this row only; may be repeated"
    )
    parser.add_argument("--seeds", default="", metavar="1,2,3", help="instead of the table's")
    parser.add_argument(
        "--out", default="runs/tables", metavar="DIR", help="where results go (runs/tables)"
    )
    parser.add_argument(
        "--shard", default="1/1", metavar="I/N", help="of N jobs the I-th: every N-th run"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would run, and start nothing"
    )
    parser.add_argument(
        "--search", action="store_true", help="choose settings on validation data first"
    )
    parser.add_argument(
        "--keep-models",
        action="store_true",
        help="keep models of runs made now, for protofl export",
    )
    parser.add_argument("--figures", type=Path, metavar="DIR", help=FIGURES_HELP)
    add_allow_python(parser, "the table")
    add_json(parser)
    add_resources(parser)


def act(arguments: argparse.Namespace) -> int | None:
    """Make the runs of the tables that are left; return 1 if one failed, or none could be made.

    With --dry-run only show the plan. SettingsError before anything starts, for all that is wrong
    with the command line and the tables.
    """
    files = [word for word in arguments.what if word.endswith((".yaml", ".yml"))]
    overrides = read_assignments(word for word in arguments.what if word not in files)
    _check_words(arguments, files, overrides)
    shard = _shard(arguments.shard)
    planned = _planned_tables(arguments, files, overrides)
    out = Path(arguments.out)
    # given as a file, as `sys.stdout` is another one while a run is made
    console = Console(file=sys.stderr if arguments.json else sys.stdout)
    runs = Runs(out / "runs", arguments.keep_models)
    trials = None
    if arguments.search:
        # -1: wait for a trial that another process makes, as the best settings depend on it
        trials = Runs(out / "trials", patience=-1)
    for table, cells in planned:
        if trials:
            check_search(table, [cell for cell in cells if cell.asked])
        elif table.trials and (out / "trials").is_dir():
            text = f"{table.name}: without --search the settings of {out}/trials do not count"
            console.print(text, highlight=False)
    if arguments.dry_run:
        show_plan(planned, runs, trials, console)
        return None

    # the recipes of a table say how many clients there are
    resources = partial(with_resources, arguments=arguments, clients=None)
    start_engine(planned, runs, resources, str(overrides.get("device", "auto")))
    launch_here = partial(launch, resources=resources)
    status = execute(planned, runs, launch_here, out, console, trials, shard)
    if arguments.figures:
        for table, cells in planned:
            not_drawn = draw(table, cells, runs, arguments.figures)
            if not_drawn:
                names = ", ".join(not_drawn)
                text = f"{table.name}: not drawn, as curves are means over all clients: {names}"
                console.print(text, markup=False)
        console.print(f"figures: {arguments.figures}")
    if arguments.json:
        written = [out / f"{table.name}.json" for table, _ in planned]
        print_json("table", {"tables": [json.loads(path.read_text()) for path in written]})
    return status


def start_engine(
    planned: Planned, runs: Runs, resources: Callable[[Config], Config], device: str
) -> None:
    """Start the processes that simulate clients, as the runs that are not finished need them.

    They must start before a thread draws on the screen (`simulation/pool.py`). ``resources`` adds
    what a client gets of this machine to a federation config. The runs of other shards count as
    well: at worst processes are started that have nothing to do.
    """
    federations: list[Config] = []
    for _, cells in planned:
        for run in runs_of(cells):
            federation = resources(run.federation)
            if federation not in federations and not runs.finished(run):
                federations.append(federation)
    if not federations:
        return
    from protofl_common.simulation.machine import engine_for  # PyTorch, two seconds

    for federation in federations:
        engine_for(federation, device)


def _check_words(arguments: argparse.Namespace, files: list[str], overrides: Config) -> None:
    """Raise SettingsError for arguments that make no sense, alone or together.

    ``files`` are the tables' files among the arguments, ``overrides`` the settings.
    """
    names = {Path(file).stem for file in files}  # must differ: results stand in OUT/NAME.md
    if not files or len(names) < len(files):
        given = " ".join(files)
        raise SettingsError(
            f"which table? Give a YAML file, or several of different names: {given}"
        )
    if "seed" in overrides:
        seed = overrides["seed"]
        raise SettingsError(f"seed = {seed}: a table has several; say --seeds {seed}")
    if arguments.dry_run and arguments.json:
        raise SettingsError("--json: a plan has no JSON; leave it out, or --dry-run")
    if not re.fullmatch(r"(\d+(, *\d+)*)?", arguments.seeds):
        raise SettingsError(
            f"--seeds {arguments.seeds!r}: must be whole numbers of at least 0, such as 1,2,3"
        )


def _planned_tables(arguments: argparse.Namespace, files: list[str], overrides: Config) -> Planned:
    """Read each table, and plan its cells with the ``overrides`` of the command line.

    The overrides are added to a table's note. SettingsError with a line for each thing that is
    wrong in a file.
    """
    tables = []
    for path in map(file_named, files):
        table = read_table(path)
        if overrides:
            settings = ", ".join(f"{key} = {value}" for key, value in overrides.items())
            note = f"{table.note}\n\nAll runs with {settings}."
            table = replace(table, note=note.strip())
        tables.append(table)
    plan_cells = partial(
        plan,
        data_dir=arguments.data_dir,
        seeds=tuple(int(word) for word in arguments.seeds.split(",") if word),
        only=tuple(arguments.only),
        overrides=overrides,
    )
    return [(table, plan_cells(table)) for table in tables]


def execute(
    planned: Planned,
    runs: Runs,
    launch: Launch,
    out: Path,
    console: Console,
    trials: Runs | None = None,
    shard: slice = ALL,
) -> int:
    """Make the runs of each table that are not finished; after each, write the table's files.

    ``trials`` is where the trials of a search are made, or None without a search. ``shard`` chooses
    which runs this process makes, by their place in the list of all; with a search it chooses the
    cells that are searched and run. Return 1 where a run failed, or all cells that are asked for
    are without runs; else 0.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    for table, planned_cells in planned:
        with Progress(*columns, console=console) as progress:
            make = partial(_make_one, launch=launch, progress=progress)
            cells = planned_cells
            if trials:
                cells = _searched_shard(table, planned_cells, trials, make, shard)
            mine = runs_of(cells)
            if not trials:  # with them, only cells of the shard are still asked for
                mine = mine[shard]
            write = partial(_write, table, cells, runs, out, {})
            write()  # what earlier invocations have left
            for run in progress.track(mine, total=len(mine), description=table.name):
                if make(run, runs):
                    write()
        console.print(Markdown((out / f"{table.name}.md").read_text(encoding="utf-8")))
        console.print(f"results: {out / table.name}.md, .tex, .csv, .json")
    asked = [cell for _, cells in planned for cell in cells if cell.asked]
    nothing_ran = bool(asked) and not any(cell.runs for cell in asked)
    return 1 if runs.failed or nothing_ran else 0


def _searched_shard(
    table: TableFile, cells: list[Cell], trials: Runs, make: Make, shard: slice
) -> list[Cell]:
    """Search for the best settings of each cell of the shard in turn, and return all the cells.

    The cells of other shards are returned as cells that nobody asked for: no trial or run is made
    for them here. Where their search is finished, they have the settings that it found, too.
    """
    mine = [cell for cell in cells if cell.asked][shard]
    searched = []
    for cell in cells:
        asked = cell in mine
        searched.append(_searched(table, replace(cell, asked=asked), trials, make))
    return searched


def _searched(table: TableFile, cell: Cell, trials: Runs | None, make: Make | None) -> Cell:
    """Return the cell with the settings that are best on validation data.

    ``make`` makes the trials that are left, if the cell is asked for. Where trials are left all the
    same (``make`` is None, or nobody asked for the cell), or none ended well, the cell is returned
    as one that is skipped, with the reason. Without ``trials`` (no search), and where it has no
    runs or nothing to search for, it is returned as it is.
    """
    if not trials or not cell.runs or not cell.spaces:
        return cell
    try:
        return Search(table, cell, trials).tuned(make if cell.asked else None)
    except SettingsError as error:
        return replace(cell, runs={}, skipped=f"search: {error}")


def show_plan(planned: Planned, runs: Runs, trials: Runs | None, console: Console) -> None:
    """Print what would be run for each table, and run nothing.

    There is a line for each cell: which seeds are to run and how its settings differ from others',
    or why it is skipped, which with ``trials`` may be that trials of its search are left. A last
    line says how many runs are left in all.
    """
    show = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    for table, planned_cells in planned:
        cells = [_searched(table, cell, trials, None) for cell in planned_cells if cell.asked]
        show(f"{table.name}: {table.title}")
        for cell in cells:
            about = f"skipped: {cell.skipped}"
            if cell.runs:
                about = _plan_of(cell, cells, runs)
            show(f"{cell.row} / {cell.column}: {about}")
        left = [run for run in runs_of(cells) if not runs.finished(run)]
        rounds = sum(run.settings.run.rounds for run in left)
        show(f"{len(left)} runs to make, {rounds:,} rounds in all")


def _plan_of(cell: Cell, cells: list[Cell], runs: Runs) -> str:
    """Say which seeds of a cell are to run, and the settings in which ``cells`` differ."""
    left = [str(seed) for seed, run in cell.runs.items() if not runs.finished(run)]
    first = cell.first_run
    configs = [other.first_run.settings.given for other in cells if other.runs]
    facts = [f"seeds to run {', '.join(left) or 'none'}"]
    facts.append(f"{first.federation['num-supernodes']} clients")
    for key, value in first.settings.given.items():
        differs = any(config.get(key) != value for config in configs)
        if differs:
            facts.append(f"{key}={value}")
    return "; ".join(facts)


def _make_one(run: Run, runs: Runs, *, launch: Launch, progress: Progress) -> bool:
    """Make a run unless it is finished, with a bar of its rounds.

    Return True if this made it, even if it failed; False if it is finished, or another process
    makes it.
    """
    if runs.finished(run):
        return False
    bar = progress.add_task(f"  {run.name}", total=run.settings.run.rounds)
    show = partial(progress.console.print, markup=False, highlight=False)

    def on_round(number: int) -> None:
        progress.update(bar, completed=number)
        if not progress.console.is_terminal:
            show(f"  {run.name}: round {number}/{run.settings.run.rounds}")

    is_ours = runs.execute(run, launch, on_round)
    progress.remove_task(bar)
    reason = runs.failed.get(run.name)
    if not is_ours:
        show(f"  another process makes {run.name}")
    elif reason:
        show(f"  failed: {run.name}: {reason}")
    elif not progress.console.is_terminal:
        show(f"  done: {run.name}")
    return is_ours


def _write(
    table: TableFile, cells: list[Cell], runs: Runs, out: Path, finished: render.Results
) -> None:
    """Write all files of a table.

    ``finished`` is changed: it keeps the results of finished cells from one call to the next, so
    that their runs need not be read again.
    """
    # locked so that of several processes the last to write has read what the others' runs left
    with runs.lock("tables"):
        results: render.Results = {}
        for cell in cells:
            place = (cell.row, cell.column)
            results[place] = finished.get(place) or render.result_of(cell, runs)
            if results[place].state == "done":
                finished[place] = results[place]
        content = render.as_dict(table, results)
        files = {
            ".json": json.dumps(content, indent=2, ensure_ascii=False) + "\n",
            ".md": render.markdown(table, results),
            ".tex": render.cells_of(table, results).as_latex(),
            ".costs.tex": render.costs(table, results).as_latex(),
            ".csv": render.csv_of_seeds(results),
        }
        if table.against:
            files[".against.tex"] = render.differences(table, results).as_latex()
        for suffix, text in files.items():
            write_text(out / f"{table.name}{suffix}", text)


def draw(table: TableFile, cells: list[Cell], runs: Runs, into: Path) -> list[str]:
    """Draw curves and boxes of the finished runs of each column, in which each row is a method.

    A column has a drawing for each figure that its cells show, but for counts. Runs whose last
    evaluation lacks the figure are left out. Return the columns of which cells are not drawn, as
    their figure is of a domain or no mean over the clients: curves are means over all clients.
    """
    from protofl_common.report.paper import save_curves_and_boxes  # matplotlib, half a second

    not_drawn = []
    for column in table.columns:
        methods: dict[str, dict[str, list[Path]]] = {}  # figure -> row -> folders
        for cell in cells:
            figure = cell.figure
            if cell.column != column or figure.what in COUNTS:
                continue
            if figure.domain or figure.over != "mean":
                not_drawn.append(column)
                continue
            finished = [runs.folder_of(run) for run in cell.runs.values() if runs.finished(run)]
            in_boxes = Figure(what=figure.what)  # of the last evaluation, whatever the cell is of
            folders = [folder for folder in finished if in_boxes.is_in(folder)]
            if folders:
                methods.setdefault(figure.what, {})[cell.row] = folders
        for what, of_rows in methods.items():
            prefix = as_file_name(f"{table.name}-{column}-{what}-")
            save_curves_and_boxes(of_rows, what, into, prefix)
    return list(dict.fromkeys(not_drawn))


def _shard(text: str) -> slice:
    """Read ``"3/16"`` as the slice of every 16th element from the third on."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise SettingsError(f"--shard {text!r}: must be I/N with I from 1 to N, such as 3/16")
    return slice(int(numbers[1]) - 1, None, int(numbers[2]))  # shards count from 1

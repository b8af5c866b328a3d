"""From a table to runs: every cell's settings checked, equal runs made once, missing data named.

A run's folder is named after its settings and the place of its data, and of a file of one's own after its size and
time: so tables share runs, and find them again. Several processes may work on one folder: each run has a lock.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path, PurePath
from typing import Any

from filelock import FileLock, Timeout

from protofl_common.basics.files import digest
from protofl_common.basics.text import as_file_name
from protofl_common.config.datasets import OWN_FORMATS, REDIVIDED
from protofl_common.config.options import Config, SettingsError
from protofl_common.config.sections import DataSettings, keys_that_change
from protofl_common.data import DataError, check_data_settings
from protofl_common.data.sources import source_of
from protofl_common.experiment.node import check_named, own_code
from protofl_common.experiment.settings import Settings, check_chosen, default_run_config, to_run_config
from protofl_common.runs.folder import CHECKPOINTS, SUMMARY, RunFolder
from protofl_common.tools.cli.arguments import read_recipe
from protofl_common.tools.cli.run import ROUND, check_data_are_here
from protofl_common.tools.cli.runs import HEAVY
from protofl_common.tools.tables.figure import Figure
from protofl_common.tools.tables.spec import Part, TableFile

NO_PART_OF_A_RUN = keys_that_change("name", "machine", "waiting", "display") - {"min-replies"}
"""Settings that may differ between two runs that are the same experiment."""


@dataclass(frozen=True)
class Run:
    """One run of a table: its ``--run-config`` (without name and folder) and its ``--federation-config``."""

    name: str
    config: Config
    federation: Config
    settings: Settings


@dataclass(frozen=True)
class Found:
    settings: Config
    value: float  # of the figure on validation data, the mean over the trials' seeds
    trials: int
    failed: int


@dataclass(frozen=True)
class Cell:
    row: str
    column: str
    figure: Figure
    runs: dict[int, Run]
    skipped: str = ""
    spaces: dict[str, Any] = field(default_factory=dict)  # of ``--search``: setting -> choices, or a range (`spec`)
    found: Found | None = None  # what it has found; the runs are of these settings
    asked: bool = True  # False beside the rows of ``only``: nothing is made for it, and what it has is shown

    def runs_with(self, settings: Config, seeds: Iterable[int]) -> dict[int, Run]:
        first = next(iter(self.runs.values()))
        return {seed: _run(first.config | settings | {"seed": seed}, first.federation, "") for seed in seeds}


def experiment(config: Config) -> Config:
    return {key: value for key, value in config.items() if key not in NO_PART_OF_A_RUN}


def plan(
    table: TableFile,
    *,
    data_dir: str = "",
    seeds: Sequence[int] = (),
    only: tuple[str, ...] = (),
    overrides: Config | None = None,
) -> list[Cell]:
    """The cells in reading order.

    ``data_dir`` takes the place of the leading ``data`` in the recipes' ``data-dir``, unless it is "", and ``seeds``
    those of the table's. ``only`` names rows: cells of other rows are not `asked` for, and are there only if these
    settings let them be planned. ``overrides`` are settings of the command line.

    SettingsError with a line for each cell asked for whose settings are wrong, and for an unknown row in ``only``.
    """
    runnable = [name for name, row in table.rows.items() if row.runs]
    problems = [f"--only {name!r}: choose among {', '.join(runnable)}" for name in only if name not in runnable]
    cells: list[Cell] = []
    for name, column in product(runnable, table.columns):
        asked = name in (only or runnable)
        try:
            cell = _cell(table, name, column, seeds or table.seeds, data_dir, overrides or {})
            cells.append(replace(cell, asked=asked))
        except (SettingsError, DataError) as error:
            lines = str(error).splitlines() if asked else ()
            problems += [f"{table.name}: {name} / {column}: {line}" for line in lines]
    if problems:
        raise SettingsError("\n".join(problems))
    check_chosen(overrides or {}, *(run.settings for run in runs_of(cells)))
    return [_unless_missing(cell) for cell in cells]


def runs_of(cells: list[Cell]) -> list[Run]:
    """The runs of the cells that are asked for."""
    return list({run.name: run for cell in cells if cell.asked for run in cell.runs.values()}.values())


def _cell(table: TableFile, row: str, column: str, seeds: Iterable[int], data_dir: str, overrides: Config) -> Cell:
    parts: list[Part] = [table, table.columns[column], table.rows[row]]
    figure = Figure.of(_merged(part.figure for part in parts), "figure")
    recipe = read_recipe(next((part.recipe for part in reversed(parts) if part.recipe), ""))
    config = recipe.settings | _merged(part.settings for part in parts) | overrides
    clients = next((part.clients for part in reversed(parts) if part.clients), None)
    federation = recipe.federation | ({"num-supernodes": clients} if clients else {})
    runs = {seed: _run(config | {"seed": seed}, federation, data_dir) for seed in seeds}
    check_chosen(parts[-1].settings, *(run.settings for run in runs.values()))
    return Cell(row, column, figure, runs, spaces=_merged(part.search for part in parts))


def _unless_missing(cell: Cell) -> Cell:
    try:
        check_data_are_here(next(iter(cell.runs.values())).settings.data)
    except DataError as missing:
        return replace(cell, runs={}, skipped=str(missing))
    return cell


def _run(config: Config, federation: Config, data_dir: str) -> Run:
    defaults = default_run_config()
    place = PurePath(str(config.get("data-dir", "")))
    if data_dir and place.parts[:1] == ("data",):
        config = config | {"data-dir": str(PurePath(data_dir, *place.parts[1:]))}
    settings = Settings.from_run_config(defaults | config)
    check_named(config)
    check_data_settings(settings.data)
    what = {key: value for key, value in experiment(to_run_config(settings)).items() if value != defaults[key]}
    where = str(Path(settings.data.data_dir).absolute()) if settings.data.data_dir else ""
    own = [*own_code(config, without=("callback",)).values(), *own_files(settings.data)]
    own += [f"division {version}"] if (version := REDIVIDED.get(settings.data.partition)) else []
    mark = digest(sorted(what.items()), federation["num-supernodes"], where, *own)[:8]
    name = f"{settings.run.algo}-{as_file_name(settings.data.dataset)}-s{settings.run.seed}-{mark}"
    return Run(name, config, federation, settings)


@cache
def own_files(data: DataSettings) -> list[int]:
    """Return the bytes and times of files of one's own data, not of images in folders: with others a run is another."""
    try:
        paths = source_of(data.dataset).locate(data) if data.dataset in OWN_FORMATS else (Path(data.data_dir),)
    except DataError:  # they are missing, and the cell is skipped
        paths = ()
    facts = [path.stat() for path in paths if path.is_file()]
    return [number for fact in facts for number in (fact.st_size, fact.st_mtime_ns)]


def _merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


Launch = Callable[[Run, Path, bool, Callable[[int], None]], str]  # (run, folder, resume, on_round) -> why it failed


class Runs:
    """All runs, and how those of now ended; without ``keep_models`` a finished one keeps only its figures.

    ``patience``: how many seconds to wait for another process that makes the same run; -1: until it has ended.
    """

    def __init__(self, folder: Path, keep_models: bool = False, patience: float = 0) -> None:
        self.folder, self.keep_models, self.patience = folder.resolve(), keep_models, patience
        self.failed: dict[str, str] = {}

    def folder_of(self, run: Run) -> Path:
        return self.folder / run.name

    def finished(self, run: Run) -> bool:
        """Return whether the run's folder holds a finished one with these settings and as many clients."""
        summary = RunFolder(self.folder_of(run)).summary()
        if summary is None:
            return False
        wanted, made = experiment(to_run_config(run.settings)), summary["settings"]
        same = all(made[key] == value for key, value in wanted.items() if key in made)
        return same and len(summary["clients"]) == run.federation["num-supernodes"]

    def lock(self, name: str) -> FileLock:
        logs = self.folder.parent / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return FileLock(logs / f".{name}.lock")

    def execute(self, run: Run, launch: Launch, on_round: Callable[[int], None]) -> bool:
        """Make a run unless it is finished; False where another process makes it."""
        with suppress(Timeout), self.lock(run.name).acquire(self.patience):
            if not self.finished(run):
                self._execute(run, launch, on_round)
            return True
        return False

    def _execute(self, run: Run, launch: Launch, on_round: Callable[[int], None]) -> None:
        folder = self.folder_of(run)
        resume = (folder / CHECKPOINTS).exists() and not (folder / SUMMARY).exists()
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)  # what is there is of other defaults, or has no checkpoint
        reason = launch(run, self.folder, resume, on_round)
        if resume and reason.startswith("resume = true"):  # it cannot go on: of another version, or damaged
            shutil.rmtree(folder, ignore_errors=True)
            reason = launch(run, self.folder, False, on_round)
        if not reason and not self.finished(run):
            reason = f"it left no summary of these settings in {folder}"
        if reason:
            self.failed[run.name] = reason
        else:
            self.failed.pop(run.name, None)
            for part in () if self.keep_models else HEAVY:
                shutil.rmtree(folder / part, ignore_errors=True)


def launch(
    run: Run, folder: Path, resume: bool, on_round: Callable[[int], None], *, resources: Callable[[Config], Config]
) -> str:
    """Make a run, with a log in ``logs/NAME.log``; ``resources``: what a client gets of this machine."""
    from protofl_common.tools.local import attempt  # PyTorch and Flower, two seconds

    config = run.config | {"out-dir": str(folder), "run-name": run.name} | ({"resume": True} if resume else {})
    log = folder.parent / "logs" / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:

        def note(line: str) -> None:
            print(line, file=file, flush=True)
            if match := ROUND.match(line):
                on_round(int(match[2]))

        return attempt(default_run_config() | config, resources(run.federation), note)[1]

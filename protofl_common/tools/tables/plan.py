"""From a table to runs: every cell's settings checked, equal runs made once, missing data named.

A run's folder is named after its settings and the place of its data, and of a file of one's own
after its size and time: so tables share runs, and find them again. Several processes may work on
one folder: each run has a lock.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path, PurePath

from filelock import FileLock, Timeout

from protofl_common.basics.files import digest
from protofl_common.basics.text import as_file_name
from protofl_common.config.datasets import OWN_FORMATS, PARTITIONS
from protofl_common.config.options import Config, Scalar, SettingsError
from protofl_common.config.sections import DataSettings, keys_that_change
from protofl_common.data import DataError, check_data_settings
from protofl_common.data.sources import check_data_are_here, source_of
from protofl_common.experiment.catalog import with_hparams
from protofl_common.experiment.node import check_named, own_code
from protofl_common.experiment.settings import (
    Settings,
    check_settings_act,
    default_run_config,
    to_run_config,
)
from protofl_common.runs.events import Event, Failed, RoundDone
from protofl_common.runs.folder import CHECKPOINTS, NEW, SUMMARY, RunFolder
from protofl_common.tools.arguments import read_recipe
from protofl_common.tools.tables.figure import Figure
from protofl_common.tools.tables.spec import Space, TableFile

NOT_OF_EXPERIMENT = keys_that_change("name", "machine", "waiting", "display") - {"min-replies"}
"""Settings that may differ between two runs that are the same experiment."""

# what a finished run can do without: the clients' models, and what lets it go on
REMOVABLE = ("clients", CHECKPOINTS)


@dataclass(frozen=True)
class Run:
    """One run of a table: its run config, without name and folder, and its federation config."""

    name: str
    config: Config
    federation: Config
    settings: Settings


@dataclass(frozen=True)
class Found:
    """The best settings that a search has found for a cell."""

    settings: Config
    value: float  # of the figure on validation data, the mean over the trials' seeds
    failed: int  # of the table's trials


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its runs, one for each seed, and the figure that is read from them."""

    row: str
    column: str
    figure: Figure
    runs: dict[int, Run]  # by seed; {} for a cell that is skipped
    skipped: str = ""  # why
    spaces: dict[str, Space] = field(default_factory=dict)  # of ``--search``, by setting
    found: Found | None = None  # what the search has found; then the runs have these settings
    asked: bool = True  # False: not among ``--only``; nothing is made for it, what it has is shown

    @property
    def first_run(self) -> Run:
        return next(iter(self.runs.values()))

    def runs_with(self, settings: Config, seeds: Iterable[int]) -> dict[int, Run]:
        """Return the cell's runs with these settings in the place of its own, by seed."""
        first = self.first_run
        config = first.config | settings
        return {seed: _run(config | {"seed": seed}, first.federation) for seed in seeds}


def experiment(config: Config) -> Config:
    """Return those settings in which two runs must be the same to be one experiment."""
    return {key: value for key, value in config.items() if key not in NOT_OF_EXPERIMENT}


def _what_it_leaves(settings: Settings) -> Config:
    """Return those settings that decide what a run leaves: the experiment, and what it measures."""
    config = to_run_config(settings)
    return {**experiment(config), "metrics": config["metrics"]}


def plan(
    table: TableFile,
    *,
    data_dir: str = "",
    seeds: Sequence[int] = (),
    only: tuple[str, ...] = (),
    overrides: Config | None = None,
) -> list[Cell]:
    """Plan the cells of a table, and return them row by row.

    ``data_dir``, unless it is "", replaces the leading ``data`` in the ``data-dir`` of the recipes.
    ``seeds``, unless empty, replace those of the table. ``overrides`` are settings of the command
    line. ``only`` names rows, all of them if it is empty. The cells of other rows are not `asked`
    for; they are returned as well, except those whose settings are wrong.

    SettingsError with a line for each cell that is asked for and has wrong settings, and for each
    unknown row in ``only``.
    """
    runnable = [name for name, row in table.rows.items() if row.runs]
    problems = []
    for name in only:
        if name not in runnable:
            problems.append(f"--only {name!r}: choose among {', '.join(runnable)}")

    cells: list[Cell] = []
    for name, column in product(runnable, table.columns):
        asked = name in (only or runnable)
        try:
            cell = _cell(table, name, column, seeds or table.seeds, data_dir, overrides or {})
        except (SettingsError, DataError) as error:
            if asked:
                for line in str(error).splitlines():
                    problems.append(f"{table.name}: {name} / {column}: {line}")
        else:
            cells.append(replace(cell, asked=asked))
    if problems:
        raise SettingsError("\n".join(problems))
    check_settings_act(overrides or {}, *(run.settings for run in runs_of(cells)))
    return [_skipped_if_data_are_missing(cell) for cell in cells]


def runs_of(cells: list[Cell]) -> list[Run]:
    """Return the runs of the cells that are asked for, each once."""
    runs = {}
    for cell in cells:
        if cell.asked:
            for run in cell.runs.values():
                runs[run.name] = run
    return list(runs.values())


def _cell(
    table: TableFile,
    row_name: str,
    column_name: str,
    seeds: Iterable[int],
    data_dir: str,
    overrides: Config,
) -> Cell:
    """Plan one cell of a table.

    Where several name one setting, the last of these wins: recipe, table, column, row, command
    line. ``data_dir``, unless it is "", replaces a leading ``data`` in ``data-dir``. SettingsError
    for wrong settings, and for one of the row's that has no effect.
    """
    column = table.columns[column_name]
    row = table.rows[row_name]
    figure = Figure.of(table.figure | column.figure | row.figure, "figure")
    recipe = read_recipe(row.recipe or column.recipe or table.recipe)
    config = recipe.settings | table.settings | column.settings | row.settings | overrides
    federation = recipe.federation
    clients = row.clients or column.clients
    if clients:
        federation = federation | {"num-supernodes": clients}
    place = PurePath(str(config.get("data-dir", "")))
    is_in_data = place.parts[:1] == ("data",)  # the place has no parts if it is ""
    if data_dir and is_in_data:
        config = config | {"data-dir": str(PurePath(data_dir, *place.parts[1:]))}
    runs = {seed: _run(config | {"seed": seed}, federation) for seed in seeds}
    spaces = table.search | column.search | row.search
    cell = Cell(row_name, column_name, figure, runs, spaces=spaces)
    check_settings_act(row.settings, cell.first_run.settings)  # the others differ in the seed only
    _check_measured(figure, cell.first_run.settings)
    return cell


def _check_measured(figure: Figure, settings: Settings) -> None:
    """Raise SettingsError if the figure is of a metric that such runs do not measure."""
    # of head/auc and validation/head/recall/3 that is auc, and recall
    metric = figure.what.removeprefix("validation/").partition("/")[2].partition("/")[0]
    if metric and f"/{metric}" != NEW and metric not in settings.reported_metrics:
        measured = ", ".join([*settings.metrics, metric])
        raise SettingsError(
            f"figure.what = {figure.what!r}: its runs do not measure {metric}; "
            f"set metrics = {measured!r}"
        )


def _skipped_if_data_are_missing(cell: Cell) -> Cell:
    """Return the cell; if its data are not here, without runs and with the reason in `skipped`."""
    try:
        check_data_are_here(cell.first_run.settings.data)
    except DataError as missing:
        return replace(cell, runs={}, skipped=str(missing))
    return cell


def _run(config: Config, federation: Config) -> Run:
    """Check the settings of a run, and name it after all that makes it another run (`_mark`).

    SettingsError or DataError for wrong settings.
    """
    config = with_hparams(config)
    settings = Settings.from_run_config(default_run_config() | config)
    check_named(config)
    check_data_settings(settings.data)

    data = as_file_name(settings.data.dataset)
    mark = _mark(config, settings, clients=federation["num-supernodes"])
    name = f"{settings.run.algo}-{data}-s{settings.run.seed}-{mark}"
    return Run(name, config, federation, settings)


def _mark(config: Config, settings: Settings, clients: Scalar) -> str:
    """Return eight hexadecimal digits that tell a run from others.

    They are the beginning of a hash of the settings that are not the defaults, the metrics among
    them, the number of clients, the place and the files of the data, and the versions of the user's
    code and of the code that divides the data.
    """
    defaults = default_run_config()
    chosen = _what_it_leaves(settings)
    changed = [(key, value) for key, value in chosen.items() if value != defaults[key]]
    folder = settings.data.data_dir
    where = str(Path(folder).absolute()) if folder else ""
    # not that of a callback, which changes what is shown, and no result
    versions = [*own_code(config, without=("callback",)).values(), *own_files(settings.data)]
    division = PARTITIONS[settings.data.partition].version
    if division > 1:  # the names of runs of the first version have no number
        versions.append(f"division {division}")
    return digest(sorted(changed), clients, where, *versions)[:8]


@cache
def own_files(data: DataSettings) -> list[int]:
    """Return size and time of change of each file of the user's own data.

    A run on changed files is another run. Return [] for data in folders, such as images, and where
    the files are missing.
    """
    paths: Iterable[Path] = (Path(data.data_dir),)
    if data.dataset in OWN_FORMATS:
        try:
            paths = source_of(data.dataset).locate(data)
        except DataError:  # they are missing, and the cell is skipped
            return []
    numbers = []
    for path in paths:
        if path.is_file():
            status = path.stat()
            numbers += [status.st_size, status.st_mtime_ns]
    return numbers


Launch = Callable[[Run, Path, bool, Callable[[int], None]], Failed | None]
"""(run, folder of all runs, resume, on_round) -> how it failed, None if it did not"""


@dataclass
class Runs:
    """The runs in a folder, and why those failed that this process has made.

    Without ``keep_models`` a finished run keeps only its figures. ``patience``: how many seconds to
    wait for another process that makes the same run; -1: until it has ended.
    """

    folder: Path
    keep_models: bool = False
    patience: float = 0
    failed: dict[str, str] = field(default_factory=dict)  # name of a run -> why

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()

    def folder_of(self, run: Run) -> Path:
        return self.folder / run.name

    def finished(self, run: Run) -> bool:
        """Return whether a run of these settings and as many clients is finished in its folder."""
        summary = RunFolder(self.folder_of(run)).summary()
        if summary is None:
            return False
        settings_then = summary["settings"]
        for key, value in _what_it_leaves(run.settings).items():
            # a run of another version may not have had the setting
            if key in settings_then and settings_then[key] != value:
                return False
        return len(summary["clients"]) == run.federation["num-supernodes"]

    def lock(self, name: str) -> FileLock:
        """Return the lock of a run, or of other work that only one process may do at a time.

        It is not held yet; only its folder is made.
        """
        logs = self.folder.parent / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return FileLock(logs / f".{name}.lock")

    def execute(self, run: Run, launch: Launch, on_round: Callable[[int], None]) -> bool:
        """Make a run unless it is finished; return False if another process is making it.

        If the run fails, `failed` has the reason afterwards.
        """
        with suppress(Timeout), self.lock(run.name).acquire(self.patience):
            if not self.finished(run):
                self._execute(run, launch, on_round)
            return True
        return False

    def _execute(self, run: Run, launch: Launch, on_round: Callable[[int], None]) -> None:
        """Make or resume a run that is not finished, and note if it failed; its lock is held.

        What the folder has is removed where the run cannot be resumed from it.
        """
        folder = self.folder_of(run)
        resume = bool(RunFolder(folder).checkpoints()) and not (folder / SUMMARY).exists()
        if not resume:  # it has no checkpoint, or a finished run of other settings
            shutil.rmtree(folder, ignore_errors=True)
        failure = launch(run, self.folder, resume, on_round)
        if failure and failure.kind == "CannotResume":  # then it begins anew
            shutil.rmtree(folder, ignore_errors=True)
            failure = launch(run, self.folder, False, on_round)
        if failure:
            self.failed[run.name] = failure.reason
            return
        if not self.finished(run):
            self.failed[run.name] = f"it left no summary of these settings in {folder}"
            return
        self.failed.pop(run.name, None)
        if not self.keep_models:
            for part in REMOVABLE:
                shutil.rmtree(folder / part, ignore_errors=True)


def launch(
    run: Run,
    folder: Path,
    resume: bool,
    on_round: Callable[[int], None],
    *,
    resources: Callable[[Config], Config],
) -> Failed | None:
    """Make a run in this process, and return how it failed; None if it did not.

    ``folder`` is that of all runs; the log is ``../logs/NAME.log``. ``resources`` adds to the
    federation config what a client gets of this machine. ``on_round`` is called after each round.
    """
    from protofl_common.simulation.grid import attempt  # PyTorch and Flower, two seconds

    config = default_run_config() | run.config | {"out-dir": str(folder), "run-name": run.name}
    if resume:
        config["resume"] = True
    log = folder.parent / "logs" / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:

        def on_event(event: Event) -> None:
            print(event, file=file, flush=True)
            if isinstance(event, RoundDone):
                on_round(event.row["round"])

        with redirect_stdout(file):  # what the user's own code prints goes to the log, too
            ended = attempt(config, resources(run.federation), on_event)
    return ended if isinstance(ended, Failed) else None

"""``protofl table --search``: the settings of each cell, chosen on validation data before its runs are made.

A trial is a run for each trial seed (docs/tables.md). After the first Optuna suggests them from those before (tree of
Parzen estimators, Bergstra et al. 2011), with a random seed for each: a search that was stopped goes on as if it had
not been. Each search is a file in OUT/trials.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypedDict

from protofl_common.basics.files import digest, write_text
from protofl_common.config.options import Config, Scalar, SettingsError, keys_of
from protofl_common.config.sections import DataSettings
from protofl_common.experiment.settings import default_run_config, to_run_config
from protofl_common.tools.tables.figure import COUNTS, NoFigure
from protofl_common.tools.tables.plan import Cell, Found, Run, Runs
from protofl_common.tools.tables.spec import TableFile

STARTUP_TRIALS = 5  # of random settings, before the sampler learns from them
DIGITS = 3  # of a number that is tried
OF_DATA = {"seed", *keys_of(DataSettings)}  # settings with which a figure would be of other samples


class Trial(TypedDict):
    settings: Config
    value: float | None  # None: it failed, and is tried again when the search goes on
    reason: str


class Search:
    """The trials of a cell, those of earlier invocations too."""

    def __init__(self, table: TableFile, cell: Cell, trials: Runs) -> None:
        self.table, self.cell, self.runs = table, cell, trials
        self.figure = replace(cell.figure, what=f"validation/{cell.figure.what.removeprefix('validation/')}")
        self.own = to_run_config(next(iter(cell.runs.values())).settings)
        names = [run.name for run in self.runs_of({})]
        mark = digest(names, sorted(cell.spaces.items()), str(self.figure))[:8]
        self.file = trials.folder / f"{names[0].rpartition('-')[0]}-{mark}.jsonl"
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        self.trials: list[Trial] = [json.loads(line) for line in lines]

    def runs_of(self, settings: Config) -> list[Run]:
        alone: Config = {"report": False, "baselines": ""}
        return list(self.cell.runs_with(settings | alone, self.table.trial_seeds).values())

    def tuned(self, make: Callable[[Run, Runs], object] | None) -> Cell:
        """The cell with the best settings, once ``make`` has made the trials left or failed; None: they skip it."""
        try:
            for number in range(self.table.trials):
                earlier = self.trials[number] if number < len(self.trials) else None
                if earlier and earlier["value"] is not None:
                    continue
                if make is None:
                    raise NoFigure(f"{self.table.trials - number} of {self.table.trials} trials are to be made first")
                settings = earlier["settings"] if earlier else self._suggested(number)
                for run in self.runs_of(settings):
                    make(run, self.runs)
                self._add(number, settings)
            return self._best()
        except SettingsError as error:
            return replace(self.cell, runs={}, skipped=f"search: {error}")

    def _add(self, number: int, settings: Config) -> None:
        runs = self.runs_of(settings)
        reasons = [self.runs.failed[run.name] for run in runs if run.name in self.runs.failed]
        try:
            values = [] if reasons else [self.figure.read(self.runs.folder_of(run)) for run in runs]
        except NoFigure as error:
            if number == 0:  # the row has none, whatever its settings
                raise
            values, reasons = [], [str(error)]
        value = statistics.fmean(values) if values else None
        self.trials[number : number + 1] = [{"settings": settings, "value": value, "reason": "; ".join(reasons)}]
        write_text(self.file, "".join(json.dumps(trial) + "\n" for trial in self.trials))

    @property
    def made(self) -> list[Trial]:
        return [trial for trial in self.trials[: self.table.trials] if trial["value"] is not None]

    def _best(self) -> Cell:
        if not self.made:
            raise SettingsError(f"none of {self.table.trials} trials ended well: {self.trials[-1]['reason']}")
        best = max(self.made, key=lambda trial: trial["value"] or 0.0)
        runs = self.cell.runs_with(best["settings"], self.cell.runs)
        failed = min(len(self.trials), self.table.trials) - len(self.made)
        search = Found(best["settings"], best["value"] or 0.0, self.table.trials, failed)
        return replace(self.cell, runs=runs, found=search)

    def _suggested(self, number: int) -> Config:
        own = {key: self.own[key] for key in self.cell.spaces}
        if number == 0 and all(_inside(own[key], space) for key, space in self.cell.spaces.items()):
            return own
        import optuna  # half a second, and an extra

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        spaces = {key: _distribution(key, space) for key, space in self.cell.spaces.items()}
        sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=STARTUP_TRIALS)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for trial in self.made:
            past = optuna.trial.create_trial(params=trial["settings"], distributions=spaces, value=trial["value"])
            study.add_trial(past)
        return {key: _rounded(value, self.cell.spaces[key]) for key, value in study.ask(spaces).params.items()}


def check_search(table: TableFile, cells: list[Cell]) -> None:
    """SettingsError with a line for each reason why the table cannot be searched."""
    problems = [] if table.trials else ["trials: missing: how many settings does --search try for each cell?"]
    if not any(cell.spaces for cell in cells):
        problems.append("search: missing: which settings does --search look for, such as {lr: {log: [0.001, 0.1]}}?")
    if same := sorted({seed for cell in cells for seed in cell.runs} & set(table.trial_seeds)):
        problems.append(f"trial-seeds: {', '.join(map(str, same))}: the final runs have this seed, too; choose others")
    problems += [line for cell in cells if cell.runs and cell.spaces for line in _problems(cell)]
    if problems:
        raise SettingsError("\n".join(f"{table.name}: {problem}" for problem in dict.fromkeys(problems)))
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise SettingsError("--search needs Optuna: pip install 'protofl[search]'") from None


def _problems(cell: Cell) -> Iterator[str]:
    settings = next(iter(cell.runs.values())).settings
    if not settings.data.validation_fraction:
        yield "validation-fraction = 0.0: --search chooses on validation data only; set it above 0, such as 0.2"
    if cell.figure.what in COUNTS or cell.figure.over == "std":
        yield f"column {cell.column}: --search looks for the largest accuracy or metric, not for {cell.figure}"
    for key, space in cell.spaces.items():
        if key in OF_DATA:
            yield f"search: {key}: changes the data, so that trials could not be compared"
            continue
        if "." in key and not key.startswith(f"{settings.run.algo}."):
            yield f"row {cell.row}: search: {key}: is no setting of {settings.run.algo}"
            continue
        for value in _ends(space):
            try:
                cell.runs_with({key: value}, [0])
            except SettingsError as error:
                yield f"{cell.row} / {cell.column}: search: {error}"


def _ends(space: Any) -> Iterable[Scalar]:
    values: list[Scalar] = space if isinstance(space, list) else next(iter(space.values()))
    return values


def _inside(value: Scalar, space: Any) -> bool:
    if isinstance(space, list):
        return value in space
    low, high = map(float, _ends(space))
    return low <= float(value) <= high


def _distribution(key: str, space: Any) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(space, list):
        return CategoricalDistribution(space)
    number: Any = IntDistribution if type(default_run_config()[key]) is int else FloatDistribution
    low, high = _ends(space)
    return number(low, high, log="log" in space)


def _rounded(value: Scalar, space: Any) -> Scalar:
    if not isinstance(value, float) or isinstance(space, list) or not math.isfinite(value):
        return value
    low, high = map(float, _ends(space))
    return min(max(float(f"{value:.{DIGITS}g}"), low), high)

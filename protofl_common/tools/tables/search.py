"""``protofl table --search``: the settings of each cell, chosen on validation data before its runs.

A trial is a run for each trial seed (docs/tables.md). After the first Optuna suggests them from
those before (tree of Parzen estimators, Bergstra et al. 2011), with a random seed for each: a
search that was stopped goes on as if it had not been. Each search is a study in a journal file of
Optuna in OUT/trials.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from protofl_common.basics.files import digest
from protofl_common.config.options import Config, Scalar, SettingsError, keys_of
from protofl_common.config.sections import DataSettings
from protofl_common.experiment.settings import default_run_config, to_run_config
from protofl_common.tools.tables.figure import COUNTS, NoFigure
from protofl_common.tools.tables.plan import Cell, Found, Run, Runs
from protofl_common.tools.tables.spec import TableFile

if TYPE_CHECKING:  # half a second, and an extra
    from optuna import Study
    from optuna.trial import FrozenTrial

STARTUP_TRIALS = 5  # of random settings, before the sampler learns from them
DIGITS = 3  # of a number that is tried
OF_DATA = {"seed", *keys_of(DataSettings)}  # settings that would change the samples of a figure
IS_OWN = "is-own"  # attribute of a trial of the row's own settings, which are not rounded


class Search:
    """The trials of a cell, those of earlier invocations too.

    A trial stays open in the journal until it has a value: one that was stopped, or failed, is made
    again when the search goes on.
    """

    def __init__(self, table: TableFile, cell: Cell, trials: Runs) -> None:
        self.table = table
        self.cell = cell
        self.runs = trials
        what = cell.figure.what.removeprefix("validation/")
        self.figure = replace(cell.figure, what=f"validation/{what}")
        names = [run.name for run in self.runs_of({})]
        mark = digest(names, sorted(cell.spaces.items()), str(self.figure))[:8]
        self.name = f"{names[0].rpartition('-')[0]}-{mark}"
        self.file = trials.folder / f"{self.name}.journal"

    def runs_of(self, settings: Config) -> list[Run]:
        """Return the runs of a trial."""
        alone: Config = {"report": False, "baselines": ""}
        return list(self.cell.runs_with(settings | alone, self.table.trial_seeds).values())

    def tuned(self, make: Callable[[Run, Runs], object] | None) -> Cell:
        """Return the cell with the best settings, once ``make`` has made the trials left or failed.

        Without ``make`` the cell is skipped if there are any.
        """
        try:
            reason = self._make_trials(make)
            return self._best(reason)
        except SettingsError as error:
            return replace(self.cell, runs={}, skipped=f"search: {error}")

    @property
    def made(self) -> "list[FrozenTrial]":
        """The trials that have a value."""
        return [trial for trial in self._trials() if trial.value is not None]

    def _make_trials(self, make: Callable[[Run, Runs], object] | None) -> str:
        """Make the trials that are left; return why the last one failed, if one did."""
        reason = ""
        count = self.table.trials
        for number in range(count):
            trials = self._trials()
            if number < len(trials) and trials[number].value is not None:
                continue
            if make is None:
                raise NoFigure(f"{count - number} of {count} trials are to be made first")
            trial = self._asked(number)
            runs = self.runs_of(self._settings_of(trial))
            for run in runs:
                make(run, self.runs)
            failures = [self.runs.failed[run.name] for run in runs if run.name in self.runs.failed]
            if failures:
                reason = "; ".join(failures)
                continue
            try:
                values = [self.figure.read(self.runs.folder_of(run)) for run in runs]
            except NoFigure as error:
                if number == 0:  # the row has none, whatever its settings
                    raise
                reason = str(error)
                continue
            value = statistics.fmean(values)
            self._study.tell(trial.number, value, skip_if_finished=True)  # others may have told it
        return reason

    def _best(self, reason: str) -> Cell:
        """Return the cell with the settings of the best trial, for all its seeds.

        SettingsError where no trial has a value; ``reason`` says why the last one failed.
        """
        made = self.made  # all have a value; Optuna's type allows for None, hence the 0.0 below
        count = self.table.trials
        if not made:
            raise SettingsError(f"none of {count} trials ended well: {reason}")
        best = max(made, key=lambda trial: trial.value or 0.0)
        settings = self._settings_of(best)
        found = Found(settings, best.value or 0.0, count, failed=count - len(made))
        return replace(self.cell, runs=self.cell.runs_with(settings, self.cell.runs), found=found)

    @cached_property
    def _study(self) -> "Study":
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        return optuna.create_study(
            direction="maximize",
            storage=JournalStorage(JournalFileBackend(str(self.file))),
            study_name=self.name,
            load_if_exists=True,
        )

    def _trials(self) -> "list[FrozenTrial]":
        """Return the trials so far, as many as the table wants.

        One without all its settings was stopped while Optuna was asked, and does not count.
        """
        if not self.file.exists():
            return []
        trials = self._study.get_trials(deepcopy=False)
        asked = [trial for trial in trials if trial.params.keys() == self.cell.spaces.keys()]
        return asked[: self.table.trials]

    def _asked(self, number: int) -> "FrozenTrial":
        """Return the trial with this number; if there is none yet, Optuna suggests its settings.

        Of several processes one asks, and the others make the same trial.
        """
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState, create_trial

        with self.runs.lock(self.name):
            trials = self._trials()
            if number < len(trials):
                return trials[number]
            spaces = self.cell.spaces
            distributions = {key: _distribution(key, space) for key, space in spaces.items()}
            own = self._own_settings()
            if number == 0 and all(_is_inside(own[key], spaces[key]) for key in spaces):
                first = create_trial(
                    state=TrialState.RUNNING,
                    params=own,
                    distributions=distributions,
                    user_attrs={IS_OWN: True},
                )
                self._study.add_trial(first)
            else:
                self._study.sampler = TPESampler(seed=number, n_startup_trials=STARTUP_TRIALS)
                self._study.ask(distributions)
            return self._trials()[number]

    def _own_settings(self) -> Config:
        """Return what the row has where the search varies its settings."""
        config = to_run_config(self.cell.first_run.settings)
        return {key: config[key] for key in self.cell.spaces}

    def _settings_of(self, trial: "FrozenTrial") -> Config:
        if IS_OWN in trial.user_attrs:
            return dict(trial.params)
        return {key: _rounded(value, self.cell.spaces[key]) for key, value in trial.params.items()}


def check_search(table: TableFile, cells: list[Cell]) -> None:
    """Raise SettingsError with a line for each reason why the table cannot be searched."""
    problems = []
    if not table.trials:
        problems.append("trials: missing: how many settings does --search try for each cell?")
    if not any(cell.spaces for cell in cells):
        problems.append(
            "search: missing: which settings does --search look for, such as "
            "{lr: {log: [0.001, 0.1]}}?"
        )
    final_seeds = {seed for cell in cells for seed in cell.runs}
    shared = sorted(final_seeds & set(table.trial_seeds))
    if shared:
        seeds = ", ".join(map(str, shared))
        problems.append(f"trial-seeds: {seeds}: the final runs have this seed, too; choose others")
    for cell in cells:
        if cell.runs and cell.spaces:
            problems += _problems(cell)
    if problems:
        lines = [f"{table.name}: {problem}" for problem in dict.fromkeys(problems)]
        raise SettingsError("\n".join(lines))
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise SettingsError("--search needs Optuna: pip install 'protofl[search]'") from None


def _problems(cell: Cell) -> Iterator[str]:
    settings = cell.first_run.settings
    if not settings.data.validation_fraction:
        yield (
            "validation-fraction = 0.0: --search chooses on validation data only; set it above 0, "
            "such as 0.2"
        )
    if cell.figure.what in COUNTS or cell.figure.over == "std":
        yield (
            f"column {cell.column}: --search looks for the largest accuracy or metric, not for "
            f"{cell.figure}"
        )
    for key, space in cell.spaces.items():
        if key in OF_DATA:
            yield f"search: {key}: changes the data, so that trials could not be compared"
        elif "." in key and not key.startswith(f"{settings.run.algo}."):
            yield f"row {cell.row}: search: {key}: is no setting of {settings.run.algo}"
        else:
            for value in _ends(space):
                try:
                    cell.runs_with({key: value}, [0])
                except SettingsError as error:
                    yield f"{cell.row} / {cell.column}: search: {error}"


def _ends(space: Any) -> list[Scalar]:
    """Return the lowest and the highest value, or all that are listed."""
    if isinstance(space, list):
        return space
    ((_, ends),) = space.items()
    return list(ends)


def _is_inside(value: Scalar, space: Any) -> bool:
    if isinstance(space, list):
        return value in space
    low, high = map(float, _ends(space))
    return low <= float(value) <= high


def _distribution(key: str, space: Any) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(space, list):
        return CategoricalDistribution(space)
    ((scale, (low, high)),) = space.items()
    is_whole = type(default_run_config()[key]) is int
    number = IntDistribution if is_whole else FloatDistribution
    return number(low, high, log=scale == "log")


def _rounded(value: Scalar, space: Any) -> Scalar:
    """Round a number between two ends: in a table nobody wants 17 digits."""
    if not isinstance(value, float) or isinstance(space, list) or not math.isfinite(value):
        return value
    low, high = map(float, _ends(space))
    return min(max(float(f"{value:.{DIGITS}g}"), low), high)

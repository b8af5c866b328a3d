"""``protofl table --search``: the settings of each cell, chosen on validation data before its runs.

A trial is a run for each trial seed (docs/tables.md). The first has the row's own settings, the
others are drawn at random (Bergstra & Bengio 2012): what a trial has of a setting depends only on
the setting, its space and the trial's number. So rows that search the same space try the same
values, and nothing has to be kept but the runs.
"""

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from protofl_common.config.options import Config, Scalar, SettingsError, keys_of
from protofl_common.config.sections import DataSettings
from protofl_common.experiment.settings import hparams_by_key, to_run_config
from protofl_common.tools.tables.figure import COUNTS, Figure, NoFigure
from protofl_common.tools.tables.plan import Cell, Found, Run, Runs
from protofl_common.tools.tables.spec import Range, Space, TableFile

DIGITS = 3  # of a number that is tried
OF_DATA = {"seed", *keys_of(DataSettings)}  # settings that would change the samples of a figure


@dataclass(frozen=True)
class Search:
    """The trials of a cell, also those that earlier calls of the command have made.

    A trial that was stopped, or failed, is made again when the search goes on.
    """

    table: TableFile
    cell: Cell
    runs: Runs  # in the folder of all trials

    @property
    def figure(self) -> Figure:
        """The cell's figure, but on validation data, as no search looks at others."""
        what = self.cell.figure.what.removeprefix("validation/")
        return replace(self.cell.figure, what=f"validation/{what}")

    def runs_of(self, number: int) -> list[Run]:
        """Return the runs of the trial with this number, one for each trial seed.

        They write no report and have no baselines: only their figures are needed.
        """
        settings = self.settings_of(number) | {"report": False, "baselines": ""}
        return list(self.cell.runs_with(settings, self.table.trial_seeds).values())

    def settings_of(self, number: int) -> Config:
        """Return what the trial with this number tries: a value for each setting with a space.

        Trial 0 tries the row's own settings, if these lie in the spaces. All others are drawn.
        """
        spaces = self.cell.spaces
        settings = self.cell.first_run.settings
        config = to_run_config(settings) | hparams_by_key(settings)
        own = {key: config[key] for key in spaces}
        if number == 0 and all(own[key] in space for key, space in spaces.items()):
            return own
        return {key: _drawn(key, space, number, type(own[key])) for key, space in spaces.items()}

    def tuned(self, make: Callable[[Run, Runs], object] | None) -> Cell:
        """Return the cell with the runs of the best settings, after ``make`` has made the trials.

        Finished trials are not made again. SettingsError if trials are left to make and ``make`` is
        None, if the row has no such figure on validation data, and if no trial ended well: then it
        says why the last one failed.
        """
        count = self.table.trials
        values: dict[int, float] = {}  # number of a trial -> its mean figure over the seeds
        reason = ""  # why the last trial without a figure has none
        for number in range(count):
            runs = self.runs_of(number)
            for run in runs:
                if make:
                    make(run, self.runs)
                elif not self.runs.finished(run):
                    raise NoFigure(f"its {count} trials are to be made first")
            failures = [self.runs.failed[run.name] for run in runs if run.name in self.runs.failed]
            if failures:
                reason = "; ".join(failures)
                continue
            try:
                figures = [self.figure.read(self.runs.folder_of(run)) for run in runs]
            except NoFigure as error:
                if number == 0:  # then no trial has it, whatever its settings
                    raise
                reason = str(error)
                continue
            values[number] = statistics.fmean(figures)

        if not values:
            raise SettingsError(f"none of {count} trials ended well: {reason}")
        best = max(values, key=lambda number: values[number])
        settings = self.settings_of(best)
        found = Found(settings, values[best], failed=count - len(values))
        return replace(self.cell, runs=self.cell.runs_with(settings, self.cell.runs), found=found)


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
    final_seeds = chain(*(cell.runs for cell in cells))
    shared = sorted(set(final_seeds) & set(table.trial_seeds))
    if shared:
        seeds = ", ".join(map(str, shared))
        problems.append(f"trial-seeds: {seeds}: the final runs have this seed, too; choose others")
    for cell in cells:
        if cell.runs and cell.spaces:
            problems += _problems(cell)
    if problems:
        lines = [f"{table.name}: {problem}" for problem in dict.fromkeys(problems)]
        raise SettingsError("\n".join(lines))


def _problems(cell: Cell) -> Iterator[str]:
    """Yield a line for each reason why a cell's settings cannot be searched."""
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
            values = [space.low, space.high] if isinstance(space, Range) else space
            for value in values:
                try:
                    cell.runs_with({key: value}, seeds=[0])  # for its error; any seed will do
                except SettingsError as error:
                    yield f"{cell.row} / {cell.column}: search: {error}"


def _drawn(key: str, space: Space, number: int, kind: type) -> Scalar:
    """Draw the value that the trial with this number tries for the setting ``key``.

    It depends on these arguments alone, so that all cells that search a space try the same values.
    """
    position = random.Random(f"{key} {number}").random()  # in the space, from 0 to below 1
    if isinstance(space, list):
        chosen: Scalar = space[int(position * len(space))]
        return chosen
    is_whole = kind is int
    # int() rounds down: without 1 more the highest whole number would never be drawn
    end = space.high + 1 if is_whole else space.high
    value = space.low + position * (end - space.low)
    if space.is_log:
        value = space.low * (end / space.low) ** position
    if is_whole:
        return int(value)
    rounded = float(f"{value:.{DIGITS}g}")  # nobody wants 17 digits in a table
    return min(max(rounded, space.low), space.high)  # rounding may have left the range

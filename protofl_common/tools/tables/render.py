"""A table as Markdown, LaTeX and CSV: our figures beside the paper's."""

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from protofl_common.runs.figures import Table, as_csv
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.tables.figure import COUNTS, NoFigure
from protofl_common.tools.tables.groups import ESTIMATED, Estimate, difference, estimate_cells
from protofl_common.tools.tables.plan import Cell, Runs
from protofl_common.tools.tables.spec import TableFile

SEARCHED = (
    "The settings were chosen on validation data, by trials that no row has more of; "
    "test data chose none."
)
DIFFERENCES = (
    "Differences at the same seeds: their mean, its 95 % interval (Student's t), and the p of a "
    "two-sided paired t-test, of each comparison alone."
)


@dataclass(frozen=True)
class Result:
    """What the runs of a cell have come to so far."""

    cell: Cell
    values: dict[int, float]  # seed -> figure
    state: str  # done, failed, skipped, open (not all runs made yet)
    reason: str  # why it failed, or was skipped: no data here, or no such figure of the algorithm
    figure: str  # its name, with what a reader must know of it
    warnings: tuple[str, ...] = ()  # of the runs, each once, with its seeds

    @property
    def decimals(self) -> int:
        return self.cell.figure.digits

    @property
    def text(self) -> str:
        """The cell's text: mean and deviation over the seeds, ``97.58 ± 0.05``.

        As long as some seeds are missing it says how many there are; without any, the state.
        """
        if not self.values:
            return {"open": "…", "skipped": "–"}.get(self.state, self.state)
        figures = list(self.values.values())
        text = f"{statistics.fmean(figures):.{self.decimals}f}"
        if len(figures) > 1:
            deviation = statistics.stdev(figures)
            text += f" ± {deviation:.{self.decimals}f}"
        wanted = len(self.cell.runs)
        if len(figures) == wanted:
            return text
        failed = ", others failed" if self.state == "failed" else ""
        return f"{text} ({len(figures)} of {wanted} seeds{failed})"

    @property
    def rank(self) -> float | None:
        """The mean of a finished cell as it is shown; None where the largest is not the best.

        That is so for counts, and for the deviation over clients.
        """
        figure = self.cell.figure
        if self.state != "done" or figure.what in COUNTS or figure.over == "std":
            return None
        return round(statistics.fmean(self.values.values()), self.decimals)

    @property
    def division(self) -> object:
        """How the data are divided; only results of one division are paired."""
        run = self.cell.first_run
        return run.settings.data, run.federation["num-supernodes"]


Place = tuple[str, str]  # row and column
Results = dict[Place, Result]


def result_of(cell: Cell, runs: Runs) -> Result:
    """Read what the runs of a cell have come to so far.

    A cell of which one run failed has failed; else it is skipped if a finished run lacks the
    figure.
    """
    if cell.skipped:
        return Result(cell, {}, "skipped", cell.skipped, str(cell.figure))

    values = {}
    failures = []
    absent = []  # why a finished run has no such figure
    figures = []
    warnings: dict[str, list[str]] = {}  # warning -> its seeds
    for seed, run in cell.runs.items():
        if not runs.finished(run):
            if run.name in runs.failed:
                failures.append(f"seed {seed}: {runs.failed[run.name]}")
            continue
        folder = runs.folder_of(run)
        try:
            values[seed] = cell.figure.read(folder)
            figures.append(cell.figure.described(folder))
            for warning in RunFolder(folder).finished_summary().get("warnings", []):
                warnings.setdefault(warning, []).append(str(seed))
        except NoFigure as error:
            absent.append(str(error))

    if failures:
        state = "failed"
    elif absent:
        state = "skipped"
    elif len(values) == len(cell.runs):
        state = "done"
    else:
        state = "open"
    return Result(
        cell,
        values,
        state,
        reason="; ".join([*failures, *dict.fromkeys(absent)]),
        figure=" or ".join(dict.fromkeys(figures)) or str(cell.figure),
        warnings=tuple(
            f"seed {', '.join(seeds)}: {warning}" for warning, seeds in warnings.items()
        ),
    )


def cells_of(table: TableFile, results: Results) -> Table:
    """Return the table itself: our figures, and beside them the paper's if any row has some.

    In each column the best of ours is bold.
    """
    has_paper = any(row.paper for row in table.rows.values())
    heads = [""]
    for column in table.columns:
        heads.append(column)
        if has_paper:
            heads.append("paper")

    rows = []
    bold = []
    for number, (name, row) in enumerate(table.rows.items()):
        texts = [name]
        for column in table.columns:
            result = results.get((name, column))
            if result and _is_best(result, column, results):
                bold.append((number, len(texts)))
            texts.append(result.text if result else "–")
            if has_paper:
                texts.append(row.paper.get(column, ""))
        rows.append(texts)
    return Table(heads, rows, table.note, bold=bold)


def _is_best(result: Result, column: str, results: Results) -> bool:
    """Return whether no finished cell of the column is better; one cell alone is not the best."""
    ranks = []
    for (_, column_of_other), other in results.items():
        if column_of_other == column and other.rank is not None:
            ranks.append(other.rank)
    return len(ranks) > 1 and result.rank == max(ranks)


def markdown(table: TableFile, results: Results) -> str:
    """Return the page of a table: the cells, what was measured, notes, differences, the search."""
    lines = [f"# {table.title}", ""]
    for text in (table.source, table.note):
        if text:
            lines += [text, ""]
    figures = ", ".join(dict.fromkeys(result.figure for result in results.values()))
    lines += [
        *cells_of(table, results).as_markdown(),
        "",
        f"Ours, of test data unless it says otherwise: {figures or 'nothing'}; "
        "mean ± sample standard deviation over the seeds.",
    ]
    if "chosen on test data" in figures:
        lines.append("What was chosen on test data is too good: it was picked by what it reports.")
    if table.trials and not any(result.cell.found for result in results.values()):
        lines.append("The settings are those of the table's file; --search looks for better ones.")
    notes = _notes(results)
    if notes:
        lines += ["", *notes]
    if table.against:
        lines += ["", f"## Against {table.against}", "", DIFFERENCES, ""]
        lines += differences(table, results).as_markdown()
    return "\n".join([*lines, *_searches(table, results)]) + "\n"


def _notes(results: Results) -> list[str]:
    """Say why cells have no figure, and what their runs warn of.

    A row says once what holds for several of its columns, and rows with the same note share it.
    """
    columns_of: dict[tuple[str, str], list[str]] = {}  # row and note -> columns
    for (name, column), result in results.items():
        notes = [f"warning: {warning}" for warning in result.warnings]
        if result.reason:
            notes.insert(0, f"{result.state}: {result.reason}")
        for note in notes:
            columns_of.setdefault((name, note), []).append(column)

    rows_of: dict[tuple[str, str], list[str]] = {}  # columns and note -> rows
    for (name, note), columns in columns_of.items():
        rows_of.setdefault((", ".join(columns), note), []).append(name)
    lines = []
    for (where, note), names in rows_of.items():
        lines.append(f"- {', '.join(names)} ({where}): {note}")
    return lines


def differences(table: TableFile, results: Results) -> Table:
    """Return the table of differences: for each cell with figures, how much it is above another.

    That is the cell in the same column of the row that the table names as ``against``.
    """
    rows = []
    for (name, column), result in results.items():
        if not result.values:
            continue
        gain = _gain(table, name, column, results)
        count, *rest = estimate_cells(result.values.values(), gain, result.decimals)
        if gain and gain.n < len(result.values):
            count += f" ({gain.n} paired)"
        rows.append([name, column, count, *rest])
    return Table(("", "column", *ESTIMATED), rows, table.note, words=(0, 1))


def _gain(table: TableFile, row: str, column: str, results: Results) -> Estimate | None:
    """Estimate how much a cell's figure is above that of the table's row ``against``.

    Both are of the same column, and compared over the seeds that both have. None for that row
    itself, where one of the two has no figures, and where they are of other data.
    """
    result = results[row, column]
    other = results.get((table.against, column))
    if other is None or row == table.against or not (result.values and other.values):
        return None
    if result.division != other.division:
        return None
    return difference(result.values, other.values)


def _searches(table: TableFile, results: Results) -> Iterator[str]:
    """Yield the page's lines on the settings that ``--search`` has found; none without any."""
    rows = []
    for (name, column), result in results.items():
        found = result.cell.found
        if found:
            settings = ", ".join(f"{key} = {value}" for key, value in found.settings.items())
            value = f"{found.value:.{result.decimals}f}"
            rows.append([name, column, settings, value, str(found.trials), str(found.failed)])
    if not rows:
        return
    seeds = ", ".join(map(str, table.trial_seeds))
    yield ""
    yield "## The search"
    yield ""
    yield f"{SEARCHED} {table.trials} trials for each cell, of seed {seeds}."
    yield ""
    heads = ("", "column", "chosen", "on validation data", "trials", "failed")
    yield from Table(heads, rows).as_markdown()


def as_dict(table: TableFile, results: Results) -> dict[str, Any]:
    """Return a table and its results for JSON (docs/reference/commands.schema.json)."""
    cells = []
    for (row, column), result in results.items():
        gain = _gain(table, row, column, results)
        search = None
        if result.cell.found:
            search = asdict(result.cell.found)
            search |= {"seeds": list(table.trial_seeds), "chosen-on": "validation"}
        estimate = None
        if result.values:
            estimate = Estimate.of(result.values.values()).as_dict()
        cells.append(
            {
                "row": row,
                "column": column,
                "state": result.state,
                "reason": result.reason,
                "figure": result.figure,
                "paper": table.rows[row].paper.get(column, ""),
                "values": {str(seed): value for seed, value in result.values.items()},
                "estimate": estimate,
                "difference": gain.as_dict(test=True) if gain else None,
                "search": search,
            }
        )
    return {
        "name": table.name,
        "title": table.title,
        "note": table.note,
        "against": table.against,
        "cells": cells,
    }


def csv_of_seeds(results: Results) -> str:
    """Return a line per row, column and seed: what pandas, R and plots take."""
    rows = [["row", "column", "seed", "figure", "value"]]
    for (name, column), result in results.items():
        for seed, value in result.values.items():
            rows.append([name, column, str(seed), result.figure, f"{value:.6g}"])
    return as_csv(rows)

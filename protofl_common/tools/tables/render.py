"""A table as Markdown, LaTeX and CSV: our figures beside the paper's."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from protofl_common.runs.figures import Table, as_csv
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.tables.figure import COUNTS, NoFigure
from protofl_common.tools.tables.groups import (
    ABOUT_COSTS,
    ABOUT_P,
    COSTS,
    ESTIMATED,
    SIGNIFICANT,
    Estimate,
    Estimated,
    cost_cells,
    difference,
    estimate_rows,
    holm,
)
from protofl_common.tools.tables.plan import Cell, Runs
from protofl_common.tools.tables.spec import TableFile

SEARCHED = (
    "The settings were chosen on validation data, by trials that no row has more of; "
    "test data chose none."
)
DIFFERENCES = (
    f"Differences at the same seeds: their mean, and its 95 % interval (Student's t). {ABOUT_P}"
)
MARK = "†"  # behind a figure whose runs warn of something
ABOUT_BOLD = (
    f"Bold: better than every other row of the column, p < {SIGNIFICANT:g} (paired t-test over the "
    "seeds, corrected after Holm)."
)


@dataclass(frozen=True)
class Result:
    """What the runs of a cell have come to so far."""

    cell: Cell
    values: dict[int, float]  # seed -> figure
    state: str  # done, failed, skipped, open (not all runs made yet)
    reason: str  # why it failed, or was skipped: no data here, or no such figure of the algorithm
    figure: str  # its name, with what a reader must know of it
    costs: Sequence[str] = ()  # what its finished runs cost, the cells of `COSTS`; () without any
    warned: Mapping[str, Sequence[int]] = field(default_factory=dict)  # warning -> its seeds

    @property
    def decimals(self) -> int:
        return self.cell.figure.digits

    @property
    def text(self) -> str:
        """The cell's text: mean and deviation over the seeds, such as ``97.58 ± 0.05``.

        As long as some seeds are missing, it also says how many there are; without any figure it is
        a sign for the state, or its name. A `MARK` follows the figure where a run warns of
        something, such as failed replies.
        """
        if not self.values:
            return {"open": "…", "skipped": "–"}.get(self.state, self.state)
        figures = list(self.values.values())
        text = f"{statistics.fmean(figures):.{self.decimals}f}"
        if len(figures) > 1:
            deviation = statistics.stdev(figures)
            text += f" ± {deviation:.{self.decimals}f}"
        if self.warned:
            text += f" {MARK}"
        wanted = len(self.cell.runs)
        if len(figures) == wanted:
            return text
        failed = ", others failed" if self.state == "failed" else ""
        return f"{text} ({len(figures)} of {wanted} seeds{failed})"

    @property
    def can_be_compared(self) -> bool:
        """True if the cell has figures, and the larger one is the better.

        That is not so for counts, and for the deviation over clients.
        """
        figure = self.cell.figure
        return bool(self.values) and figure.what not in COUNTS and figure.over != "std"

    def lead_over(self, other: "Result") -> Estimate | None:
        """Estimate how much larger this figure is than that of another cell at the same seeds.

        Return None if one of them has no figures, and if their data are not divided in the same
        way.
        """
        if not self.values or not other.values:
            return None
        run = self.cell.first_run
        of_other = other.cell.first_run
        have_same_data = run.settings.data == of_other.settings.data
        clients = "num-supernodes"
        have_as_many_clients = run.federation[clients] == of_other.federation[clients]
        if not have_same_data or not have_as_many_clients:
            return None
        return difference(self.values, other.values)


Place = tuple[str, str]  # row and column
Results = dict[Place, Result]
NAMES_OF_A_CELL = (0, 1)  # the first columns of a table with a row for each cell: words, no numbers


def result_of(cell: Cell, runs: Runs) -> Result:
    """Read what the runs of a cell have come to so far.

    The cell has failed if one of its runs has; otherwise it is skipped if it has no runs, or a
    finished one lacks the figure.
    """
    values = {}
    folders = []
    failures = []
    absent = [cell.skipped] if cell.skipped else []  # why there is no figure
    figures = []  # how the figure is described for each run
    warned: dict[str, list[int]] = {}
    for seed, run in cell.runs.items():
        if not runs.finished(run):
            if run.name in runs.failed:
                failures.append(f"seed {seed}: {runs.failed[run.name]}")
            continue
        folder = runs.folder_of(run)
        try:
            values[seed], name = cell.figure.measured(folder)
        except NoFigure as error:
            absent.append(str(error))
            continue
        figures.append(name)
        folders.append(folder)
        for warning in RunFolder(folder).finished_summary()["warnings"]:
            warned.setdefault(warning, []).append(seed)

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
        costs=cost_cells(folders) if folders else (),
        warned=warned,
    )


def cells_of(table: TableFile, results: Results) -> Table:
    """Return the table itself: our figures, and beside them the paper's if any row has some.

    In each column the best of ours is bold, if it is not so by chance (`ABOUT_BOLD`).
    """
    has_paper = any(row.paper for row in table.rows.values())
    heads = [""]
    for column in table.columns:
        heads.append(column)
        if has_paper:
            heads.append("paper")

    rows = []
    bold = []  # (row, column) of the texts
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
    notes = [table.note, *_notes(results)]
    if any(result.warned for result in results.values()):
        notes.append(f"{MARK}: the runs of the cell warn of something.")
    if bold:
        notes.append(ABOUT_BOLD)
    return Table(heads, rows, "\n".join(note for note in notes if note), bold=bold)


def _is_best(result: Result, column: str, results: Results) -> bool:
    """Return whether a finished cell is better than every other of its column, and not by chance.

    It is, if all differences are above 0 and their p-values, corrected after Holm, below
    `SIGNIFICANT`. Another cell that is not finished, or has failed, is compared by the runs that it
    has. False also if the column has no other cell that can be compared.
    """
    if result.state != "done" or not result.can_be_compared:
        return False
    p_values = {}
    for (name, where), other in results.items():
        if where != column or other is result or not other.can_be_compared:
            continue
        lead = result.lead_over(other)
        if lead is None or lead.mean <= 0 or math.isnan(lead.p):  # p of one seed is NaN
            return False
        p_values[name] = lead.p
    corrected = holm(p_values)
    return bool(corrected) and max(corrected.values()) < SIGNIFICANT


def markdown(table: TableFile, results: Results) -> str:
    """Return a table's page in Markdown.

    It has the cells, what was measured, notes, the differences, the costs, and the search.
    """
    lines = [f"# {table.title}", ""]
    for text in (table.source, table.note):
        if text:
            lines += [text, ""]
    figures = ", ".join(dict.fromkeys(result.figure for result in results.values()))  # each once
    lines += [
        *cells_of(table, results).as_markdown(),
        "",
        f"Ours, of test data unless it says otherwise: {figures or 'nothing'}; "
        "mean ± sample standard deviation over the seeds.",
    ]
    if "chosen on test data" in figures:
        lines.append("What was chosen on test data is too good: it was picked by what it reports.")
    lines += ["", *_notes(results)]
    sections = [("What it costs", costs(table, results)), ("The search", _searches(table, results))]
    if table.against:
        compared = replace(differences(table, results), note=DIFFERENCES)
        sections.insert(0, (f"Against {table.against}", compared))
    for heading, content in sections:
        if content.rows:
            lines += ["", f"## {heading}", "", content.note, "", *content.as_markdown()]
    return "\n".join(lines) + "\n"


def _notes(results: Results) -> list[str]:
    """Return lines that say why cells have no figure, and what their runs warn of.

    A note that holds for several columns of a row stands on one line.
    """
    columns_of: dict[tuple[str, str], list[str]] = {}  # row and note -> columns
    for (name, column), result in results.items():
        notes = [f"{result.state}: {result.reason}"] if result.reason else []
        for warning, seeds in result.warned.items():
            notes.append(f"warning: seed {', '.join(map(str, seeds))}: {warning}")
        for note in notes:
            columns_of.setdefault((name, note), []).append(column)

    lines = []
    for (name, note), columns in columns_of.items():
        lines.append(f"- {name} ({', '.join(columns)}): {note}")
    return lines


def differences(table: TableFile, results: Results) -> Table:
    """Return the table of differences: each cell's mean, and its gain over the reference.

    The reference is the cell in the same column of the row that the table names as ``against``.
    Cells without figures are left out.
    """
    entries = []
    for place, result in results.items():
        if result.values:
            gain = _gain_over_reference(table, place, results)
            entry = Estimated(
                names=list(place),
                figures=result.values.values(),  # of all seeds
                digits=result.decimals,
                gain=gain,
            )
            entries.append(entry)
    heads = ("", "column", *ESTIMATED)
    return Table(heads, estimate_rows(entries), table.note, words=NAMES_OF_A_CELL)


def costs(table: TableFile, results: Results) -> Table:
    """Return the table of costs: what the finished runs of each cell have cost on average."""
    rows = []
    for place, result in results.items():
        if result.costs:
            rows.append([*place, *result.costs])
    return Table(("", "column", *COSTS), rows, ABOUT_COSTS, words=NAMES_OF_A_CELL)


def _gain_over_reference(table: TableFile, place: Place, results: Results) -> Estimate | None:
    """Estimate how much a cell's figure is above that of the row ``against`` in the same column.

    Return None for the row ``against`` itself, and if the two cells cannot be compared.
    """
    row, column = place
    other = results.get((table.against, column))
    if other is None or row == table.against:
        return None
    return results[place].lead_over(other)


def _searches(table: TableFile, results: Results) -> Table:
    """Return the table of the settings that ``--search`` has found."""
    rows = []
    for place, result in results.items():
        found = result.cell.found
        if found:
            settings = ", ".join(f"{key} = {value}" for key, value in found.settings.items())
            value = f"{found.value:.{result.decimals}f}"
            rows.append([*place, settings, value, str(table.trials), str(found.failed)])
    seeds = ", ".join(map(str, table.trial_seeds))
    note = f"{SEARCHED} {table.trials} trials for each cell, of seed {seeds}."
    heads = ("", "column", "chosen", "on validation data", "trials", "failed")
    return Table(heads, rows, note)


def as_dict(table: TableFile, results: Results) -> dict[str, Any]:
    """Return a table and its results for JSON (docs/reference/commands.schema.json)."""
    cells = []
    for (row, column), result in results.items():
        gain = _gain_over_reference(table, (row, column), results)
        search = None
        if result.cell.found:
            trials = {"trials": table.trials, "seeds": list(table.trial_seeds)}
            search = {**asdict(result.cell.found), **trials, "chosen-on": "validation"}
        figures = result.values.values()
        cells.append(
            {
                "row": row,
                "column": column,
                "state": result.state,
                "reason": result.reason,
                "figure": result.figure,
                "paper": table.rows[row].paper.get(column, ""),
                "values": {str(seed): value for seed, value in result.values.items()},
                "estimate": Estimate.of(figures).as_dict() if figures else None,
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
    """Return the figures as CSV with a line for each row, column and seed.

    That is the form which pandas, R and programs for plots take.
    """
    rows = [["row", "column", "seed", "figure", "value", "warnings"]]
    for place, result in results.items():
        for seed, value in result.values.items():
            warnings = [warning for warning, seeds in result.warned.items() if seed in seeds]
            figure = (result.figure, f"{value:.10g}")
            rows.append([*place, str(seed), *figure, "; ".join(warnings)])
    return as_csv(rows)

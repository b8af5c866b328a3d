"""A table as Markdown, LaTeX and CSV: ours beside the paper's, mean ± sample standard deviation over seeds."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from protofl_common.runs.figures import Table, as_csv
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.groups import ESTIMATED, Estimate, difference, estimated
from protofl_common.tools.tables.figure import COUNTS, NoFigure
from protofl_common.tools.tables.plan import Cell, Found, Runs
from protofl_common.tools.tables.spec import TableFile

SEARCHED = "The settings were chosen on validation data, by trials that no row has more of; test data chose none."
DIFFERENCES = (
    "Differences at the same seeds: their mean, its 95 % interval (Student's t), and the p of a two-sided paired "
    "t-test, of each comparison alone."
)


@dataclass(frozen=True)
class Result:
    values: dict[int, float]  # seed -> figure
    wanted: int  # number of seeds asked for
    state: str  # done, failed, skipped, open (not all runs made yet)
    reason: str  # why it failed, or was skipped: data that are not here, or a figure that the algorithm does not have
    figure: str
    decimals: int = 2
    rank: float | None = None  # the mean of a finished cell whose largest figure is the best
    found: Found | None = None
    division: object = None  # of the data among how many clients: results of another one are not paired
    warnings: tuple[str, ...] = ()  # of the runs, each once, with its seeds

    @property
    def text(self) -> str:
        """``97.58 ± 0.05``; with fewer seeds than wanted, how many there are; else the state."""
        if not self.values:
            return {"open": "…", "skipped": "–"}.get(self.state, self.state)
        text = f"{statistics.fmean(self.values.values()):.{self.decimals}f}"
        if len(self.values) > 1:
            text += f" ± {statistics.stdev(self.values.values()):.{self.decimals}f}"
        if len(self.values) < self.wanted:
            failed = ", others failed" if self.state == "failed" else ""
            text += f" ({len(self.values)} of {self.wanted} seeds{failed})"
        return text


Results = dict[tuple[str, str], Result]


def result_of(cell: Cell, runs: Runs) -> Result:
    decimals = cell.figure.digits
    if cell.skipped:
        return Result({}, 0, "skipped", cell.skipped, str(cell.figure), decimals)
    values, reasons, absent, on, warnings = {}, [], dict[str, None](), dict[str, None](), dict[str, list[str]]()
    for seed, run in cell.runs.items():
        try:
            if runs.finished(run):
                values[seed] = cell.figure.read(folder := runs.folder_of(run))
                on[cell.figure.described(folder)] = None
                for warning in RunFolder(folder).finished_summary().get("warnings", []):
                    warnings.setdefault(warning, []).append(str(seed))
            elif run.name in runs.failed:
                reasons.append(f"seed {seed}: {runs.failed[run.name]}")
        except NoFigure as error:
            absent[str(error)] = None
    state = "failed" if reasons else "skipped" if absent else "done" if len(values) == len(cell.runs) else "open"
    figure = " or ".join(on) or str(cell.figure)
    division = [(run.settings.data, run.federation["num-supernodes"]) for run in cell.runs.values()][:1]
    reason, wanted = "; ".join([*reasons, *absent]), len(cell.runs)
    ranked = state == "done" and cell.figure.what not in COUNTS and cell.figure.over != "std"
    rank = round(statistics.fmean(values.values()), decimals) if ranked else None
    noted = tuple(f"seed {', '.join(seeds)}: {warning}" for warning, seeds in warnings.items())
    return Result(values, wanted, state, reason, figure, decimals, rank, cell.found, division, noted)


def cells_of(table: TableFile, results: Results) -> Table:
    beside = ("paper",) if any(row.paper for row in table.rows.values()) else ()
    rows, bold = [], []
    for number, (name, row) in enumerate(table.rows.items()):
        texts = [name]
        for column in table.columns:
            result = results.get((name, column))
            ranks = [other.rank for (_, where), other in results.items() if where == column and other.rank is not None]
            bold += [(number, len(texts))] if result and len(ranks) > 1 and result.rank == max(ranks) else []
            texts += [result.text if result else "–", *(row.paper.get(column, "") for _ in beside)]
        rows.append(texts)
    return Table(["", *(text for column in table.columns for text in (column, *beside))], rows, table.note, bold=bold)


def markdown(table: TableFile, results: Results) -> str:
    notes: dict[tuple[str, str], list[str]] = {}
    for (name, column), result in results.items():
        reason = [f"{result.state}: {result.reason}"] if result.reason else []
        for note in (*reason, *(f"warning: {warning}" for warning in result.warnings)):
            notes.setdefault((name, note), []).append(column)
    figures = ", ".join(dict.fromkeys(result.figure for result in results.values()))
    ours = f"Ours, of test data unless it says otherwise: {figures or 'nothing'}"
    lines = [f"# {table.title}", "", *(line for text in (table.source, table.note) if text for line in (text, ""))]
    lines += [*cells_of(table, results).as_markdown(), "", f"{ours}; mean ± sample standard deviation over the seeds."]
    if "chosen on test data" in figures:
        lines.append("What was chosen on test data is too good: it was picked by what it reports.")
    if table.trials and not any(result.found for result in results.values()):
        lines.append("The settings are those of the table's file; --search looks for better ones.")
    lines += [""] if notes else []
    rows: dict[tuple[str, str], list[str]] = {}  # that share a note say it once
    for (name, note), columns in notes.items():
        rows.setdefault((", ".join(columns), note), []).append(name)
    lines += [f"- {', '.join(names)} ({columns}): {note}" for (columns, note), names in rows.items()]
    if table.against:
        lines += ["", f"## Against {table.against}", "", DIFFERENCES, "", *differences(table, results).as_markdown()]
    return "\n".join([*lines, *_searches(table, results)]) + "\n"


def differences(table: TableFile, results: Results) -> Table:
    """A row for each cell, with n, and how much more it is than the row ``against`` of its column."""
    shown = [(place, result, _beyond(table, *place, results)) for place, result in results.items() if result.values]
    rows = [[*place, *estimated(result.values.values(), than, result.decimals)] for place, result, than in shown]
    for row, (_, result, than) in zip(rows, shown, strict=True):
        row[2] += f" ({than.n} paired)" if than and than.n < len(result.values) else ""
    return Table(("", "column", *ESTIMATED), rows, table.note, words=(0, 1))


def _beyond(table: TableFile, row: str, column: str, results: Results) -> Estimate | None:
    """How much more it is than the row ``against``, over the seeds that both have; None where there is none."""
    result, other = results[row, column], results.get((table.against, column))
    if other is None or row == table.against or result.division != other.division:
        return None
    return difference(result.values, other.values)


def _searches(table: TableFile, results: Results) -> Iterator[str]:
    rows = []
    for place, result in results.items():
        if search := result.found:
            settings = ", ".join(f"{key} = {value}" for key, value in search.settings.items())
            value = f"{search.value:.{result.decimals}f}"
            rows.append([*place, settings, value, str(search.trials), str(search.failed)])
    if rows:
        seeds = ", ".join(map(str, table.trial_seeds))
        yield from ("", "## The search", "", f"{SEARCHED} {table.trials} trials for each cell, of seed {seeds}.", "")
        yield from Table(("", "column", "chosen", "on validation data", "trials", "failed"), rows).as_markdown()


def as_dict(table: TableFile, results: Results) -> dict[str, Any]:
    chosen = {"seeds": list(table.trial_seeds), "chosen-on": "validation"}
    cells = [
        {
            "row": row,
            "column": column,
            "state": result.state,
            "reason": result.reason,
            "figure": result.figure,
            "paper": table.rows[row].paper.get(column, ""),
            "values": {str(seed): value for seed, value in result.values.items()},
            "estimate": Estimate.of(result.values.values()).as_dict() if result.values else None,
            "difference": than.as_dict(test=True) if (than := _beyond(table, row, column, results)) else None,
            "search": asdict(result.found) | chosen if result.found else None,
        }
        for (row, column), result in results.items()
    ]
    return {"name": table.name, "title": table.title, "note": table.note, "against": table.against, "cells": cells}


def csv_of_cells(table: TableFile, results: Results) -> str:
    rows = [["row", "column", "state", "mean", "std", "seeds", "paper", "figure", "values", "reason", "chosen"]]
    for name, row in table.rows.items():
        for column in table.columns:
            result = results.get((name, column)) or Result({}, 0, "paper only", "", "")
            numbers = [*result.values.values()]
            mean = f"{statistics.fmean(numbers):.4f}" if numbers else ""
            std = f"{statistics.stdev(numbers):.4f}" if len(numbers) > 1 else ""
            values = " ".join(f"{seed}:{value:.4f}" for seed, value in result.values.items())
            chosen = json.dumps({**asdict(result.found), "chosen-on": "validation"}) if result.found else ""
            middle = [result.state, mean, std, str(len(numbers)), row.paper.get(column, "")]
            rows.append([name, column, *middle, result.figure, values, result.reason, chosen])
    return as_csv(rows)


def csv_of_seeds(results: Results) -> str:
    """A line per row, column and seed: what pandas, R and plots take."""
    rows = [["row", "column", "seed", "figure", "value"]]
    for place, result in results.items():
        rows += [[*place, str(seed), result.figure, f"{value:.6g}"] for seed, value in result.values.items()]
    return as_csv(rows)

"""A table as Markdown and CSV: ours beside the paper's, mean ± sample standard deviation over seeds."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from protofl_common.config.options import Scalar
from protofl_common.tools.groups import Estimate
from protofl_common.tools.tables.execute import Runs
from protofl_common.tools.tables.metrics import COUNTS, NoFigure
from protofl_common.tools.tables.plan import Cell, Found
from protofl_common.tools.tables.spec import TableFile

SEARCHED = "The settings were chosen on validation data, by trials that no row has more of; test data chose none."
DIFFERENCE = "difference of two rows"
DIFFERENCES = (
    "Differences at the same seeds: their mean, its 95 % interval (Student's t), and the p of a two-sided paired "
    "t-test, of each comparison alone."
)


@dataclass(frozen=True)
class Result:
    """The content of a cell."""

    values: dict[int, float]
    """Seed -> figure."""
    wanted: int
    """Number of seeds asked for."""
    state: str
    """done, failed, skipped, open (not all runs made yet)."""
    reason: str
    """Why it failed, or was skipped: data that are not here, or a figure that the algorithm does not have."""
    figure: str
    decimals: int = 2
    found: Found | None = None
    division: object = None
    """Of the data among how many clients, but for the seed: results of another one are not paired."""

    def beyond(self, other: Result) -> Estimate | None:
        """How much more it is, over the seeds that both have; None where there is none."""
        values = [value - other.values[seed] for seed, value in self.values.items() if seed in other.values]
        return Estimate.of(values) if values and self.division == other.division else None

    @property
    def text(self) -> str:
        """``97.58 ± 0.05``; with fewer seeds than wanted, how many there are; else the state."""
        if not self.values:
            return {"open": "…", "skipped": "–"}.get(self.state, self.state)
        numbers = list(self.values.values())
        text = f"{statistics.fmean(numbers):.{self.decimals}f}"
        if len(numbers) > 1:
            text += f" ± {statistics.stdev(numbers):.{self.decimals}f}"
        if len(numbers) < self.wanted:
            text += f" ({len(numbers)} of {self.wanted} seeds" + (", others failed)" if self.state == "failed" else ")")
        return text


Results = dict[tuple[str, str], Result]


def collect(table: TableFile, cells: list[Cell], runs: Runs) -> Results:
    """(row, column) -> result, for the cells that are in the plan and the rows that are differences of two of them."""
    results = {(cell.row, cell.column): _result(cell, runs) for cell in cells}
    for name, row in table.rows.items():
        for column in table.columns if row.minus else ():
            pair = [results.get((other, column)) for other in row.minus or ()]
            if pair[0] and pair[1]:
                results[name, column] = _difference(pair[0], pair[1])
    return results


def markdown(table: TableFile, results: Results, overrides: dict[str, Scalar]) -> str:
    """The whole document."""
    notes: dict[tuple[str, str], list[str]] = {}
    beside = ("paper",) if any(row.paper for row in table.rows.values()) else ()
    header = ["", *(text for column in table.columns for text in (column, *beside))]
    lines = [f"# {table.title}", ""]
    lines += [f"{table.source}", ""] if table.source else []
    lines += [f"{table.note}", ""] if table.note else []
    lines += _heads(header)
    for name, row in table.rows.items():
        texts = [name]
        for column in table.columns:
            result = results.get((name, column))
            texts += [result.text if result else "–", *(row.paper.get(column, "") for _ in beside)]
            if result and result.reason:
                notes.setdefault((name, f"{result.state}: {result.reason}"), []).append(column)
        lines.append(_line(texts))
    figures = ", ".join(dict.fromkeys(result.figure for result in results.values()))
    ours = f"Ours, of test data unless it says otherwise: {figures or 'nothing'}"
    lines += ["", f"{ours}; mean ± sample standard deviation over the seeds."]
    if any("chosen on test data" in result.figure for result in results.values()):
        lines.append("What was chosen on test data is too good: it was picked by what it reports.")
    if table.trials and not any(result.found for result in results.values()):
        lines.append("The settings are those of the table's file; --search looks for better ones.")
    if overrides:
        said = ", ".join(f"{key} = {value}" for key, value in overrides.items())
        lines.append(f"All runs with {said}.")
    lines += [""] if notes else []
    lines += [f"- {name} ({', '.join(columns)}): {note}" for (name, note), columns in notes.items()]
    lines += [*_differences(table, results), *_searches(table, results)]
    return "\n".join(lines) + "\n"


def _differences(table: TableFile, results: Results) -> Iterator[str]:
    """How much more than the row ``against`` the others have."""
    if not table.against:
        return
    yield from ("", f"## Against {table.against}", "", DIFFERENCES, "")
    yield from _heads(["", "column", "n", "mean", "95 % interval", "difference", "95 % interval", "p"])
    for (row, column), result in results.items():
        if result.values and not (table.rows[row].minus):
            one, than = Estimate.of(list(result.values.values())), _beyond_against(table, row, column, results)
            more = [f"{than.mean:+.2f}", than.interval, than.p_value] if than else ["–"] * 3
            yield _line([row, column, str(one.n), f"{one.mean:.2f}", one.interval, *more])


def _beyond_against(table: TableFile, row: str, column: str, results: Results) -> Estimate | None:
    first = results.get((table.against, column))
    return results[row, column].beyond(first) if first and row != table.against else None


def _searches(table: TableFile, results: Results) -> Iterator[str]:
    """The result of ``--search``."""
    if not any(result.found for result in results.values()):
        return
    seeds = ", ".join(map(str, table.trial_seeds))
    yield from ("", "## The search", "", f"{SEARCHED} {table.trials} trials for each cell, of seed {seeds}.", "")
    yield from _heads(["", "column", "chosen", "on validation data", "trials", "failed"])
    for (row, column), result in results.items():
        if found := result.found:
            chosen = ", ".join(f"{key} = {value}" for key, value in found.settings.items())
            yield _line([row, column, chosen, f"{found.value:.2f}", str(found.trials), str(found.failed)])


def as_dict(table: TableFile, results: Results) -> dict[str, Any]:
    """For JSON: an entry for each cell."""
    return {
        "name": table.name,
        "title": table.title,
        "note": table.note,
        "against": table.against,
        "cells": [_cell_as_dict(table, row, column, results) for row, column in results],
    }


def _cell_as_dict(table: TableFile, row: str, column: str, results: Results) -> dict[str, Any]:
    result, than = results[row, column], _beyond_against(table, row, column, results)
    return {
        "row": row,
        "column": column,
        "state": result.state,
        "reason": result.reason,
        "figure": result.figure,
        "paper": table.rows[row].paper.get(column, ""),
        "values": {str(seed): value for seed, value in result.values.items()},
        "estimate": Estimate.of(list(result.values.values())).as_dict() if result.values else None,
        "difference": than and {**than.as_dict(), "p": than.p if than.n > 1 else None},
        "search": result.found
        and {**asdict(result.found), "seeds": list(table.trial_seeds), "chosen-on": "validation"},
    }


def as_csv(table: TableFile, results: Results) -> str:
    """A line per row and column."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "state", "mean", "std", "seeds", "paper", "figure", "values", "reason", "chosen"])
    for name, row in table.rows.items():
        for column in table.columns:
            result, paper = results.get((name, column)), row.paper.get(column, "")
            if result is None:
                writer.writerow([name, column, "paper only", "", "", 0, paper, "", "", "", ""])
                continue
            numbers = list(result.values.values())
            mean = f"{statistics.fmean(numbers):.4f}" if numbers else ""
            std = f"{statistics.stdev(numbers):.4f}" if len(numbers) > 1 else ""
            values = " ".join(f"{seed}:{value:.4f}" for seed, value in result.values.items())
            chosen = json.dumps({**asdict(result.found), "chosen-on": "validation"}) if result.found else ""
            tail = [len(numbers), paper, result.figure, values, result.reason, chosen]
            writer.writerow([name, column, result.state, mean, std, *tail])
    return text.getvalue()


def as_long_csv(results: Results) -> str:
    """A line per row, column and seed: what pandas, R and plots take."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "seed", "figure", "value"])
    for (row, column), result in results.items():
        writer.writerows([row, column, seed, result.figure, f"{value:.6g}"] for seed, value in result.values.items())
    return text.getvalue()


def drawn(table: TableFile, results: Results) -> str:
    """A line per row over the columns in their order, with the standard deviation over the seeds: the SVG of a file."""
    from protofl_common.report.figures.drawing import as_file, canvas, draw, legend_below, line_style, short

    with canvas(6.4, 4.0) as (figure, axes):
        for index, row in enumerate(table.rows):
            cells = [results.get((row, column)) for column in table.columns]
            there = {at: list(cell.values.values()) for at, cell in enumerate(cells) if cell and cell.values}
            means = [statistics.fmean(values) for values in there.values()]
            spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in there.values()]
            if there:
                style = line_style(index, len(there))
                axes.errorbar(list(there), means, yerr=spread, capsize=3, label=row, **style)
        axes.set_xticks(range(len(table.columns)), [short(name, 20) for name in table.columns])
        figures = dict.fromkeys(one.figure for one in results.values() if one.values)
        axes.set_ylabel(short(", ".join(figures), 50))
        legend_below(axes, 2)
        return as_file(draw(figure, "table", table.title, "Means over the seeds, with their standard deviations."))


def _result(cell: Cell, runs: Runs) -> Result:
    decimals = 1 if cell.figure.what in COUNTS else 2
    if cell.skipped:
        return Result({}, 0, "skipped", cell.skipped, str(cell.figure), decimals)
    values, reasons, absent, on = {}, [], dict[str, None](), dict[str, None]()
    for seed, run in cell.runs.items():
        try:
            if runs.finished(run):
                values[seed] = cell.figure.read(runs.folder_of(run))
                on[cell.figure.chosen_on(runs.folder_of(run))] = None
            elif run.name in runs.failed:
                reasons.append(f"seed {seed}: {runs.failed[run.name]}")
        except NoFigure as error:
            absent[str(error)] = None
    state = "failed" if reasons else "skipped" if absent else "done" if len(values) == len(cell.runs) else "open"
    chosen = " and ".join(f"{name} data" for name in on if name)
    figure = f"{cell.figure}, its round chosen on {chosen}" if chosen else str(cell.figure)
    division = [(run.settings.data, run.federation["num-supernodes"]) for run in cell.runs.values()][:1]
    return Result(values, len(cell.runs), state, "; ".join([*reasons, *absent]), figure, decimals, cell.found, division)


def _difference(more: Result, less: Result) -> Result:
    """Seed by seed, where both have a figure."""
    values = {seed: value - less.values[seed] for seed, value in more.values.items() if seed in less.values}
    state = "done" if values and len(values) == more.wanted else "skipped" if not more.wanted else "open"
    return Result(values, more.wanted, state, "", DIFFERENCE, more.decimals)


def _heads(names: list[str]) -> list[str]:
    return [_line(names), _line(["---", *["---:"] * (len(names) - 1)])]


def _line(texts: list[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

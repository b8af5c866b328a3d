"""The index over runs and tables, to publish: the rows of each table and each column, and groups of runs of different
seeds by their data, the best first. One file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from protofl_common.basics.files import write_text
from protofl_common.config.options import SettingsError
from protofl_common.report.page import Html, framed, table
from protofl_common.tools.groups import Estimate, Group, grouped, named
from protofl_common.tools.tables.metrics import COUNTS
from protofl_common.tools.tables.render import DIFFERENCE, DIFFERENCES, SEARCHED

MAIN = ("dataset", "partition", "clients")
HEADS = ("", "n", "mean, %", "95 % interval", "figure", "runs")
OF_TABLE = ("", "n", "mean", "95 % interval", "difference", "95 % interval", "p", "paper", "figure")
LESS_IS_BETTER = {"std", *COUNTS}
FILES = {".md": "table", ".csv": "CSV", ".long.csv": "CSV of each seed", ".json": "JSON", ".svg": "figure"}
NOTE = (
    "Means over n runs of different seeds, and the 95 % interval of each (Student's t): where intervals overlap, the "
    "order may be chance. Of runs that are in no table it is the mean test accuracy over the clients after the last "
    "round; what their settings were chosen on, the files of a run do not say."
)


def write_index(path: Path, runs: Sequence[Path], folder: Path) -> Path:
    """Write the page over finished runs, and the tables in ``folder`` or ``folder``/tables; its path.

    SettingsError where there are none, or it cannot be written.
    """
    tables = sorted(_tables(folder), key=lambda found: not any(cell["search"] for cell in found[1]["cells"]))
    if not runs and not tables:
        raise SettingsError("--html: there is no finished run to show, and no table")
    sections: dict[str, list[Group]] = {}
    for group in grouped(runs, None):
        sections.setdefault(json.dumps(group.data, sort_keys=True), []).append(group)
    shown = [_table_section(file, content, path.parent) for file, content in tables]
    shown += [_section(list(named(groups)), list(sections.values()), path.parent) for groups in sections.values()]
    try:
        write_text(path, framed("Results", f"tables: {len(tables)} · finished runs: {len(runs)}", shown, NOTE))
    except OSError as error:
        raise SettingsError(f"--html {path}: cannot be written: {error}") from None
    return path


def _tables(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files that ``protofl table`` has left, and their content."""
    for file in sorted([*folder.glob("*.json"), *folder.glob("tables/*.json")]):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and {"name", "title", "against", "cells"} <= found.keys():
            yield file, found


def _table_section(file: Path, content: dict[str, Any], beside: Path) -> tuple[str, str]:
    """Links to its files, and a ranking for each column."""
    files = {file.with_suffix(suffix): name for suffix, name in FILES.items()}
    said = " · ".join(_link(one, name, beside) for one, name in files.items() if one.exists())
    said += f". Compared with {escape(content['against'])}. {DIFFERENCES}" if content["against"] else ""
    said += f" {SEARCHED}" if any(cell["search"] for cell in content["cells"]) else ""
    notes = [f'<p class="note">{text}</p>' for text in (said, escape(content.get("note", ""))) if text]
    columns: dict[str, list[dict[str, Any]]] = {}
    for cell in content["cells"]:
        if cell["figure"] != DIFFERENCE:
            columns.setdefault(cell["column"], []).append(cell)
    rankings = "".join(_ranking(name, cells) for name, cells in columns.items())
    return f"{content['name']}: {content['title']}", "".join(notes) + rankings


def _ranking(name: str, cells: list[dict[str, Any]]) -> str:
    """The cells of a column, without what none of them has; which figure each shows stands above, or in its row."""
    figures = list(dict.fromkeys(cell["figure"] for cell in cells if cell["estimate"]))
    rows = [[*_row_of(cell), cell["figure"] if figures[1:] else "–"] for cell in sorted(cells, key=_place)]
    shown = [at for at in range(len(OF_TABLE)) if at < 4 or any(row[at] != "–" for row in rows)]
    return table(
        [OF_TABLE[at] for at in shown],
        [[row[at] for at in shown] for row in rows],
        f"{name}: {', '.join(figures) or 'nothing yet'}",
    )


def _place(cell: dict[str, Any]) -> float:
    """In a ranking: the best first, what has no figure last."""
    if not cell["estimate"]:
        return math.inf
    less = not LESS_IS_BETTER.isdisjoint(cell["figure"].replace(",", "").split())
    return float(cell["estimate"]["mean"]) * (1 if less else -1)


def _row_of(cell: dict[str, Any]) -> list[str]:
    """The columns under `OF_TABLE`, but for the figure."""
    one, than = (told and Estimate.from_dict(told) for told in (cell["estimate"], cell["difference"]))
    number = f"{one.n if one else 0}{'' if cell['state'] == 'done' else ', ' + cell['state']}"
    figures = [f"{one.mean:.2f}", one.interval] if one else ["–"] * 2
    beyond = [f"{than.mean:+.2f}", than.interval, than.p_value] if than else ["–"] * 3
    return [cell["row"], number, *figures, *beyond, cell["paper"] or "–"]


def _section(groups: list[Group], sections: list[list[Group]], beside: Path) -> tuple[str, str]:
    """Its title and its table."""
    data = groups[0].data
    title = [str(data[key]) for key in MAIN[:2] if key in data] + [f"{data['clients']} clients"]
    alike = [other[0].data for other in sections if all(other[0].data[key] == data[key] for key in MAIN if key in data)]
    title += [f"{key} {value}" for key, value in data.items() if any(other.get(key) != value for other in alike)]
    best_first = sorted(groups, key=lambda group: -Estimate.of(list(group.values.values())).mean)
    return " · ".join(title), table(HEADS, [_row(group, beside) for group in best_first], "")


def _row(group: Group, beside: Path) -> list[str]:
    one = Estimate.of(list(group.values.values()))
    return [group.name, str(one.n), f"{one.mean:.2f}", one.interval, group.figure, _links(group, beside)]


def _links(group: Group, beside: Path) -> Html:
    """To the pages of its runs, by seed, where they lie below the index."""
    runs = sorted(group.runs.items())
    return Html(", ".join(_link(folder / "report.html", str(seed), beside) for seed, folder in runs))


def _link(file: Path, text: str, beside: Path) -> str:
    """To a file below the index; else the text alone."""
    place = Path(os.path.relpath(file, beside))
    linked = file.exists() and ".." not in place.parts
    return f'<a href="{escape(place.as_posix())}">{escape(text)}</a>' if linked else escape(text)

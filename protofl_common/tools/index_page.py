"""The index over runs: for each division of data a table of groups of seeds, the best first. One file, to publish."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from protofl_common.config.options import SettingsError
from protofl_common.files import write_text
from protofl_common.report.page import Html, framed, table
from protofl_common.tools.groups import Estimate, Group, grouped, named

MAIN = ("dataset", "partition", "clients")
HEADS = ("", "n", "mean, %", "95 % interval", "figure", "runs")
NOTE = (
    "Mean test accuracy over the clients after the last round; n runs of different seeds, and the 95 % interval of "
    "their mean (Student's t). Where intervals overlap, the order may be chance. What settings were chosen on, the "
    "files of a run do not say."
)


def write_index(path: Path, folders: Sequence[Path]) -> Path:
    """Write the page over finished runs; its path. SettingsError where there are none, or it cannot be written."""
    if not folders:
        raise SettingsError("--html: there is no finished run to show")
    sections: dict[str, list[Group]] = {}
    for group in grouped(folders, None):
        sections.setdefault(json.dumps(group.data, sort_keys=True), []).append(group)
    shown = [_section(list(named(groups)), list(sections.values()), path.parent) for groups in sections.values()]
    try:
        write_text(path, framed("Runs", f"{len(folders)} finished runs, by their data", shown, NOTE))
    except OSError as error:
        raise SettingsError(f"--html {path}: cannot be written: {error}") from None
    return path


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
    found = []
    for seed, folder in sorted(group.runs.items()):
        page = Path(os.path.relpath(folder / "report.html", beside))
        linked = (folder / "report.html").exists() and ".." not in page.parts
        found.append(f'<a href="{escape(page.as_posix())}">{seed}</a>' if linked else str(seed))
    return Html(", ".join(found))

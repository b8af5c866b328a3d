"""Finished runs side by side. Runs of the same settings but for the seed are a group.

  protofl compare runs/one runs/another             # figures, and the settings in which they differ
  protofl compare runs/tables/runs                        # all finished runs in a folder, by groups
  protofl compare runs --against runs/local-1 --figures all --latex all.tex

For each group it shows n, mean and 95 % interval (Student's t) of one figure. It also shows the
difference from the first group, or from that of --against, over the seeds that both have: with its
interval, the p of a two-sided paired t-test, and this p corrected for the number of comparisons
(Holm). A second table has what each group cost: bytes and seconds.
With --figures DIR it draws, as SVG and PDF: intervals (the means with intervals), curves (over the
rounds, with a band over the seeds) and boxes (over the clients).
"""

import argparse
import sys
from itertools import chain
from pathlib import Path

from rich.console import Console

from protofl_common.basics.files import write_text
from protofl_common.basics.text import human_bytes, human_seconds, printable
from protofl_common.config.options import Config, SettingsError
from protofl_common.config.sections import keys_that_change
from protofl_common.runs.figures import (
    HIDDEN,
    MEASURES,
    Table,
    best_text,
    cells,
    counted,
    results_of,
)
from protofl_common.runs.folder import RunFolder, Summary, reading
from protofl_common.runs.over_clients import hides_clients, in_percent
from protofl_common.tasks import task_with
from protofl_common.tasks.metrics import KINDS
from protofl_common.tools.arguments import FIGURES_HELP, add_json, print_json, run_named
from protofl_common.tools.tables.figure import COUNTS, LEGAL, Figure
from protofl_common.tools.tables.groups import (
    ABOUT_COSTS,
    ABOUT_P,
    COSTS,
    ESTIMATED,
    Estimate,
    Estimated,
    Group,
    cost_cells,
    estimate_rows,
    grouped,
    intervals,
    run_folders,
)

FIGURE_PARTS = ("what", "when", "over")  # options that say which figure is compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs = "a run's folder or name in runs/, or a folder of runs"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=runs)
    against = "a run of the group that others are compared with (the first)"
    parser.add_argument("--against", metavar="RUN", help=against)
    for part in FIGURE_PARTS:
        about = f"of groups: {LEGAL[part][0]}".replace("%", "%%")
        parser.add_argument(f"--{part}", default="", help=about)
    latex = "the table of groups, and below it that of their costs, for LaTeX"
    parser.add_argument("--latex", type=Path, metavar="FILE.tex", help=latex)
    parser.add_argument("--figures", type=Path, metavar="DIR", help=FIGURES_HELP)
    add_json(parser)


def act(arguments: argparse.Namespace) -> None:
    """Print the comparison, of single runs or of groups, and write the files that are asked for."""
    folders = run_folders([run_named(run) for run in arguments.runs])
    parts = {}
    for part in FIGURE_PARTS:
        if getattr(arguments, part):
            parts[part] = getattr(arguments, part)
    figure = Figure.of(parts, "compare") if parts else None
    groups = grouped(folders, figure)
    if arguments.against:
        first = _group_of(arguments.against, folders, figure)
        chosen = (first.settings, first.clients)
        # to the front: False sorts before True, and the others keep their order
        groups.sort(key=lambda group: (group.settings, group.clients) != chosen)

    one_run_each = len(groups) == len(folders)
    if arguments.json:
        reference = groups[0]
        print_json("compare", {"groups": [_as_dict(group, reference) for group in groups]})
    elif one_run_each and not (arguments.against or parts):
        Console().print(comparison(folders).on_terminal())
        if len(groups) > 1:
            print(
                "One run each: a difference may be chance. "
                "Repeat them with seed=1, seed=2, … to see intervals."
            )
    else:
        Console().print(table_of(groups).on_terminal())
        Console().print(costs_of(groups).on_terminal())

    if arguments.latex:
        tables = (table_of(groups), costs_of(groups))
        write_text(arguments.latex, "\n".join(table.as_latex() for table in tables))
        print(arguments.latex, file=sys.stderr)
    if arguments.figures:
        _draw(groups, arguments.figures)
        print(arguments.figures, file=sys.stderr)


def _draw(groups: list[Group], folder: Path) -> None:
    """Draw the groups' intervals into the folder, and curves and boxes of what is no count."""
    from protofl_common.report.paper import save_curves_and_boxes  # matplotlib, half a second

    intervals(groups, _units(groups)).save(folder)
    methods = {group.name: list(group.runs.values()) for group in groups}
    compared = {group.what for group in groups}
    # "": of each run its accuracy, where some are compared by the head and others by prototypes
    what = compared.pop() if len(compared) == 1 else ""
    if what not in COUNTS:
        save_curves_and_boxes(methods, what, folder)


def _units(groups: list[Group]) -> str:
    """Return the label of the figure's axis: a line for each figure that the groups have."""
    units = []
    for group in groups:
        is_percent = group.digits == 2  # a count has 1 digit, a metric in [0, 1] has 4
        units.append(f"{group.figure}, %" if is_percent else group.figure)
    return "\n".join(dict.fromkeys(units))  # each once


def _group_of(name: str, folders: list[Path], figure: Figure | None) -> Group:
    """Return the group of the run that --against names; SettingsError if it is not compared."""
    run = run_named(name)
    if run.resolve() not in [folder.resolve() for folder in folders]:
        raise SettingsError(f"--against {name}: must be one of the runs that are compared")
    (group,) = grouped([run], figure)
    return group


def table_of(groups: list[Group]) -> Table:
    """Return the table of groups, a row for each; differences are from the first group."""
    entries = []
    notes = []
    for group in groups:
        gain, note = group.difference_from(groups[0])
        first_cells = [printable(group.name)]
        entries.append(Estimated(first_cells, group.values.values(), group.digits, gain))
        notes.append(note)
    rows = [[*cells, note] for cells, note in zip(estimate_rows(entries), notes, strict=True)]

    figures = chain(*(group.figures.values() for group in groups))
    names = ", ".join(dict.fromkeys(figures))  # each once
    footer = (
        "Over the clients that have them, of test data unless it says otherwise: "
        f"{printable(names)}. Of runs with the same settings and seed the latest counts."
    )
    if "chosen on test" in names:
        footer += " What was chosen on test data is too good."
    columns = ("group", *ESTIMATED, "")  # the notes have no heading
    columns_of_words = (0, len(columns) - 1)  # the names, and the notes on differences
    return Table(columns, rows, f"{footer} {ABOUT_P}", words=columns_of_words)


def costs_of(groups: list[Group]) -> Table:
    """Return a row for each group: what its runs have cost, on average."""
    rows = [[printable(group.name), *cost_cells(group.runs.values())] for group in groups]
    return Table(("group", *COSTS), rows, ABOUT_COSTS, "what it costs")


def _as_dict(group: Group, reference: Group) -> dict[str, object]:
    """Return a group for JSON, with its difference from the ``reference``.

    The difference is None for the reference itself, and for a group that cannot be compared.
    """
    gain, note = group.difference_from(reference)
    return {
        "name": group.name,
        "settings": group.settings,
        "clients": group.clients,
        "figure": group.figure,
        "runs": {str(seed): str(folder) for seed, folder in group.runs.items()},
        "values": {str(seed): value for seed, value in group.values.items()},
        **Estimate.of(group.values.values()).as_dict(),
        "difference": gain and gain.as_dict(test=True),
        "note": note,
    }


def comparison(folders: list[Path]) -> Table:
    """Return the table of single runs, a column for each.

    Figures come first, then the settings that are not the same in all runs.
    """
    summaries = [RunFolder(folder).finished_summary() for folder in folders]
    metrics = _metrics_that_are_results(folders, summaries)
    columns = []
    settings = []
    for folder, summary in zip(folders, summaries, strict=True):
        columns.append(_figures(folder, summary, metrics))
        versions: Config = {
            "division": summary["division"],
            "data": summary.get("data", "–"),
        }
        settings.append(summary["settings"] | versions)

    # all columns have the same figures in the same order
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    rows += _different_settings(settings)

    notes = []
    for summary in summaries:
        if hides_clients(summary):
            notes.append(f"Without a std: {HIDDEN}")
        says_right = task_with(summary["settings"]).says_right
        if says_right != "accuracy":
            notes.append(f"{' and '.join(KINDS)}, in percent: {says_right}")
    heads = [folder.resolve().name for folder in folders]
    return Table(["", *heads], rows, "\n".join(dict.fromkeys(notes)))  # each once


def _metrics_that_are_results(folders: list[Path], summaries: list[Summary]) -> list[str]:
    """Return the names of the metrics that are the result of any of the runs, such as head/auc."""
    names: dict[str, None] = {}
    for folder, summary in zip(folders, summaries, strict=True):
        with reading(f"{folder}: not the figures of a run"):
            for result in results_of(summary).values():
                if not in_percent(result.name):
                    names[result.name] = None
    return list(names)


def _different_settings(settings: list[Config]) -> list[list[str]]:
    """Return a row, key and values, for each setting that is not the same in all runs.

    Left out are settings that only name a run.
    """
    keys = dict.fromkeys(chain(*settings))  # each once, in order
    rows = []
    for key in keys:
        values = [str(run_settings.get(key, "–")) for run_settings in settings]
        if len(set(values)) > 1 and key not in keys_that_change("name"):
            rows.append([key, *values])
    return rows


def _figures(folder: Path, summary: Summary, metrics: list[str]) -> dict[str, str]:
    """Return a run's column of the comparison: the name of each figure, and its text.

    ``metrics`` stand before the accuracies. SettingsError where the ``summary`` is not that of a
    run.
    """
    with reading(f"{folder}: not the figures of a run"):
        figures = {name: str(summary[name]) for name in ("algorithm", "rounds")}
        networks = [client["arch"] for client in summary["clients"].values()]
        figures["clients"] = counted(networks)
        for metric in metrics:
            texts = cells(metric, summary["metrics"].get(metric, {}))
            figures |= _named(metric, texts)
        for kind in KINDS:
            figures |= _named(kind, cells(kind, summary["accuracy"].get(kind, {})))
            best = summary["best-accuracy"].get(kind)
            figures[f"{kind}: best"] = best_text(best) if best else "–"
        for direction, size in summary["bytes"].items():
            figures[f"bytes {direction}"] = human_bytes(size)
        figures["seconds"] = human_seconds(summary["seconds"])
        figures["seconds per round"] = human_seconds(summary["seconds-per-round"])
        # a reply that came late is not counted twice: it was missing in its own round
        lost = summary["trouble"] | {"late": 0}
        figures["lost replies"] = str(sum(lost.values()))
        return figures


def _named(figure: str, texts: list[str]) -> dict[str, str]:
    """Return the texts of a figure's `MEASURES` by the names of their rows."""
    named = {}
    for measure, text in zip(MEASURES, texts, strict=True):
        name = "by-samples" if measure == "weighted" else measure
        named[f"{figure}: {name}"] = text
    return named

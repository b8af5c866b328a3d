"""Finished runs side by side. Runs of the same settings but for the seed are a group.

  protofl compare runs/one runs/another
  protofl compare runs/tables/runs                        # all finished runs in a folder, by groups
  protofl compare runs --against runs/local-1 --figures all --latex all.tex

For each group it shows n, mean and 95 % interval (Student's t) of one figure. It also shows the
difference from the first group, or from that of --against, over the seeds that both have: with its
interval, the p of a two-sided paired t-test, and this p corrected for the number of comparisons
(Holm). A second table has the figures by each way to predict, and how they spread over the clients.
A third has what each group cost: bytes, seconds and lost replies.
With --figures DIR it draws, as SVG and PDF: intervals (the means with intervals), curves (over the
rounds, with a band over the seeds) and boxes (over the clients).
"""

import sys
from argparse import ArgumentParser, Namespace
from itertools import chain
from pathlib import Path
from statistics import fmean

from protofl_common.basics.files import write_text
from protofl_common.basics.text import printable
from protofl_common.config.options import SettingsError
from protofl_common.runs.figures import HIDDEN, MEASURES, Table, figure_rows, results_of
from protofl_common.runs.folder import Accuracies, RunFolder, Summary, reading
from protofl_common.runs.over_clients import figures_of, hides_clients
from protofl_common.tasks import task_with
from protofl_common.tools.arguments import FIGURES_HELP, print_json, run_named
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


def add_arguments(parser: ArgumentParser) -> None:
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
    about_json = "the first table as an object of JSON, for programs"
    parser.add_argument("--json", action="store_true", help=about_json)


def act(arguments: Namespace) -> None:
    """Print the comparison, and write the files that are asked for."""
    folders = run_folders([run_named(run) for run in arguments.runs])
    given = vars(arguments)
    parts = {part: given[part] for part in FIGURE_PARTS if given[part]}
    figure = Figure.of(parts, "compare") if parts else None
    groups = grouped(folders, figure)
    if arguments.against:
        run = run_named(arguments.against)
        if run.resolve() not in [folder.resolve() for folder in folders]:
            raise SettingsError(
                f"--against {arguments.against}: must be one of the runs that are compared"
            )
        (first,) = grouped([run], figure)
        chosen = (first.settings, first.clients)
        # to the front: False sorts before True, and the others keep their order
        groups.sort(key=lambda group: (group.settings, group.clients) != chosen)

    estimates = table_of(groups)
    costs = costs_of(groups)
    if arguments.json:
        print_json("compare", {"groups": [_as_dict(group, groups[0]) for group in groups]})
    else:
        for table in (estimates, figures_of_groups(groups), costs):
            table.show()

    if arguments.latex:
        write_text(arguments.latex, "\n".join(table.as_latex() for table in (estimates, costs)))
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


def figures_of_groups(groups: list[Group]) -> Table:
    """Return a row for each way to predict of each group, and for each result that is a metric."""
    rows = []
    hides_any = False
    for group in groups:
        name = printable(group.name)
        runs = [RunFolder(folder).finished_summary() for folder in group.runs.values()]
        with reading(f"{name}: not the figures of a run"):
            says_right = task_with(runs[0]["settings"]).says_right
            rows += [[name, *row] for row in figure_rows(_means_over(runs), says_right=says_right)]
            hides_any = hides_any or any(map(hides_clients, runs))
    note = "After the last round, over the clients; means over the runs."
    if hides_any:
        note += f" Without a std: {HIDDEN}"
    heads = ("group", "figure", *MEASURES.values())
    return Table(heads, rows, note, "by each way to predict", words=(0, 1))


def _means_over(runs: list[Summary]) -> Accuracies:
    """Return the mean over a group's runs of each of their results and accuracies."""
    results = [result.name for result in results_of(runs[0]).values()]
    figures_by_run = [figures_of(run) for run in runs]
    means: Accuracies = {}
    for name in dict.fromkeys([*results, *runs[0]["accuracy"]]):  # each once
        figures = [by_name[name] for by_name in figures_by_run if name in by_name]
        means[name] = {}
        for measure in MEASURES:  # a run may lack some, such as `std` where clients are hidden
            if all(measure in figure for figure in figures):
                means[name][measure] = fmean(figure[measure] for figure in figures)
    return means


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

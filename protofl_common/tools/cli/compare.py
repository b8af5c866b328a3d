"""Finished runs side by side. Runs of the same settings but for the seed are a group.

  protofl compare runs/one runs/another                   # figures, and the settings in which they differ
  protofl compare runs/tables/runs                        # all finished runs in a folder, by groups
  protofl compare runs --against runs/local-1 --figure all.pdf --latex all.tex

Of groups it shows n, mean and 95 % interval (Student's t) of one figure, and the difference from the first group, or
from that of --against: over the seeds that both have, with its interval and the p of a two-sided paired t-test.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from protofl_common.basics.files import write_text
from protofl_common.basics.text import human_bytes, human_seconds, printable
from protofl_common.config.options import SettingsError
from protofl_common.config.sections import keys_that_change
from protofl_common.runs.figures import HIDDEN, MEASURES, Table, best_text, cells, counted
from protofl_common.runs.folder import KINDS, RunFolder, Summary, reading
from protofl_common.tools.cli.arguments import add_json, print_json, run_named
from protofl_common.tools.groups import ESTIMATED, Estimate, Group, draw_groups, estimated, grouped, holm, run_folders
from protofl_common.tools.tables.figure import LEGAL, Figure


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder or name in runs/, or a folder of runs")
    parser.add_argument("--against", metavar="RUN", help="a run of the group that others are compared with (the first)")
    for part in ("what", "when", "over"):
        parser.add_argument(f"--{part}", default="", help=f"of groups: {LEGAL[part][0]}".replace("%", "%%"))
    parser.add_argument("--latex", type=Path, metavar="FILE.tex", help="the table of groups, for LaTeX")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="means with intervals, as FILE.svg or FILE.pdf")
    add_json(parser)


def act(arguments: argparse.Namespace) -> None:
    folders = run_folders([run_named(run) for run in arguments.runs])
    if arguments.figure and arguments.figure.suffix not in (".svg", ".pdf"):
        raise SettingsError(f"--figure {arguments.figure}: must end in .svg or .pdf")
    parts = {part: getattr(arguments, part) for part in ("what", "when", "over") if getattr(arguments, part)}
    figure = Figure.of(parts, "compare") if parts else None
    groups = grouped(folders, figure)
    if arguments.against:
        if (against := run_named(arguments.against)).resolve() not in map(Path.resolve, folders):
            raise SettingsError(f"--against {arguments.against}: must be one of the runs that are compared")
        (first,) = grouped([against], figure)
        groups.sort(key=lambda group: (group.settings, group.clients) != (first.settings, first.clients))
    console = Console()
    if arguments.json:
        print_json("compare", {"groups": [_as_dict(group, groups[0]) for group in groups]})
    elif len(groups) == len(folders) and not (arguments.against or parts):
        console.print(comparison(folders).on_terminal())
        if len(groups) > 1:
            print("One run each: a difference may be chance. Repeat them with seed=1, seed=2, … to see intervals.")
    else:
        console.print(table_of(groups).on_terminal())
        if extra := len(folders) - sum(len(group.runs) for group in groups):
            print(f"{extra} runs repeat another with the same settings and seed; of each the latest counts.")
        differences = {group.name: group.beyond(groups[0])[0] for group in groups[1:]}
        tested = {name: than.p for name, than in differences.items() if than and than.n > 1}
        if len(tested) > 1:
            corrected = ", ".join(f"{printable(name)} {p:.3f}" for name, p in holm(tested).items())
            print(f"p is of each comparison alone; corrected for {len(tested)} of them (Holm): {corrected}")
    if arguments.latex:
        write_text(arguments.latex, table_of(groups).as_latex())
    if arguments.figure:
        unit = "\n".join(dict.fromkeys(group.figure + ", %" * (group.digits == 2) for group in groups))
        draw_groups(groups, unit, arguments.figure)
    for file in filter(None, (arguments.latex, arguments.figure)):
        print(file, file=sys.stderr)


def table_of(groups: list[Group]) -> Table:
    """A row per group; differences are from the first."""
    figures = ", ".join(dict.fromkeys(text for group in groups for text in group.figures.values()))
    warning = " What was chosen on test data is too good." if "chosen on test" in figures else ""
    rows = []
    for group in groups:
        than, note = group.beyond(groups[0])
        cells = estimated(group.values.values(), than, group.digits)
        if group is groups[0]:
            cells[3:], note = [""] * 3, "" if len(group.values) > 1 else "one seed"
        rows.append([printable(group.name), *cells, note])
    note = f"Over the clients that have them, of test data unless it says otherwise: {printable(figures)}.{warning}"
    return Table(("group", *ESTIMATED, ""), rows, note, words=(0, 7))


def _as_dict(group: Group, reference: Group) -> dict[str, object]:
    than, note = (None, "") if group is reference else group.beyond(reference)
    return {
        "name": group.name,
        "settings": group.settings,
        "clients": group.clients,
        "figure": group.figure,
        "runs": {str(seed): str(folder) for seed, folder in group.runs.items()},
        "values": {str(seed): value for seed, value in group.values.items()},
        **Estimate.of(group.values.values()).as_dict(),
        "difference": than and than.as_dict(test=True),
        "note": note,
    }


def comparison(folders: list[Path]) -> Table:
    """A column per run; figures first, then settings that are not the same everywhere."""
    summaries = [RunFolder(folder).finished_summary() for folder in folders]
    figures = [_figures(folder, summary) for folder, summary in zip(folders, summaries, strict=True)]
    rows = [[name, *(column[name] for column in figures)] for name in figures[0]]
    settings = [summary["settings"] | {"division": summary.get("division", 1)} for summary in summaries]
    for key in dict.fromkeys(key for of_run in settings for key in of_run):
        values = [of_run.get(key) for of_run in settings]
        if key not in keys_that_change("name") and any(value != values[0] for value in values):
            rows.append([key, *("–" if value is None else str(value) for value in values)])
    note = f"Without a std: {HIDDEN}" * any("std" not in of for run in summaries for of in run["accuracy"].values())
    return Table(["", *(folder.resolve().name for folder in folders)], rows, note)


def _figures(folder: Path, summary: Summary) -> dict[str, str]:
    with reading(f"{folder}: not the figures of a run"):
        figures = {name: str(summary[name]) for name in ("algorithm", "rounds")}
        figures |= {"clients": counted(client["arch"] for client in summary["clients"].values())}
        for kind in KINDS:
            texts = cells(summary["accuracy"].get(kind, {}))
            names = [f"{kind}: {name.replace('weighted', 'by-samples')}" for name in MEASURES]
            best = summary["best-accuracy"].get(kind)
            figures |= dict(zip(names, texts, strict=True)) | {f"{kind}: best": best_text(best) if best else "–"}
        figures |= {f"bytes {way}": human_bytes(size) for way, size in summary["bytes"].items()}
        figures |= {name.replace("-", " "): human_seconds(summary[name]) for name in ("seconds", "seconds-per-round")}
        lost = summary["trouble"] | {"late": 0}  # a late one was missing before
        return figures | {"lost replies": str(sum(lost.values()))}

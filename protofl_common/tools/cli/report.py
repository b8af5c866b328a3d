"""The page of a run: draw report.html from the files in its folder, finished or not.

protofl report runs/20261121-103501-fedproto-mnist-4711
protofl report 20261121-103501-fedproto-mnist-4711 another      (names in runs/)
protofl report runs/mine --figures mine                         (each figure also as SVG and PDF)

Of several runs each has its own folder of figures, DIR/NAME.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from protofl_common.report.page import save_figures, write_report
from protofl_common.runs.folder import reading
from protofl_common.tools.arguments import FIGURES_HELP, run_named


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run, or its name in runs/"
    )
    parser.add_argument("--figures", type=Path, metavar="DIR", help=FIGURES_HELP)


def act(arguments: Namespace) -> None:
    """Write the page of each run, and print its path."""
    for run in arguments.runs:
        folder = run_named(run)
        with reading(f"{folder}: the page cannot be written"):
            print(write_report(folder))
            if arguments.figures:
                several = len(arguments.runs) > 1
                into = arguments.figures / folder.name if several else arguments.figures
                save_figures(folder, into)
                print(into)

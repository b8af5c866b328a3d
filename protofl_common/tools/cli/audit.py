"""Attack the messages of a finished simulation by membership inference.

  protofl audit runs/20261121-103501-fedproto-mnist-4711

An advantage of 0 is guessing, 1 names every member. The page of the run shows the findings when it is drawn again.
"""

import argparse
from dataclasses import replace

from rich.console import Console

from protofl_common.runs.figures import audit_table
from protofl_common.tools.attacks.membership import audit
from protofl_common.tools.cli.arguments import add_allow_python, run_named


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name in runs/")
    add_allow_python(parser, "the run")


def act(arguments: argparse.Namespace) -> int:
    table, note = audit_table(audit(run_named(arguments.run))), "± three deviations of guessing"
    Console().print(replace(table, title="what the messages tell", note=note, words=(0, 1)).on_terminal())
    return 0

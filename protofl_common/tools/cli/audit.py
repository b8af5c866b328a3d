"""What the messages of a finished simulation say of single training samples: membership inference.

protofl audit runs/20261121-103501-fedproto-mnist-4711

An advantage of 0 is guessing, 1 names every member. The page of the run shows the findings when it is drawn again.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from protofl_common.report.page import AUDIT_HEADS, audit_rows
from protofl_common.tools.audit import audit
from protofl_common.tools.cli.recipes import run_named


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name in runs/")


def act(arguments: argparse.Namespace) -> int:
    """Attack, and print what was found; above chance in red."""
    findings = audit(run_named(arguments.run))
    table = Table(title="membership inference", caption="± three deviations of guessing")
    for number, name in enumerate(AUDIT_HEADS):
        table.add_column(name, justify="right" if number > 1 else "left")
    for row, one in zip(audit_rows(findings), findings, strict=True):
        table.add_row(*row, style="red" if one["above_chance"] else "")
    Console().print(table)
    return 0

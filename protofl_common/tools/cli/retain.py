"""Remove what the server keeps of runs that ended long ago, and say what was removed.

  protofl retain --days 90 --database superlink.db

It removes the folders of finished runs, and their messages and logs in the SuperLink's database.
Unfinished runs stay, and so does heads.jsonl, by which the sites' logs are checked. At a site, use
`protofl site retain`.
"""

import argparse
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from protofl_common.tools.arguments import add_runs
from protofl_common.tools.retention import (
    add_days,
    days_ago,
    retain_messages,
    retain_runs,
    show,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_days(parser)
    add_runs(parser)
    database = "of the SuperLink, as its --database; without it messages stay"
    parser.add_argument("--database", type=Path, metavar="FILE", help=database)


def act(arguments: argparse.Namespace) -> None:
    """Remove old runs, and with --database their messages, and print what was removed."""
    before = days_ago(arguments.days)
    lines: Iterable[str] = retain_runs(arguments.runs, before, arguments.dry_run)
    if arguments.database:
        messages = retain_messages(arguments.database, before, arguments.dry_run)
        lines = chain(lines, messages)
    show(lines, arguments)

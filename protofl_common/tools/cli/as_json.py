"""``--json``, alike for every command: an object on standard output, whose ``command`` and ``format`` tell readers what
it is (`docs/reference/commands.schema.json`). What goes wrong goes to standard error, as without it.
"""

import argparse
import json
from collections.abc import Mapping
from typing import Any

FORMAT = 1  # to be increased when an entry changes its meaning, or goes


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as an object of JSON, for programs")


def print_json(command: str, content: Mapping[str, Any]) -> None:
    print(json.dumps({"command": command, "format": FORMAT, **content}, indent=2, ensure_ascii=False))

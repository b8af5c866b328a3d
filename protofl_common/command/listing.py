"""What the settings can name: algorithms, data sets, partitions, model groups, architectures, backbones.

protofl list
protofl list partitions
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protofl_common.backbones.names import EMBEDDED, OTHERS
from protofl_common.catalog import CATALOG, Algorithm, Crossing
from protofl_common.datasets.names import DATASETS, PARTITIONS
from protofl_common.models.groups import ARCHITECTURES, GROUPS

SUMMARY = "algorithms, data sets, partitions, models that the settings can name"


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("what", nargs="?", choices=tuple(lists()), metavar="WHAT", help=", ".join(lists()))


def act(arguments: argparse.Namespace) -> int:
    """Print all lists, or one."""
    console = Console()
    for name, (setting, entries) in lists().items():
        if arguments.what in (None, name):
            console.print(f"[bold]{name}[/bold] ({escape(setting)})")
            grid = Table.grid(padding=(0, 2))
            grid.add_column(no_wrap=True)
            grid.add_column()
            for choice, explanation in entries.items():
                grid.add_row(f"  {escape(choice)}", escape(explanation))
            console.print(grid)
            console.print()
    return 0


def lists() -> dict[str, tuple[str, Mapping[str, str]]]:
    """Name of the list -> the setting it belongs to, and choice -> explanation, from where each is declared."""
    groups = {name: ", ".join(members) for name, members in GROUPS.items() if name not in ARCHITECTURES}
    return {
        "algorithms": ("algo", {name: _one_line(row) for name, row in CATALOG.items()}),
        "datasets": ("dataset; or MODULE:FUNCTION of your own, hf:NAME", DATASETS),
        "partitions": ("partition", PARTITIONS),
        "groups": ("models: client i gets architecture i mod n; or a list of architectures and MODULE:CLASS", groups),
        "architectures": ("models, for all clients; arch, in a site's node config", ARCHITECTURES),
        "backbones": ("backbones, comma-separated; auto, none", EMBEDDED | OTHERS),
    }


def _one_line(row: Algorithm) -> str:
    return f"{row.title} ({row.paper}). Down: {_carries(row.down)}. Up: {_carries(row.up)}."


def _carries(crossing: Crossing) -> str:
    parts = [
        "weights" if crossing.weights else "",
        ("several prototypes per class" if crossing.many_per_class else "prototypes") if crossing.prototypes else "",
        "class counts" if crossing.counts else "",
        "every client's prototypes" if crossing.local_sets else "",
    ]
    return ", ".join(part for part in parts if part) or "nothing"

"""List what the settings can name: algorithms, data sets, partitions, model groups, architectures, backbones.

protofl list
protofl list partitions
"""

import argparse
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from protofl_common.config.architectures import ARCHITECTURES, GROUPS
from protofl_common.config.backbones import EMBEDDED, OTHERS
from protofl_common.config.datasets import DATASETS, PARTITIONS
from protofl_common.experiment.catalog import CATALOG, installed
from protofl_common.tools.cli.arguments import add_json, print_json
from protofl_common.wire.schema import Declared


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=tuple(lists()), metavar="WHAT", help=", ".join(lists()))
    add_json(parser)


def act(arguments: argparse.Namespace) -> None:
    chosen = {name: entry for name, entry in lists().items() if arguments.what in (None, name)}
    if arguments.json:
        print_json("list", {name: dict(entries) for name, (_, entries) in chosen.items()})
    console = Console(quiet=arguments.json)
    for name, (setting, entries) in chosen.items():
        console.print(f"[bold]{name}[/bold] ({escape(setting)})")
        grid = Table.grid(Column(no_wrap=True), Column(), padding=(0, 2))
        for choice, explanation in entries.items():
            grid.add_row(f"  {escape(choice)}", escape(explanation))
        console.print(grid)
        console.print()


def lists() -> dict[str, tuple[str, Mapping[str, str]]]:
    """Name of the list -> the setting it belongs to, and choice -> explanation, from where each is declared."""
    packages = {name: f"of an installed package: {point.value}" for name, point in installed().items()}  # not imported
    algorithms = {
        name: f"{row.title} ({row.paper}). Down: {carries(row.exchange.down)}. Up: {carries(row.exchange.up)}. "
        f"Different networks: {'no' if row.frozen_backbones or row.exchange.needs_one_architecture else 'yes'}."
        for name, row in CATALOG.items()
    }
    groups = {name: ", ".join(members) for name, members in GROUPS.items() if name not in ARCHITECTURES}
    return {
        "algorithms": ("algo", algorithms | packages),
        "datasets": ("dataset; or MODULE:FUNCTION of your own, hf:NAME", DATASETS),
        "partitions": ("partition", PARTITIONS),
        "groups": ("models: client i gets architecture i mod n; or a list of architectures and MODULE:CLASS", groups),
        "architectures": ("models, for all clients; arch, in a site's node config", ARCHITECTURES),
        "backbones": ("backbones, comma-separated; auto, none", EMBEDDED | OTHERS),
    }


def carries(declared: Declared) -> str:
    """The entries of one direction of an exchange, in words."""
    return ", ".join(f"{name} ({entry.words})" for name, entry in declared.items()) or "nothing"

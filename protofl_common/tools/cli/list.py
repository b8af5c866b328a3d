"""List what the settings can name: algorithms, data sets, partitions, metrics, model groups,
architectures, backbones.

protofl list
protofl list partitions
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from protofl_common.config.architectures import ARCHITECTURES, GROUPS
from protofl_common.config.backbones import EMBEDDED, OTHERS
from protofl_common.config.datasets import DATASETS, PARTITIONS, DataSet, Partition
from protofl_common.experiment.catalog import CATALOG, installed
from protofl_common.tasks.metrics import BY_CLASS, LABEL_METRICS, METRICS
from protofl_common.tools.arguments import add_json, print_json
from protofl_common.wire.schema import Declared


def add_arguments(parser: ArgumentParser) -> None:
    names = ", ".join(lists())
    parser.add_argument("what", nargs="?", choices=tuple(lists()), metavar="WHAT", help=names)
    add_json(parser)


def act(arguments: Namespace) -> None:
    """Print the list that is asked for, or all."""
    chosen = lists()
    if arguments.what is not None:
        chosen = {arguments.what: chosen[arguments.what]}
    if arguments.json:
        print_json("list", {name: dict(entries) for name, (_, entries) in chosen.items()})
        return

    console = Console()
    for name, (setting, entries) in chosen.items():
        console.print(f"[bold]{name}[/bold] ({escape(setting)})")
        grid = Table.grid(Column(no_wrap=True), Column(), padding=(0, 2))
        for choice, explanation in entries.items():
            grid.add_row(f"  {escape(choice)}", escape(explanation))
        console.print(grid)
        console.print()


def lists() -> dict[str, tuple[str, Mapping[str, str]]]:
    """Return the lists by their names: the setting that each is for, and its choices, explained."""
    groups = {}
    for name, members in GROUPS.items():
        if name not in ARCHITECTURES:  # each of which is a group of itself alone
            groups[name] = ", ".join(members)
    return {
        "algorithms": ("algo", _algorithms()),
        "datasets": ("dataset; or MODULE:FUNCTION of your own, hf:NAME", _helps(DATASETS)),
        "partitions": ("partition", _helps(PARTITIONS)),
        "metrics": ("metrics, comma-separated; or MODULE:FUNCTION of your own", _metrics()),
        "groups": (
            "models: client i gets architecture i mod n; "
            "or a list of architectures and MODULE:CLASS",
            groups,
        ),
        "architectures": (
            "models, for all clients; arch, in a site's node config",
            ARCHITECTURES,
        ),
        "backbones": ("backbones, comma-separated; auto, none", EMBEDDED | OTHERS),
    }


def _helps(rows: Mapping[str, DataSet | Partition]) -> dict[str, str]:
    return {name: row.help for name, row in rows.items()}


def _metrics() -> dict[str, str]:
    """Explain each metric by the first line of its function's docstring, without its "Return"."""
    functions = {**LABEL_METRICS, **METRICS, **BY_CLASS}
    explained = {}
    for name, function in functions.items():
        first_line = str(function.__doc__).partition("\n")[0]
        explained[name] = first_line.removeprefix("Return ").rstrip(".")
    return explained


def _algorithms() -> dict[str, str]:
    """Explain each algorithm: its paper, what it sends, and if clients' networks may differ."""
    algorithms = {}
    for name, row in CATALOG.items():
        needs_one_network = row.frozen_backbones or row.exchange.needs_one_architecture
        algorithms[name] = (
            f"{row.title} ({row.paper}). "
            f"Down: {carries(row.exchange.down)}. Up: {carries(row.exchange.up)}. "
            f"Different networks: {'no' if needs_one_network else 'yes'}."
        )
    for name, point in installed().items():
        algorithms[name] = f"of an installed package: {point.value}"  # it is not imported
    return algorithms


def carries(declared: Declared) -> str:
    """Say what travels in one direction of an exchange."""
    entries = [f"{name} ({entry.words})" for name, entry in declared.items()]
    return ", ".join(entries) or "nothing"

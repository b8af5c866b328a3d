"""A machine with data of its own: run its SuperNode with code that its operator chose.

  protofl site run --superlink my.host:8000 --node-config '…' …     options as of flower-supernode
  protofl site check [KEY=VALUE …] --node-config '…' …              what runs could make this machine do; 1 if wrong
  protofl site status --node-config '…'                             what it keeps of runs and data, with sizes
  protofl site purge RUN … --node-config '…'                        remove what it keeps of runs, or caches/

With flower-supernode alone, whoever may submit runs has code of their own run on this machine. protofl site run uses
the code that is installed here, whatever a run brings.
"""

import argparse
import sys
from pathlib import Path

from protofl_common.config.options import SettingsError
from protofl_common.tools.cli.arguments import add_json, print_json, read_assignments

OURS = ("--isolation", "--superexec-auth-secret-file", "--ssl-certfile", "--allow-runtime-dependency-installation")
"""Options of flower-supernode that `run` sets, or that it does not go together with."""


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments; those it does not know are flower-supernode's."""
    parser.add_argument("action", choices=ACTIONS, help=", ".join(ACTIONS))
    parser.add_argument("words", nargs="*", help="check: settings of a run; purge: runs, or caches/")
    parser.add_argument(
        "--start-method",
        choices=("fork", "spawn"),
        default="fork" if sys.platform == "linux" and not Path("/dev/nvidiactl").exists() else "spawn",
        help="run: what each message starts; fork: a copy of a process that has imported everything; spawn: a fresh "
        "process (default with an NVIDIA GPU, and elsewhere than on Linux)",
    )
    add_json(parser)


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    ours, supernode = parser.parse_known_args(arguments)
    return argparse.Namespace(**vars(ours), supernode=supernode)


def act(arguments: argparse.Namespace) -> int:
    from protofl_common.tools.site.node import node_config, supernode_options

    arguments.options = supernode_options(arguments.supernode)
    arguments.node = node_config(arguments.options.node_config)
    return ACTIONS[arguments.action](arguments)


def run(arguments: argparse.Namespace) -> int:
    from protofl_common.tools.findings import WRONG
    from protofl_common.tools.site.check import network
    from protofl_common.tools.site.node import site_settings
    from protofl_common.tools.site.supernode import start

    site_settings(arguments.node)
    for option in OURS:
        if any(word.partition("=")[0] == option for word in arguments.supernode):
            raise SettingsError(f"{option}: not together with protofl site run")
    for finding in network(arguments.options):
        if finding.level == WRONG:  # of some of which Flower says no word
            print(f"protofl: {finding.level} {finding.topic}: {finding.text}", file=sys.stderr, flush=True)
    start(arguments.supernode, f"{arguments.options.host}:{arguments.options.port}", arguments.start_method)
    return 0


def check(arguments: argparse.Namespace) -> int:
    from protofl_common.tools.findings import show
    from protofl_common.tools.site.check import findings

    listed = findings(arguments.options, arguments.node, read_assignments(arguments.words))
    return show("site check", listed, arguments.json)


def status(arguments: argparse.Namespace) -> int:
    from protofl_common.tools.site.stored import free_space, ledgers_at, stored_at

    stored = stored_at(arguments.node)
    if arguments.json:
        rows = [{"name": part.name, "bytes": part.bytes, "paths": [*map(str, part.paths)]} for part in stored]
        print_json("site status", {"kept": rows})
    else:
        print(*stored, *ledgers_at(arguments.node), *free_space(arguments.node), sep="\n")
    return 0


def purge(arguments: argparse.Namespace) -> int:
    from protofl_common.tools.site.stored import purge

    for line in purge(arguments.node, arguments.words):
        print(line)
    return 0


ACTIONS = {"run": run, "check": check, "status": status, "purge": purge}

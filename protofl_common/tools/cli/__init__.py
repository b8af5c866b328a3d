"""The command ``protofl``.

One file per subcommand; each has `describe` and `act`, which may return an exit status. The command
simulates runs in processes of its own, and reads the files that runs leave behind. It imports only
the chosen subcommand, no Flower but for `run`, `table`, `site`, `status`, `worker` and `doctor`,
and no PyTorch, which takes seconds, to read figures.
"""

import argparse
import os
import signal
import sys
import traceback
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from typing import NoReturn

from protofl_common.basics.faults import fault_of
from protofl_common.config.lists import names_in
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allow

COMMANDS = {  # name of each file beside this one -> what it does
    "run": "one federation, simulated on this machine, or on a Ray cluster",
    "list": "algorithms, data sets, partitions, models that the settings can name",
    "table": "a matrix of runs: a paper's table rebuilt, or a comparison of your own",
    "compare": "finished runs side by side",
    "runs": "the runs in a folder: how far, how good, how large",
    "report": "the page of a run, with figures: report.html",
    "audit": "what the messages of a run say of single training samples: membership inference",
    "forget": "a site taken out of a run's result",
    "export": "a site's trained model, for use outside of the federation",
    "predict": (
        "classes of files, by a model that was exported; "
        "of a run's test samples, by its clients' models"
    ),
    "doctor": "what is wrong with this machine, and what to do about it",
    "status": (
        "a federation of separate machines: who is online, who submitted what, what went wrong"
    ),
    "retain": "what the server keeps of runs that ended long ago, removed",
    "study": "a file of settings that you sign: who asks which sites for what, and until when",
    "site": "a machine with data of its own: its SuperNode, with code that its operator chose",
    "worker": (
        "the SuperLink's worker: the server's half of each run, with code that its operator chose"
    ),
}
FOR_FLOWER = ("worker",)  # it hands arguments that it does not know to Flower's own command
WITH_ACTIONS = ("site",)  # with options of their own, each
STOPPED = 130  # exit status after Ctrl-C, as shells have it
# Flower, once imported, would tell its makers who uses it
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status.

    0, 1 for wrong settings or a failed run, 2 for a wrong command line, 130 after Ctrl-C.
    """
    commands = "\n".join(f"  {name:13}{summary}" for name, summary in COMMANDS.items())
    more = "protofl COMMAND --help says more; protofl --version names versions."
    parser = argparse.ArgumentParser(
        prog="protofl",
        usage="protofl COMMAND …",
        description="Federated learning with class prototypes.",
        epilog=f"commands:\n{commands}\n\n{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hidden = argparse.SUPPRESS
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=hidden)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help=hidden)
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments == ["--version"]:
        versions = [f"{package} {version(package)}" for package in ("protofl", "flwr", "torch")]
        print(", ".join(versions))
        return 0

    chosen = parser.parse_args(arguments)
    from protofl_common.basics.files import TensorFileError
    from protofl_common.data.raw import DataError  # numpy, which --help does not need
    from protofl_common.experiment.settings import with_halves

    with_halves()  # methods of other packages import client_app, which no wheel installs
    try:
        command = import_module(f"{__name__}.{chosen.command}")
        return command.act(parsed(chosen.command, chosen.arguments)) or 0
    except BrokenPipeError:  # whoever reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (SettingsError, DataError, TensorFileError, OSError) as error:
        print(f"protofl: this cannot work\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nprotofl: stopped", file=sys.stderr)
        return STOPPED
    except Exception as error:
        traceback.print_exc()
        print(f"protofl: {fault_of(error)}", file=sys.stderr)
        return 1


def program() -> NoReturn:
    """`main` as a program: after Ctrl-C no thread that waits for a killed process keeps it."""
    if isinstance(sys.stdout, TextIOWrapper):
        # "?" for a character that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")
    for kind in (signal.SIGTERM, signal.SIGHUP):
        # a killed `protofl` ends its run, as Ctrl-C does
        signal.signal(kind, signal.default_int_handler)
    status = main()
    if status == STOPPED:
        sys.stdout.flush()
        os._exit(STOPPED)
    sys.exit(status)


def parser_of(command: str) -> argparse.ArgumentParser:
    module = import_module(f"{__name__}.{command}")
    parser = argparse.ArgumentParser(f"protofl {command}", description=module.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.describe(parser)
    return parser


def parsed(command: str, arguments: list[str]) -> argparse.Namespace:
    """Parse the words after a subcommand; the modules of ``--allow-python`` are allowed now."""
    parser = parser_of(command)
    if command in FOR_FLOWER or command in WITH_ACTIONS:
        result, unknown = parser.parse_known_args(arguments)
    else:
        result, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown and command not in FOR_FLOWER:
        parser = getattr(result, "parser", parser)  # the action's own
        hint = ""
        if "KEY=VALUE" in parser.format_usage():
            hint = "; settings are KEY=VALUE without dashes, such as rounds=5"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    result.flowers = unknown
    allow(names_in(getattr(result, "allow_python", "")))
    return result

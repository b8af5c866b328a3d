"""The command ``protofl``.

One file per subcommand; each has `add_arguments`, and `act`, which may return an exit status. The
command simulates runs in processes of its own, and reads the files that runs leave behind. It
imports only the chosen subcommand, no Flower but for `run`, `table`, `site`, `status`, `worker` and
`doctor`, and no PyTorch, which takes seconds, to read figures.
"""

import os
import signal
import sys
import traceback
from argparse import REMAINDER, SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from typing import NoReturn

from protofl_common.basics.faults import fault_of
from protofl_common.config.lists import names_in
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allow, allowed_modules

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
FOR_FLOWER = ("worker",)  # arguments that it does not know go to Flower's own command
WITH_ACTIONS = ("site",)  # commands of several actions, each with options of its own
STOPPED = 130  # exit status after Ctrl-C, as shells have it
# Flower, once imported, would tell its makers who uses it
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")


def main(arguments: list[str] | None = None) -> int:
    """Run ``protofl`` with these arguments, by default the process's; return its exit status.

    It is 0 if all went well, 1 for wrong settings or a failed run, 2 for a wrong command line, and
    130 after Ctrl-C; a command may have others. Errors are printed on stderr.
    """
    commands = "\n".join(f"  {name:13}{summary}" for name, summary in COMMANDS.items())
    hint = "protofl COMMAND --help says more; protofl --version names versions."
    parser = ArgumentParser(
        prog="protofl",
        usage="protofl COMMAND …",
        description="Federated learning with class prototypes.",
        epilog=f"commands:\n{commands}\n\n{hint}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    hidden = SUPPRESS  # the epilog lists the commands
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=hidden)
    parser.add_argument("arguments", nargs=REMAINDER, metavar="…", help=hidden)
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
        # so that Python's flush at the end of the process does not fail again
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
        print(f"protofl: {fault_of(error, allowed_modules())}", file=sys.stderr)
        return 1


def program() -> NoReturn:
    """Run `main` as the program of a process, and end the process with its exit status."""
    if isinstance(sys.stdout, TextIOWrapper):
        # "?" for a character that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")
    for number in (signal.SIGTERM, signal.SIGHUP):
        # a killed `protofl` ends its run, as Ctrl-C does
        signal.signal(number, signal.default_int_handler)
    status = main()
    if status == STOPPED:
        sys.stdout.flush()
        os._exit(STOPPED)  # at once: sys.exit would wait for threads that wait for killed processes
    sys.exit(status)


def parser_of(command: str) -> ArgumentParser:
    """Return the parser of a subcommand; its file's docstring is the text of ``--help``."""
    module = import_module(f"{__name__}.{command}")
    parser = ArgumentParser(f"protofl {command}", description=module.__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    module.add_arguments(parser)
    return parser


def parsed(command: str, arguments: list[str]) -> Namespace:
    """Parse a subcommand's arguments; from now on the modules of ``--allow-python`` are allowed.

    Arguments that a command does not know end the process with status 2, unless the command hands
    them to Flower (`FOR_FLOWER`): then they are in the result as ``flowers``.
    """
    parser = parser_of(command)
    if command in WITH_ACTIONS:
        result, unknown = parser.parse_known_args(arguments)
    else:  # options and settings in any order, which argparse refuses to parsers with actions
        result, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown and command not in FOR_FLOWER:
        parser = getattr(result, "parser", parser)  # an action has a parser of its own
        hint = ""
        if "KEY=VALUE" in parser.format_usage():
            hint = "; settings are KEY=VALUE without dashes, such as rounds=5"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    result.flowers = unknown
    allow(names_in(getattr(result, "allow_python", "")))
    return result

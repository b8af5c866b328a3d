"""One federation, simulated by processes of this command: no SuperLink.

  protofl run algo=fedplvm rounds=20 --clients 20
  protofl run --recipe fedproto-mnist-3way data-dir=/data seed=2

Settings are written as key=value, without further quotes. A wrong setting is named before anything
starts. pyproject.toml has every key with its default and meaning under [tool.flwr.app.config]. The
command exits with 1 if the run failed; Ctrl-C stops the run. With --cluster the processes are on
the nodes of a Ray cluster. The figures are the same, to the last bit, as those of `flwr run`.
"""

import argparse
import json
import shlex
import shutil
import sys
from collections import deque
from contextlib import AbstractContextManager, redirect_stdout
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.status import Status
from rich.text import Text

from protofl_common.config.datasets import data_set_named
from protofl_common.config.options import Config, SettingsError
from protofl_common.config.sections import DataSettings
from protofl_common.data.store import open_data
from protofl_common.experiment.catalog import with_hparams
from protofl_common.experiment.settings import default_run_config
from protofl_common.runs.events import (
    Event,
    Failed,
    Finished,
    RoundDone,
    Started,
    Warned,
)
from protofl_common.tools.arguments import (
    add_allow_python,
    add_run_settings,
    check_settings,
    read_assignments,
    read_recipe,
)

MOST_RECENT = 40  # lines that are shown of a run that fails with --quiet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_settings(parser)
    parser.add_argument("--quiet", action="store_true", help="show the result only")
    add_resources(parser)
    add_allow_python(parser, "the recipe")
    lines = "a line of JSON per event, for programs (--quiet: the result alone)"
    parser.add_argument("--json", action="store_true", help=lines)


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how much of this machine, or a cluster, a client at work gets."""
    cpus = "CPUs for each client at work (the recipe's, else 1)"
    parser.add_argument("--cpus", type=int, metavar="N", help=cpus)
    gpus = "share of a GPU for each client that trains at once; default: by free memory"
    parser.add_argument("--gpus", type=float, metavar="F", help=gpus)
    cluster = "simulate on the machines of a Ray cluster, whose head is there (docs/machines.md)"
    parser.add_argument("--cluster", default="", metavar="HOST:PORT", help=cluster)


def with_resources(
    federation: Config, arguments: argparse.Namespace, clients: int | None
) -> Config:
    """Return the federation config, changed by the options of `add_resources` that are given.

    ``clients`` is how many clients there shall be, or None: then as many as ``federation`` says.
    SettingsError for a number that is out of range.
    """
    options = (
        ("--clients", "num-supernodes", clients, 1),
        ("--cpus", "client-resources-num-cpus", arguments.cpus, 1),
        ("--gpus", "client-resources-num-gpus", arguments.gpus, 0),
    )
    problems = []
    changed = dict(federation)
    for option, key, number, least in options:
        if number is None:
            continue
        if number < least:
            problems.append(f"{option} {number}: must be at least {least}")
        changed[key] = number
    if problems:
        raise SettingsError("\n".join(problems))
    if arguments.cluster:
        changed["cluster"] = arguments.cluster
    return changed


def act(arguments: argparse.Namespace) -> int:
    """Run the federation, and return 1 if it failed, else 0.

    The command line wins over the recipe, and the recipe over the defaults.
    """
    recipe = read_recipe(arguments.recipe)
    chosen = read_assignments(arguments.settings)
    config = with_hparams(default_run_config() | recipe.settings | chosen)
    settings = check_settings(config, chosen)
    clients = _clients(arguments, settings.data)
    federation = with_resources(recipe.federation, arguments, clients)
    from protofl_common.simulation.machine import engine_for  # PyTorch, two seconds

    # starts the processes of clients, before a thread draws on the screen (`simulation/pool.py`)
    engine_for(federation, settings.machine.device)
    run = _run_for_programs if arguments.json else _run_for_people
    ended = run(config, federation, arguments.quiet)
    return 1 if isinstance(ended, Failed) else 0


def _clients(arguments: argparse.Namespace, settings: DataSettings) -> int | None:
    """Return how many clients the command line asks for, or else a natural partition has.

    None if neither says, or a recipe does. The user's own data are read in any case: wrong ones are
    named now, and images are decoded before a client waits for them. DataError for data that cannot
    be read.
    """
    clients: int | None = arguments.clients
    nobody_says = clients is None and not arguments.recipe  # a recipe names a number
    data_say = settings.partition == "natural" and nobody_says  # a client for each domain
    data_set = data_set_named(settings.dataset)
    must_read = data_set.is_own or (data_say and data_set.has_domains)
    if not must_read:
        return clients

    data = open_data(settings)
    if data_say:
        return len(data.domain_names) or None  # None for the user's own data without domains
    return clients


def _run_for_people(config: Config, federation: Config, quiet: bool) -> Path | Failed:
    """Run the federation and show its events on the screen; if ``quiet``, its result alone.

    Return the run's folder, or how it failed: then a quiet screen's last events are printed, too.
    """
    from protofl_common.simulation.grid import attempt

    with Screen(quiet=quiet) as screen:
        ended = attempt(config, federation, screen)
        if isinstance(ended, Path):
            screen.conclude(f"{program()} predict {from_here(ended)}")
    if isinstance(ended, Failed):
        print(*screen.recent, "protofl: this run has failed", sep="\n", file=sys.stderr)
    return ended


def _run_for_programs(config: Config, federation: Config, quiet: bool) -> Path | Failed:
    """Run the federation, and print a line of JSON for each event; if ``quiet``, for the last only.

    Return the run's folder, or how it failed.
    """
    from protofl_common.simulation.grid import attempt

    stdout = sys.stdout

    def on_event(event: Event) -> None:
        if not quiet or isinstance(event, Finished | Failed):
            print(json.dumps(event.for_programs(), default=str), file=stdout, flush=True)

    if federation.get("cluster"):
        # a thread of Ray's prints what the nodes say until this process ends: that is no JSON
        sys.stdout = sys.stderr
    with redirect_stdout(sys.stderr):  # what the user's own code prints is no JSON either
        return attempt(config, federation, on_event)


class Screen(AbstractContextManager["Screen"]):
    """Shows the events of a run as lines, and its result.

    On a terminal its rounds are one live line, and the result stands in a box. After Ctrl-C it says
    how the run goes on.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        """Start the live line, if the console is a terminal and the screen not ``quiet``."""
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.quiet = quiet
        self.results: list[str] = []
        self.recent = deque[str](maxlen=MOST_RECENT)  # what a quiet screen shows if the run fails
        self.folder: Path | None = None
        self._live: Status | None = None
        is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        if is_live and not quiet:
            self._live = self.console.status("starting")
            self._live.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the live line; after Ctrl-C, which is not swallowed, say how to go on."""
        if self._live:
            self._live.stop()
        if kind is KeyboardInterrupt and self.folder:
            resume = self.folder / "resume.toml"
            if resume.exists():
                print(f"\nto go on: {program()} run --recipe {from_here(resume)}", file=sys.stderr)

    def __call__(self, event: Event) -> None:
        """Show an event of the run.

        The run's result is kept for `conclude`, and so are warnings on a quiet screen. In the live
        line, if there is one, each round replaces the one before. All else is printed at once,
        unless the screen is quiet.
        """
        text = str(event).strip("\n")
        if self.quiet:
            self.recent.append(text)
        if isinstance(event, Started):
            self.folder = event.folder
        if isinstance(event, Finished) or (self.quiet and isinstance(event, Warned)):
            self.results.append(text.replace(f"{Path.cwd()}/", ""))  # shorter paths
        elif self._live and isinstance(event, RoundDone):
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"))
        elif not self.quiet:
            self._print(text)

    def conclude(self, following: str) -> None:
        """Show the result, and the command to type next unless ``following`` is ""."""
        lines = list(self.results)
        if following:
            lines.append(f"next: {following}")
        if self._live:
            self._live.stop()
            box = Panel.fit(Text("\n".join(lines)), padding=(1, 2))
            self.console.print(box, soft_wrap=False)
        else:
            for line in lines:
                self._print(line)

    def _print(self, line: str) -> None:
        self.console.print(Text.from_ansi(line) if self.console.is_terminal else Text(line))


def program() -> str:
    """Return how to type this program in a shell: its name if the PATH has it, else its path."""
    file = Path(sys.executable).with_name("protofl")
    path = shutil.which("protofl")
    if path and Path(path).samefile(file):
        return "protofl"
    return from_here(file)


def from_here(path: Path) -> str:
    """Quote a path for a shell; it is relative where it is below the working directory."""
    return shlex.quote(str(path).replace(f"{Path.cwd()}/", ""))

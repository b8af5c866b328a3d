"""One federation, simulated on this machine by processes of this command: no SuperLink, no Ray.

  protofl run algo=fedplvm rounds=20 --clients 20
  protofl run --recipe fedproto-mnist-3way data-dir=/data seed=2

Settings are key=value, without further quotes; a wrong one is named before anything starts. Every
key with its default and meaning stands in pyproject.toml under [tool.flwr.app.config]. Exits with 1
when the run failed; Ctrl-C stops it. The figures are those of Flower's own `flwr run` to the last
bit.
"""

import argparse
import re
import shlex
import shutil
import sys
import time
from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.status import Status
from rich.text import Text

from protofl_common.config.datasets import is_own
from protofl_common.config.options import Config, SettingsError
from protofl_common.config.sections import DataSettings
from protofl_common.data.sources import check_data_settings, source_of
from protofl_common.data.store import open_data
from protofl_common.experiment.node import check_named
from protofl_common.experiment.settings import (
    Settings,
    baselines_of,
    check_settings_act,
    default_run_config,
)
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.cli.arguments import (
    add_allow_python,
    add_json,
    print_json,
    read_assignments,
    read_recipe,
)

ROUND = re.compile(r"(\S.*: )?round +(\d+)/\d+ ")
MOST_RECENT = 40
RESULT = re.compile(r"(result|results|report): ")
_CLIENTS = (
    "number of clients (the recipe's, else 10, or as many as your data name for partition=natural)"
)


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    recipe = "a recipe, or a TOML file, below the settings"
    parser.add_argument("--recipe", default="", metavar="NAME", help=recipe)
    parser.add_argument("--clients", type=int, metavar="N", help=_CLIENTS)
    parser.add_argument("--quiet", action="store_true", help="show the result only")
    add_resources(parser)
    add_allow_python(parser, "the recipe")
    add_json(parser)


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the share of this machine that a client at work gets."""
    cpus = "CPUs for each client at work (the recipe's, else 1)"
    parser.add_argument("--cpus", type=int, metavar="N", help=cpus)
    gpus = "share of a GPU for each client that trains at once; default: by free memory"
    parser.add_argument("--gpus", type=float, metavar="F", help=gpus)


def with_resources(
    federation: Config, arguments: argparse.Namespace, clients: int | None
) -> Config:
    """Return ``federation`` with what the command line says.

    SettingsError when a number is out of range.
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
    return changed


def act(arguments: argparse.Namespace) -> int:
    recipe = read_recipe(arguments.recipe)
    chosen = read_assignments(arguments.settings)
    config = default_run_config() | recipe.settings | chosen
    settings = check_settings(config, chosen)
    clients = _clients(arguments, settings.data)
    federation = with_resources(recipe.federation, arguments, clients)
    from protofl_common.simulation.grid import attempt  # PyTorch and Flower, two seconds
    from protofl_common.simulation.machine import workers_for

    # before a thread draws on the screen (`simulation/pool.py`)
    workers_for(federation, settings.machine.device)
    console = None
    if arguments.json:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
    began = time.time()
    try:
        with Screen(quiet=arguments.quiet, console=console) as screen:
            folder, reason = attempt(config, federation, screen)
            if folder:
                screen.conclude(f"{program()} predict {from_here(folder)}")
    except KeyboardInterrupt:
        _say_how_to_go_on(settings, began)
        raise

    if arguments.json:
        _print_result(folder)
    if reason:
        shown = list(screen.recent)
        if arguments.quiet and reason not in "\n".join(screen.recent):
            shown.append(reason)
        print(*shown, "protofl: this run has failed", sep="\n", file=sys.stderr)
    return 0 if folder else 1


def _clients(arguments: argparse.Namespace, settings: DataSettings) -> int | None:
    """Return how many clients there shall be, by the command line or the data; None: neither says.

    Data that will be needed are opened: wrong ones are named now, and images are decoded while
    nobody waits for them.
    """
    clients: int | None = arguments.clients
    is_unsaid = clients is None and not arguments.recipe
    by_data = settings.partition == "natural" and is_unsaid
    is_needed = is_own(settings.dataset) or (by_data and source_of(settings.dataset).has_domains)
    if not is_needed:
        return clients

    data = open_data(settings)
    if by_data:
        return len(data.domain_names) or None
    return clients


def _say_how_to_go_on(settings: Settings, began: float) -> None:
    """Print the command that goes on with a run that was stopped, if it has a checkpoint."""
    written = {}
    for checkpoints in Path(settings.run.out_dir).expanduser().glob("*/checkpoints"):
        written[checkpoints.stat().st_mtime] = checkpoints
    latest = max(written, default=0.0)
    if latest < began:
        return

    folder = written[latest].parent
    for algo in settings.baselines:  # the run that a baseline belongs to
        main = folder.with_name(folder.name.removesuffix(f"-{algo}"))
        if main != folder and (main / "resume.toml").exists():
            folder = main
            break
    recipe = from_here(folder / "resume.toml")
    print(f"\nto go on: {program()} run --recipe {recipe}", file=sys.stderr)


def _print_result(folder: Path | None) -> None:
    if folder:
        summary = RunFolder(folder).summary()
        result = {"status": "finished:completed", "folder": str(folder), "summary": summary}
    else:
        result = {"status": "failed", "folder": None, "summary": None}
    print_json("run", result)


class Screen(AbstractContextManager["Screen"]):
    """Shows a run: the ServerApp's lines, and its result.

    On a terminal its rounds are one live line, and the result stands in a box.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.quiet = quiet
        self.results: list[str] = []
        self.recent = deque[str](maxlen=MOST_RECENT)  # what a quiet screen shows if the run fails
        self._live: Status | None = None
        is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        if is_live and not quiet:
            self._live = self.console.status("starting")
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, line: str) -> None:
        """Take a line of the ServerApp.

        Lines of the result are kept until the end. A round replaces the one before in the live
        line; all else is printed at once, unless the screen is quiet.
        """
        if self.quiet:
            self.recent.append(line)
        is_warning = self.quiet and line.startswith("warning: ")
        if RESULT.match(line) or is_warning:
            self.results.append(line.replace(f"{Path.cwd()}/", ""))
            if self._live:
                self._live.update("drawing the page")
        elif self._live and ROUND.match(line):
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif not self.quiet and line.strip():
            self._print(line)

    def conclude(self, following: str) -> None:
        """Show the result, the paths that matter, and the command to type next, if any."""
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
    """Return the words that start this program here: its name alone if a shell finds that."""
    file = Path(sys.executable).with_name("protofl")
    path = shutil.which("protofl")
    if path and Path(path).samefile(file):
        return "protofl"
    return from_here(file)


def from_here(path: Path) -> str:
    return shlex.quote(str(path).replace(f"{Path.cwd()}/", ""))


def check_settings(config: Config, chosen: Config) -> Settings:
    """Return the settings of a run.

    SettingsError or DataError if one is wrong, or ``chosen`` in vain, or data are missing.
    """
    settings = Settings.from_run_config(config)
    check_settings_act(chosen, settings)
    baselines_of(settings, config)
    check_named(config)
    check_data_settings(settings.data)
    check_data_are_here(settings.data)
    return settings


def check_data_are_here(settings: DataSettings) -> None:
    """DataError when the files are missing and cannot be downloaded into a ``data-dir``.

    Nothing is downloaded.
    """
    if not (settings.download and settings.data_dir):
        source_of(settings.dataset).locate(settings)

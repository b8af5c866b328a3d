"""One federation, simulated on this machine by processes of this command: no SuperLink, no Ray.

  protofl run algo=fedplvm rounds=20 --clients 20
  protofl run --recipe fedproto-mnist-3way data-dir=/data seed=2

Settings are key=value, without further quotes; a wrong one is named before anything starts. Every key with its default
and meaning stands in pyproject.toml under [tool.flwr.app.config]. Exits with 1 when the run failed; Ctrl-C stops it.
The figures are those of Flower's own `flwr run` to the last bit.
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
from protofl_common.experiment.settings import Settings, baselines_of, check_chosen, default_run_config
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.cli.arguments import add_allow_python, add_json, print_json, read_assignments, read_recipe

ROUND = re.compile(r"(\S.*: )?round +(\d+)/\d+ ")
MOST_RECENT = 40
RESULT = re.compile(r"(result|results|report): ")
_CLIENTS = "number of clients (the recipe's, else 10, or as many as your data name for partition=natural)"


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("--recipe", default="", metavar="NAME", help="a recipe, or a TOML file, below the settings")
    parser.add_argument("--clients", type=int, metavar="N", help=_CLIENTS)
    parser.add_argument("--quiet", action="store_true", help="show the result only")
    add_resources(parser)
    add_allow_python(parser, "the recipe")
    add_json(parser)


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Arguments for the share of this machine that a client at work gets; the same for every command that simulates."""
    parser.add_argument("--cpus", type=int, metavar="N", help="CPUs for each client at work (the recipe's, else 1)")
    share = "share of a GPU for each client that trains at once; default: by free memory"
    parser.add_argument("--gpus", type=float, metavar="F", help=share)


def with_resources(federation: Config, arguments: argparse.Namespace, clients: int | None) -> Config:
    """``federation`` with what the command line says; SettingsError when a number is out of range."""
    asked = {"clients": (clients, 1), "cpus": (arguments.cpus, 1), "gpus": (arguments.gpus, 0)}
    given = {name: limits for name, limits in asked.items() if limits[0] is not None}
    if wrong := [f"--{name} {n}: must be at least {least}" for name, (n, least) in given.items() if n < least]:
        raise SettingsError("\n".join(wrong))
    keys = {"clients": "num-supernodes", "cpus": "client-resources-num-cpus", "gpus": "client-resources-num-gpus"}
    return federation | {keys[name]: number for name, (number, _) in given.items()}


def act(arguments: argparse.Namespace) -> int:
    recipe, chosen = read_recipe(arguments.recipe), read_assignments(arguments.settings)
    config = default_run_config() | recipe.settings | chosen
    settings, clients = checked(config, chosen), arguments.clients
    counts = settings.data.partition == "natural" and clients is None and not arguments.recipe
    if is_own(settings.data.dataset) or (counts and source_of(settings.data.dataset).has_domains):
        data = open_data(settings.data)  # wrong ones are named now, and images are decoded while nobody waits for them
        clients = (len(data.domain_names) or None) if counts else clients
    federation = with_resources(recipe.federation, arguments, clients)
    from protofl_common.tools.local import attempt, workers_for  # PyTorch and Flower, two seconds

    workers_for(federation, settings.machine.device)  # before a thread draws on the screen (`local.pool`)
    console = Console(stderr=True, highlight=False, soft_wrap=True) if arguments.json else None
    began = time.time()
    try:
        with Screen(quiet=arguments.quiet, console=console) as screen:
            folder, reason = attempt(config, federation, screen)
            if folder:
                screen.conclude(f"{program()} predict {from_here(folder)}")
    except KeyboardInterrupt:
        written = {at.stat().st_mtime: at for at in Path(settings.run.out_dir).expanduser().glob("*/checkpoints")}
        if (latest := max(written, default=0.0)) >= began:
            folder = written[latest].parent
            mains = [folder.with_name(folder.name.removesuffix(f"-{algo}")) for algo in settings.baselines]
            folder = next((main for main in mains if main != folder and (main / "resume.toml").exists()), folder)
            print(f"\nto go on: {program()} run --recipe {from_here(folder / 'resume.toml')}", file=sys.stderr)
        raise
    if arguments.json:
        status, summary = "finished:completed" if folder else "failed", RunFolder(folder).summary() if folder else None
        print_json("run", {"status": status, "folder": folder and str(folder), "summary": summary})
    if reason:
        shown = [*screen.recent, *([reason] if arguments.quiet and reason not in "\n".join(screen.recent) else [])]
        print(*shown, "protofl: this run has failed", sep="\n", file=sys.stderr)
    return 0 if folder else 1


class Screen(AbstractContextManager["Screen"]):
    """Shows a run: the ServerApp's lines, on a terminal one live line for its rounds, and a box at the end."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.quiet = quiet
        self.results: list[str] = []
        self.recent = deque[str](maxlen=MOST_RECENT)  # lines that a quiet screen shows where the run fails
        self._live: Status | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal and not quiet:
            self._live = self.console.status("starting")
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, line: str) -> None:
        if self.quiet:
            self.recent.append(line)
        if RESULT.match(line) or (self.quiet and line.startswith("warning: ")):
            self.results.append(line.replace(f"{Path.cwd()}/", ""))
            if self._live:
                self._live.update("drawing the page")
        elif self._live and ROUND.match(line):
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif not self.quiet and line.strip():
            self._print(line)

    def conclude(self, following: str) -> None:
        """Show the result, the paths that matter, and the command to type next, if any."""
        lines = [*self.results, *([f"next: {following}"] if following else [])]
        if self._live:
            self._live.stop()
            self.console.print(Panel.fit(Text("\n".join(lines)), padding=(1, 2)), soft_wrap=False)
        else:
            for line in lines:
                self._print(line)

    def _print(self, line: str) -> None:
        self.console.print(Text.from_ansi(line) if self.console.is_terminal else Text(line))


def program() -> str:
    """Return the words that start this program from here: its name alone where a shell finds that."""
    file = Path(sys.executable).with_name("protofl")
    path = shutil.which("protofl")
    return "protofl" if path and Path(path).samefile(file) else from_here(file)


def from_here(path: Path) -> str:
    return shlex.quote(str(path).replace(f"{Path.cwd()}/", ""))


def checked(config: Config, chosen: Config) -> Settings:
    """The settings of a run; SettingsError or DataError if one is wrong, or ``chosen`` in vain, or data are missing."""
    settings = Settings.from_run_config(config)
    check_chosen(chosen, settings)
    baselines_of(settings, config)
    check_named(config)
    check_data_settings(settings.data)
    check_data_are_here(settings.data)
    return settings


def check_data_are_here(settings: DataSettings) -> None:
    """DataError when the files are missing and cannot be downloaded into a ``data-dir``; downloads nothing."""
    if not (settings.download and settings.data_dir):
        source_of(settings.dataset).locate(settings)

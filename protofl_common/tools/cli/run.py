"""One federation, simulated by processes of this command: no SuperLink.

  protofl run algo=fedplvm rounds=20 --clients 20
  protofl run --recipe fedproto-mnist-3way data-dir=/data seed=2

Settings are written as key=value, without further quotes. A wrong setting is named before anything
starts. pyproject.toml has every key with its default and meaning under [tool.flwr.app.config]. The
command exits with 1 if the run failed; Ctrl-C stops the run. With --cluster the processes are on
the nodes of a Ray cluster. The figures are the same, to the last bit, as those of `flwr run`.
"""

import json
import shlex
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections import deque
from contextlib import redirect_stdout
from pathlib import Path

from protofl_common.config.datasets import data_set_named
from protofl_common.config.options import Config, SettingsError
from protofl_common.config.sections import DataSettings
from protofl_common.data.store import open_data
from protofl_common.experiment.catalog import with_hparams
from protofl_common.experiment.settings import default_run_config
from protofl_common.runs.events import Event, Failed, Finished, Started, Warned
from protofl_common.tools.arguments import (
    add_allow_python,
    add_run_settings,
    check_settings,
    read_assignments,
    read_recipe,
)

MOST_RECENT = 40  # lines that are shown of a run that fails with --quiet


def add_arguments(parser: ArgumentParser) -> None:
    add_run_settings(parser)
    parser.add_argument("--quiet", action="store_true", help="show the result only")
    add_resources(parser)
    add_allow_python(parser, "the recipe")
    lines = "a line of JSON per event, for programs (--quiet: the result alone)"
    parser.add_argument("--json", action="store_true", help=lines)


def add_resources(parser: ArgumentParser) -> None:
    """Add the options that say how much of this machine, or a cluster, a client at work gets."""
    cpus = "CPUs for each client at work (the recipe's, else 1)"
    parser.add_argument("--cpus", type=int, metavar="N", help=cpus)
    gpus = "share of a GPU for each client that trains at once; default: by free memory"
    parser.add_argument("--gpus", type=float, metavar="F", help=gpus)
    cluster = "simulate on the machines of a Ray cluster, whose head is there (docs/machines.md)"
    parser.add_argument("--cluster", default="", metavar="HOST:PORT", help=cluster)


def with_resources(federation: Config, arguments: Namespace, clients: int | None) -> Config:
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


def act(arguments: Namespace) -> int:
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


def _clients(arguments: Namespace, settings: DataSettings) -> int | None:
    """Return how many clients the command line asks for, or else a natural partition has.

    None if neither says, or a recipe does. The user's own data are read in any case: wrong ones are
    named now, and images are decoded before a client waits for them. DataError for data that cannot
    be read.
    """
    clients: int | None = arguments.clients
    nobody_says = clients is None and not arguments.recipe  # a recipe names a number
    data_say = settings.partition == "natural" and nobody_says  # a client for each domain
    data_set = data_set_named(settings.dataset)
    if data_set.is_own or (data_say and data_set.has_domains):
        domains = open_data(settings).domain_names
        if data_say:
            return len(domains) or None  # None for the user's own data without domains
    return clients


def _run_for_people(config: Config, federation: Config, quiet: bool) -> Path | Failed:
    """Run the federation and print its events; if ``quiet``, its warnings and its result alone.

    Return the run's folder, or how it failed: then the last events that were not shown are printed,
    too. After Ctrl-C, say how the run goes on.
    """
    from protofl_common.simulation.grid import attempt

    screen = Screen(quiet)
    try:
        ended = attempt(config, federation, screen)
    except KeyboardInterrupt:
        if screen.resume and screen.resume.exists():
            resume = from_here(screen.resume)
            print(f"\nto go on: {program()} run --recipe {resume}", file=sys.stderr)
        raise
    if isinstance(ended, Failed):
        print(*screen.hidden, "protofl: this run has failed", sep="\n", file=sys.stderr)
    else:
        print(f"next: {program()} predict {from_here(ended)}")
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


class Screen:
    """Prints the events of a run; if ``quiet``, only warnings and the result."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.hidden = deque[str](maxlen=MOST_RECENT)  # the last events that were not printed
        self.resume: Path | None = None  # the file that resumes the run, once it has begun

    def __call__(self, event: Event) -> None:
        text = str(event).strip("\n")
        if isinstance(event, Started):
            self.resume = event.folder / "resume.toml"
        if self.quiet and not isinstance(event, Warned | Finished):
            self.hidden.append(text)
        else:
            print(text.replace(f"{Path.cwd()}/", ""))  # shorter paths


def program() -> str:
    """Return how to type this program in a shell: its name if the PATH has it, else its path."""
    if shutil.which("protofl"):
        return "protofl"
    return from_here(Path(sys.executable).with_name("protofl"))


def from_here(path: Path) -> str:
    """Quote a path for a shell; it is relative where it is below the working directory."""
    return shlex.quote(str(path).replace(f"{Path.cwd()}/", ""))

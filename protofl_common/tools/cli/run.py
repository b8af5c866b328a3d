"""One federation, simulated on this machine.

The ServerApp and the clients run in processes of this command: no SuperLink, no Ray. With --engine flower, on a Ray of
several machines and where clients share a GPU it is a thin layer over ``flwr run``, whose command --verbose shows. The
figures are the same to the last bit.

  protofl run algo=fedplvm rounds=20 --clients 20
  protofl run --recipe fedproto-mnist-3way data-dir=/data seed=2

Settings are key=value, without further quotes; a wrong one is named before anything starts. Every key with its default
and meaning stands in pyproject.toml under [tool.flwr.app.config]. Exits with 1 when the run failed; Ctrl-C stops it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from protofl_common.config.datasets import is_own
from protofl_common.config.options import Scalar, SettingsError
from protofl_common.config.sections import DataSettings
from protofl_common.data import check_data_settings
from protofl_common.data.sources import source_of
from protofl_common.data.store import open_data
from protofl_common.experiment.node import check_named
from protofl_common.experiment.settings import Settings, baselines_of, default_run_config
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.cli.as_json import add_json, print_json
from protofl_common.tools.cli.assignments import add_allow_python, as_run_config, read_assignments
from protofl_common.tools.cli.cluster import absolute_folders, check_cluster
from protofl_common.tools.cli.flower import flwr_run, follow, get_ready, here, is_local, shown
from protofl_common.tools.cli.gpus import with_gpu
from protofl_common.tools.cli.recipes import read_recipe
from protofl_common.tools.cli.screen import Screen
from protofl_common.tools.cli.superlink import SuperLink

NEXT = "protofl run dataset=image-folder data-dir=FOLDER"
"""What to type after a run: the own images, in a folder for each class."""


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument(
        "--recipe", default="", metavar="NAME", help="configs/recipes/NAME.toml, or a TOML file, below the settings"
    )
    parser.add_argument(
        "--clients",
        type=int,
        metavar="N",
        help="number of clients (the recipe's, else 10, or as many as your data name for partition=natural)",
    )
    parser.add_argument("--quiet", action="store_true", help="show the result only")
    parser.add_argument("--verbose", action="store_true", help="show Flower's command and all that it says")
    parser.add_argument(
        "--cluster", default="", metavar="ADDRESS", help="use the Ray of several machines at HOST:PORT (ray start)"
    )
    add_resources(parser)
    add_engine(parser)
    add_allow_python(parser, "the recipe")
    add_json(parser)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the choice of what simulates; the same for every command that does."""
    parser.add_argument(
        "--engine",
        choices=("auto", "local", "flower"),
        default="auto",
        help="local: processes of this command; flower: SuperLink and Ray; auto: local, unless clients share a GPU",
    )


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Arguments for the share of this machine that a client at work gets; the same for every command that simulates."""
    parser.add_argument("--cpus", type=int, metavar="N", help="CPUs per client at work (the recipe's, else 1)")
    parser.add_argument(
        "--gpus", type=float, metavar="F", help="part of a GPU per client at work (the recipe's, else as suits it)"
    )


def with_resources(
    federation: dict[str, Scalar], arguments: argparse.Namespace, clients: int | None
) -> dict[str, Scalar]:
    """``federation`` with what the command line says; SettingsError when a number is out of range."""
    problems = [
        f"--{name} {value}: must be at least 1"
        for name, value in (("clients", clients), ("cpus", arguments.cpus))
        if value is not None and value < 1
    ]
    if arguments.gpus is not None and arguments.gpus < 0:
        problems.append(f"--gpus {arguments.gpus}: must be at least 0")
    if problems:
        raise SettingsError("\n".join(problems))
    said = {
        "num-supernodes": clients,
        "client-resources-num-cpus": arguments.cpus,
        "client-resources-num-gpus": arguments.gpus,
    }
    return federation | {key: value for key, value in said.items() if value is not None}


def act(arguments: argparse.Namespace) -> int:
    """Check the settings, run, and tell whether it went well."""
    recipe = read_recipe(arguments.recipe)
    given = read_assignments(arguments.settings)
    base_config = default_run_config() | recipe.settings
    settings = Settings.from_run_config(base_config | given)
    if arguments.cluster:
        given |= absolute_folders(settings)
        settings = Settings.from_run_config(base_config | given)
    baselines_of(settings, base_config | given)
    check_named(base_config | given)
    check_data_settings(settings.data)
    check_data_are_here(settings.data)
    clients = arguments.clients
    if own_data := is_own(settings.data.dataset):
        data = open_data(settings.data)  # wrong ones are named now, and images are decoded while nobody waits for them
        if settings.data.partition == "natural" and clients is None and not arguments.recipe:
            clients = len(data.domain_names) or None
    if arguments.cluster:
        check_cluster(arguments.cluster, settings)
    federation = with_resources(recipe.federation, arguments, clients)
    if not arguments.cluster:  # whose GPUs this machine does not see
        federation = with_gpu(federation, settings.machine.device)
    local = not arguments.cluster and is_local(arguments.engine, federation)
    if local:
        get_ready(federation)
    console = Console(stderr=True, highlight=False, soft_wrap=True) if arguments.json else None
    following, began = "" if own_data else NEXT, time.time()
    try:
        with Screen(quiet=arguments.quiet, verbose=arguments.verbose, console=console) as screen:
            if local:
                ended = here(base_config | given, federation, screen)
                if ended.well:
                    screen.conclude(following)
            else:
                alone = arguments.recipe and not given  # Flower does not take a file and pairs together
                run_config = str(recipe.path) if alone else as_run_config(recipe.settings | given)
                command = flwr_run(run_config, federation)
                with SuperLink(arguments.cluster) as superlink:
                    if arguments.verbose:
                        screen(f"$ {shown(command, superlink)}")
                    ended = follow(command, superlink, screen)
                    if ended.well:  # shown before the SuperLink has stopped, which takes seconds
                        screen.conclude(following)
    except KeyboardInterrupt:
        if resumable := _resumable(Path(settings.run.out_dir), began):
            print(f"\nto go on: protofl run --recipe {resumable}", file=sys.stderr)
        raise
    if arguments.json:
        summary = RunFolder(ended.folder).summary() if ended.folder else None
        print_json("run", {"status": ended.status, "folder": ended.folder and str(ended.folder), "summary": summary})
    if not ended.well:
        if not screen.explained:
            print(ended.reason, file=sys.stderr)
        print(f"protofl: this run has failed ({ended.status})", file=sys.stderr)
    return 0 if ended.well else 1


def _resumable(out_dir: Path, since: float) -> Path | None:
    """Return the file that lets the run go on which has begun ``since`` and has a finished round."""
    files = [file for file in out_dir.glob("*/resume.toml") if file.stat().st_mtime >= since]
    finished = [file for file in files if any((file.parent / "checkpoints").glob("*"))]
    return max(finished, key=lambda file: file.stat().st_mtime, default=None)


def check_data_are_here(settings: DataSettings) -> None:
    """DataError when the data set's files are missing and may not be downloaded; downloads nothing."""
    locate = source_of(settings.dataset).locate
    if locate and not settings.download:
        locate(settings)

"""The SuperLink's worker: the server's half of each run, with the code that is installed here.

  protofl worker --runtime-api-address HOST:PORT [--root-certificates FILE | --insecure]
      [--superexec-auth-secret-file FILE] [--out-dir FOLDER] [--allow-python NAMES]

It stands beside flower-superlink --isolation process, in the place of flower-superexec, whose options it takes, but
which would have the code of whoever submits a run executed on this machine. Whatever a run brings, protofl worker uses
of it only the settings that it changes; it chooses the folder of all results, readable by its user only, and takes no
task but a ServerApp's.
"""

import argparse
import os
import re
import sys
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from protofl_common.basics.files import make_private
from protofl_common.basics.text import names_in
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allow_only
from protofl_common.experiment.settings import app_folder, default_run_config
from protofl_common.tools.cli.arguments import add_allow_python

RUNTIME = "flwr.superlink.runtime.run_serverapp"  # a module, hidden by a function of the same name


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments; those it does not know are flower-superexec's."""
    parser.add_argument("--out-dir", default="runs", type=Path, help="where the folders of runs are made (runs)")
    add_allow_python(parser, "the settings of any run (callback, dataset)")


def act(arguments: argparse.Namespace) -> None:
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.constant import TaskType

    from protofl_common.tools.executor import Executor, in_place_of_flowers, own_code

    if not re.fullmatch(r"([\w.]+(, *|$))*", arguments.allow_python):
        raise SettingsError(f"--allow-python {arguments.allow_python}: must be names of modules, with commas")
    make_private(out_dir := arguments.out_dir.expanduser().absolute())
    if not (out_dir.is_dir() and os.access(out_dir, os.W_OK)):
        raise SettingsError(f"--out-dir {out_dir}: is no folder that this user can write to")
    script = [__file__, str(out_dir), arguments.allow_python]
    os.environ.update(own_code())
    sys.argv = ["flower-superexec", *arguments.flowers]
    # both fail here, not in each run's process, where Flower is of another version
    with installed_code(str(out_dir)), in_place_of_flowers(Executor(TaskType.SERVER_APP, script)):
        flower_superexec()


def installed_code(out_dir: str) -> AbstractContextManager[object]:
    """Put the installed code and defaults in the bundle's place; an error where another Flower has no such names."""
    ours: dict[str, Any] = {
        "install_from_fab": lambda *_, **__: None,
        "get_fab_metadata": lambda _: ("", ""),
        "get_project_dir": lambda *_: app_folder(),
        "get_fused_config_from_dir": lambda _, override: default_run_config() | override | {"out-dir": out_dir},
        "run_": _run_installed,
    }
    patched: AbstractContextManager[object] = patch.multiple(import_module(RUNTIME), **ours)
    return patched


def _run_installed(grid: Any, context: Any, **_: Any) -> Any:
    from server_app.app import app

    app(grid=grid, context=context)
    return context


if __name__ == "__main__":
    # The process of a run: python -P worker.py OUT-DIR MODULES, then flwr-serverapp's arguments. Its settings may name
    # MODULES (with commas) and no others, and only this user can read what it writes.
    from flwr.superlink.cli import flwr_serverapp

    _, out_dir, modules, *sys.argv[1:] = sys.argv
    os.umask(0o077)
    allow_only(names_in(modules))
    with installed_code(out_dir):
        flwr_serverapp()

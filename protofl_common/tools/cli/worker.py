"""The SuperLink's worker: the server's half of each run, with the code that is installed here.

  protofl worker --runtime-api-address HOST:PORT [--root-certificates FILE | --insecure]
      [--superexec-auth-secret-file FILE] [--out-dir FOLDER] [--allow-python NAMES]

It stands beside flower-superlink --isolation process, in the place of flower-superexec, whose
options it takes. Of what a run brings it uses only the settings that the run changes; it chooses
the folder of all results, readable by its user only, and takes no task but a ServerApp's. A run
that a crash has ended goes on by itself.
"""

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from protofl_common.basics.files import make_private
from protofl_common.config.lists import names_in
from protofl_common.config.options import Config, SettingsError
from protofl_common.config.python_names import allow_only
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import app_folder, default_run_config
from protofl_common.tools.arguments import add_allow_python

AHEAD = ("server_app.app", "torch", "httpcore", "filelock")
"""Modules that the process of every run needs, imported before it is forked."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the worker's own options; all others are handed to flower-superexec."""
    where = "where the folders of runs are made (runs)"
    parser.add_argument("--out-dir", default="runs", type=Path, help=where)
    add_allow_python(parser, "the settings of any run (callback, dataset)")


def act(arguments: Namespace) -> None:
    """Be the worker: start the thread that resumes crashed runs, and run Flower's loop to its end.

    SettingsError for an option that is wrong, and where Flower lacks a name that is needed.
    """
    from protofl_common.tools.executor import START_METHOD, Executor, environment_of_own_code
    from protofl_common.tools.flower import (
        TaskType,
        console_script,
        handing_tasks_to,
        require_for_worker,
    )
    from protofl_common.tools.resuming import Resuming

    modules = arguments.allow_python
    if not re.fullmatch(r"([\w.]+(, *|$))*", modules):
        raise SettingsError(f"--allow-python {modules}: must be names of modules, with commas")
    out_dir = arguments.out_dir.expanduser().absolute()
    make_private(out_dir)
    if not (out_dir.is_dir() and os.access(out_dir, os.W_OK)):
        raise SettingsError(f"--out-dir {out_dir}: is no folder that this user can write to")

    require_for_worker()  # here, so that it fails now and not in each run's process
    # this file is also the script that handles a run
    script = [__file__, str(out_dir), modules, START_METHOD]
    executor = Executor(TaskType.SERVER_APP, script)
    os.environ.update(environment_of_own_code())
    Resuming(arguments.flowers, out_dir).start()
    sys.argv = ["flower-superexec", *arguments.flowers]
    with handing_tasks_to(executor):
        console_script("flower-superexec")()


def installed_code(out_dir: str) -> AbstractContextManager[None]:
    """While the context is open, have ``flwr-serverapp`` run the installed code, not the bundle's.

    The settings of a run are the installed defaults, changed by those that it was submitted with;
    its results are always in ``out_dir``.
    """
    from protofl_common.tools.flower import serverapp_process

    def settings(_: object, override: Config) -> Config:
        return {**default_run_config(), **override, "out-dir": out_dir}

    def run(grid: Any, context: Any, **_: Any) -> Any:
        from server_app.app import app

        app(grid=grid, context=context)
        return context

    return serverapp_process(app_folder(), settings, run)


def handle(out_dir: str, arguments: list[str]) -> None:
    """Handle one run: be ``flwr-serverapp`` with these arguments, with the installed code."""
    from protofl_common.tools.flower import console_script

    sys.argv[1:] = arguments
    with installed_code(out_dir):
        console_script("flwr-serverapp")()


if __name__ == "__main__":
    # The process of a run: python -P worker.py OUT-DIR MODULES fork|spawn. Its settings may name
    # MODULES (with commas) and no others, and only this user can read what it writes.
    from protofl_common.tools.flower import require_for_worker
    from protofl_common.tools.task_process import handle_tasks, import_ahead

    _, folder, allowed, start_method = sys.argv
    os.umask(0o077)
    allow_only(names_in(allowed))
    halves = [row.server for row in CATALOG.values()]
    prepare = partial(import_ahead, AHEAD, require_for_worker, halves)
    handle_tasks(start_method, prepare, partial(handle, folder))

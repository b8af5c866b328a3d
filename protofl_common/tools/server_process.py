"""The process of one run at the SuperLink: ``flwr-serverapp``, but with the code that is installed there.

    python -P server_process.py OUT-DIR MODULES …

The rest are arguments of ``flwr-serverapp``. Flower would unpack and import the bundle that the run brought. Here
nothing of it is used: settings are the installed defaults and what the run says in their place, except its ``out-dir``.
Settings may name the Python modules MODULES (with commas) and no others. Only this user can read what is written.
"""

import os
import sys
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from flwr.app import Context
from flwr.serverapp import Grid
from flwr.superlink.cli import flwr_serverapp

from protofl_common.basics.text import names_in
from protofl_common.config.python_names import allow_only
from protofl_common.experiment.settings import app_folder, default_run_config

RUNTIME = import_module("flwr.superlink.runtime.run_serverapp")  # hidden by a function of the same name


def run_installed(grid: Grid, context: Context, **_: Any) -> Context:
    """Run the installed ServerApp where Flower would load that of a bundle."""
    from server_app.app import app

    app(grid=grid, context=context)
    return context


def installed_code(out_dir: str) -> AbstractContextManager[object]:
    """Put the installed code and settings in the bundle's place; an error where another Flower has no such names."""
    ours: dict[str, Any] = {
        "install_from_fab": lambda *_, **__: None,
        "get_fab_metadata": lambda _: ("", ""),
        "get_project_dir": lambda *_: app_folder(),
        "get_fused_config_from_dir": lambda _, override: default_run_config() | override | {"out-dir": out_dir},
        "run_": run_installed,
    }
    patched: AbstractContextManager[object] = patch.multiple(RUNTIME, **ours)
    return patched


if __name__ == "__main__":
    _, out_dir, modules, *sys.argv[1:] = sys.argv
    os.umask(0o077)
    allow_only(names_in(modules))
    with installed_code(out_dir):
        flwr_serverapp()

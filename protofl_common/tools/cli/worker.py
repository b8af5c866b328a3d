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
from pathlib import Path

from protofl_common.basics.files import make_private
from protofl_common.config.options import SettingsError
from protofl_common.tools.cli.arguments import add_allow_python


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments; those it does not know are flower-superexec's."""
    parser.add_argument("--out-dir", default="runs", type=Path, help="where the folders of runs are made (runs)")
    add_allow_python(parser, "the settings of any run (callback, dataset)")


def act(arguments: argparse.Namespace) -> None:
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.constant import TaskType

    from protofl_common.tools import server_process
    from protofl_common.tools.executor import Executor, in_place_of_flowers, own_code

    if not re.fullmatch(r"([\w.]+(, *|$))*", arguments.allow_python):
        raise SettingsError(f"--allow-python {arguments.allow_python}: must be names of modules, with commas")
    make_private(out_dir := arguments.out_dir.absolute())
    if not (out_dir.is_dir() and os.access(out_dir, os.W_OK)):
        raise SettingsError(f"--out-dir {out_dir}: is no folder that this user can write to")
    script = [str(server_process.__file__), str(out_dir), arguments.allow_python]
    os.environ.update(own_code())
    sys.argv = ["flower-superexec", *arguments.flowers]
    # both fail here, not in each run's process, where Flower is of another version
    with server_process.installed_code(str(out_dir)), in_place_of_flowers(Executor(TaskType.SERVER_APP, script)):
        flower_superexec()

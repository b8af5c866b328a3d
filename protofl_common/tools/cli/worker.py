"""The SuperLink's worker: the server's half of each run, with the code that is installed here.

  protofl worker --runtime-api-address 127.0.0.1:8001 --root-certificates certs/ca.crt \\
      --superexec-auth-secret-file certs/superexec.secret --out-dir runs

It stands beside flower-superlink --isolation process, in the place of flower-superexec, which would have the code of
whoever submits a run executed on this machine. Whatever a run brings, protofl worker uses of it only the settings that
it changes; it chooses the folder of all results, readable by its user only, and takes no task but a ServerApp's.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from protofl_common.basics.files import make_private
from protofl_common.basics.text import names_in
from protofl_common.config.options import SettingsError
from protofl_common.tools.cli.arguments import add_allow_python

FILES = ("root_certificates", "superexec_auth_secret_file")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtime-api-address", required=True, metavar="HOST:PORT", help="where the SuperLink listens on this machine"
    )
    trust = parser.add_mutually_exclusive_group()
    trust.add_argument("--root-certificates", metavar="FILE", help="the authority of the SuperLink's certificate")
    trust.add_argument("--insecure", action="store_true", help="without TLS, to a SuperLink that is --insecure, too")
    parser.add_argument(
        "--superexec-auth-secret-file", metavar="FILE", help="the secret that the SuperLink has been given, too"
    )
    parser.add_argument(
        "--out-dir", default="runs", metavar="FOLDER", help="where the folders of runs are made (default: runs)"
    )
    add_allow_python(parser, "the settings of any run (callback, dataset)")


def act(arguments: argparse.Namespace) -> int:
    _check(arguments)
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.constant import TaskType

    from protofl_common.tools import server_process
    from protofl_common.tools.executor import Executor, in_place_of_flowers, own_code

    make_private(out_dir := Path(arguments.out_dir).absolute())
    script = [str(server_process.__file__), str(out_dir), arguments.allow_python]
    os.environ.update(own_code())
    sys.argv = ["flower-superexec", "--runtime-api-address", arguments.runtime_api_address]
    sys.argv += ["--insecure"] if arguments.insecure else []
    for option in filter(vars(arguments).get, FILES):
        sys.argv += [_option(option), getattr(arguments, option)]
    # both fail here, not in each run's process, where Flower is of another version
    with server_process.installed_code(str(out_dir)), in_place_of_flowers(Executor(TaskType.SERVER_APP, script)):
        flower_superexec()
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """SettingsError with one line for the first option that cannot work."""
    if not re.fullmatch(r".+:\d+", arguments.runtime_api_address):
        raise SettingsError(f"--runtime-api-address {arguments.runtime_api_address}: must be HOST:PORT")
    for option in filter(vars(arguments).get, FILES):
        if not Path(file := getattr(arguments, option)).is_file() or not os.access(file, os.R_OK):
            raise SettingsError(f"{_option(option)} {file}: is no file that this user can read")
    out_dir = Path(arguments.out_dir)
    if out_dir.exists() and not (out_dir.is_dir() and os.access(out_dir, os.W_OK)):
        raise SettingsError(f"--out-dir {out_dir}: is no folder that this user can write to")
    for module in names_in(arguments.allow_python):
        if not MODULE.fullmatch(module):
            raise SettingsError(f"--allow-python {module}: is no name of a module; give names such as mynets.vision")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

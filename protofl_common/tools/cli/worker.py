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
from protofl_common.config.options import SettingsError
from protofl_common.tools.cli.arguments import add_allow_python

ADDRESS = "--runtime-api-address"
FILES = {
    "--root-certificates": "the authority of the SuperLink's certificate",
    "--superexec-auth-secret-file": "the secret that the SuperLink has been given, too",
}


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(ADDRESS, dest=ADDRESS, required=True, metavar="HOST:PORT", help="where the SuperLink listens")
    for option, about in FILES.items():
        parser.add_argument(option, dest=option, metavar="FILE", help=about)
    parser.add_argument("--insecure", action="store_true", help="without TLS, to a SuperLink that is --insecure, too")
    parser.add_argument(
        "--out-dir", default="runs", type=Path, help="where the folders of runs are made (default: runs)"
    )
    add_allow_python(parser, "the settings of any run (callback, dataset)")


def act(arguments: argparse.Namespace) -> int:
    given = {option: value for option, value in vars(arguments).items() if option in (ADDRESS, *FILES) and value}
    _check(given, arguments)
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.constant import TaskType

    from protofl_common.tools import server_process
    from protofl_common.tools.executor import Executor, in_place_of_flowers, own_code

    make_private(out_dir := arguments.out_dir.absolute())
    script = [str(server_process.__file__), str(out_dir), arguments.allow_python]
    os.environ.update(own_code())
    sys.argv = ["flower-superexec", *(word for pair in given.items() for word in pair)]
    sys.argv += ["--insecure"] if arguments.insecure else []
    # both fail here, not in each run's process, where Flower is of another version
    with server_process.installed_code(str(out_dir)), in_place_of_flowers(Executor(TaskType.SERVER_APP, script)):
        flower_superexec()
    return 0


def _check(given: dict[str, str], arguments: argparse.Namespace) -> None:
    """SettingsError for the first option that cannot work."""
    if not re.fullmatch(r".+:\d+", given[ADDRESS]):
        raise SettingsError(f"{ADDRESS} {given[ADDRESS]}: must be HOST:PORT")
    for option in FILES:
        if option in given and not (Path(given[option]).is_file() and os.access(given[option], os.R_OK)):
            raise SettingsError(f"{option} {given[option]}: is no file that this user can read")
    if arguments.insecure and "--root-certificates" in given:
        raise SettingsError("--insecure: not together with --root-certificates")
    if (out_dir := arguments.out_dir).exists() and not (out_dir.is_dir() and os.access(out_dir, os.W_OK)):
        raise SettingsError(f"--out-dir {out_dir}: is no folder that this user can write to")
    if not re.fullmatch(r"([\w.]+(, *|$))*", arguments.allow_python):
        raise SettingsError(f"--allow-python {arguments.allow_python}: must be names of modules, with commas")

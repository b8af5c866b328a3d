"""The SuperNode of ``protofl site run``, and the executor that asks it for work and starts a process for each message.

    python -m protofl_common.tools.site.supernode ADDRESS fork|spawn SUPERNODE-PID    the secret on standard input

That is the executor (`tools/executor.py`). The SuperNode is Flower's, in the process of the command: it starts nothing.
"""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from flwr.supercore.constant import TaskType
from flwr.supercore.exit import ExitCode, flwr_exit
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.run import Run
from flwr.supercore.superexec import run_superexec
from flwr.supercore.utils import get_flwr_home
from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

from protofl_common.basics.files import make_private
from protofl_common.config.options import Scalar
from protofl_common.experiment.settings import app_folder, default_run_config
from protofl_common.tools.executor import Executor, in_place_of_flowers, own_code

HASTE = 0.1  # part of Flower's own pause before it looks again, and of the time it has waited, that a pause takes
CLIENT_PROCESS = Path(__file__).with_name("client_process.py")


def start(words: list[str], address: str, start_method: str) -> None:
    """Start the executor that ``flower-supernode`` listens for at ``address``, and be the SuperNode until it ends."""
    make_private(get_flwr_home())  # as `protofl site check` says; Flower lets everybody look in
    secret, name = os.urandom(32), "protofl_common.tools.site.supernode"
    command = [sys.executable, "-P", "-m", name, address, start_method, str(os.getpid())]
    executor = subprocess.Popen(command, stdin=subprocess.PIPE, env=own_code())  # which `protofl site check` names
    assert executor.stdin is not None
    executor.stdin.write(secret)
    executor.stdin.close()
    reading, writing = os.pipe()
    os.write(writing, secret)
    os.close(writing)
    sys.argv = ["flower-supernode", *words, "--isolation", "process"]
    sys.argv += ["--superexec-auth-secret-file", f"/dev/fd/{reading}"]
    ours: dict[str, Any] = {"time": SimpleNamespace(sleep=Pauses()), "get_fused_config_from_fab": settings_of}
    soon = partial(pull_objects, initial_backoff=0.05)  # Flower waits a second for a late part
    with patch.multiple(start_client_internal, pull_objects=soon, **ours):  # an error where Flower has no such names
        flower_supernode()
    # It returns when the SuperLink refuses a request for good; the thread that it leaves would keep the process, idle.
    flwr_exit(ExitCode.SUPERNODE_CONNECTION_ERROR, "The connection to the SuperLink broke; the error above says why.")


def settings_of(bundle: bytes, run: Run) -> dict[str, Scalar]:
    """A run's settings: the defaults of the installed code, and what the run says in their place.

    Flower would read the defaults in the run's bundle: it would unpack what a stranger has packed, in the process that
    stands between all runs, and end when it cannot. A key that is unknown is for the ClientApp to refuse.
    """
    return default_run_config() | run.override_config


class Pauses:
    """Shorten the SuperNode's sleep: at first to a tenth of Flower's, later to a tenth of what it has waited.

    Flower asks for work every 3 seconds and looks for the reply every 0.5, which each round waits for.
    """

    def __init__(self) -> None:
        self.usual, self.since = 0.0, 0.0  # what Flower would sleep, which says what it waits for; since when

    def __call__(self, usual: float) -> None:
        now = time.monotonic()
        if usual != self.usual:
            self.usual, self.since = usual, now
        time.sleep(min(usual, HASTE * max(usual, now - self.since)))


if __name__ == "__main__":
    _, link, method, supernode = sys.argv
    shared_secret = sys.stdin.buffer.read()
    with in_place_of_flowers(Executor(TaskType.CLIENT_APP, [str(CLIENT_PROCESS), str(app_folder())], method)):
        run_superexec.run_superexec(link, insecure=True, superexec_auth_secret=shared_secret, parent_pid=int(supernode))

"""The SuperNode of ``protofl site run``, and the executor that asks it for work and starts a process for each message.

    python -m protofl_common.tools.site.supernode ADDRESS fork|spawn SUPERNODE-PID    the secret on standard input

is the executor: ``flower-superexec``, with processes of our own. Flower's own would start whatever kind of task a run
asks for, and for a message a process that imports the bundle that the run brought: the code of whoever submitted it.
This one knows messages for a ClientApp only, and its processes (`client_process`) run the code that is installed here.
The SuperNode is Flower's, in the process of the command, with ``--isolation process``: it starts nothing.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from flwr.supercore.constant import TaskType
from flwr.supercore.run import Run
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

from protofl_common.config.options import Scalar
from protofl_common.experiment.settings import app_folder, default_run_config

HASTE = 0.1  # part of Flower's own pause before it looks again, and of the time it has waited, that a pause takes
CLIENT_PROCESS = Path(__file__).with_name("client_process.py")


def start(words: list[str], address: str, start_method: str) -> None:
    """Start the executor that ``flower-supernode`` listens for at ``address``, and be the SuperNode until it ends."""
    secret, name = os.urandom(32), "protofl_common.tools.site.supernode"
    command = [sys.executable, "-P", "-m", name, address, start_method, str(os.getpid())]
    # the code of this process, which `protofl site check` names, not that of the folder it is started in
    code = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))}
    executor = subprocess.Popen(command, stdin=subprocess.PIPE, env=code)
    assert executor.stdin is not None
    executor.stdin.write(secret)
    executor.stdin.close()
    sys.argv = ["flower-supernode", *words, "--isolation", "process"]
    sys.argv += ["--superexec-auth-secret-file", _pipe_with(secret)]
    ours: dict[str, Any] = {"time": SimpleNamespace(sleep=Pauses()), "get_fused_config_from_fab": settings_of}
    with patch.multiple(start_client_internal, **ours):  # an error where another version of Flower has no such names
        flower_supernode()


def settings_of(bundle: bytes, run: Run) -> dict[str, Scalar]:
    """A run's settings: the defaults of the installed code, and what the run says in their place.

    Flower would read the defaults in the run's bundle: it would unpack what a stranger has packed, in the process that
    stands between all runs, and end when it cannot. A key that is unknown is for the ClientApp to refuse.
    """
    return default_run_config() | run.override_config


class Pauses:
    """Shorten the SuperNode's sleep: at first to a tenth of Flower's, later to a tenth of what it has waited.

    Flower asks for work every 3 seconds and looks for the reply every 0.5, which each round waits for. So a site that
    waits long asks as seldom as Flower's own, and what a round waits for a site is at most a tenth of what it did wait.
    """

    def __init__(self) -> None:
        self.usual, self.since = 0.0, 0.0  # what Flower would sleep, which says what it waits for; since when

    def __call__(self, usual: float) -> None:
        now = time.monotonic()
        if usual != self.usual:
            self.usual, self.since = usual, now
        time.sleep(min(usual, HASTE * max(usual, now - self.since)))


def _pipe_with(secret: bytes) -> str:
    reading, writing = os.pipe()
    os.write(writing, secret)
    os.close(writing)
    return f"/dev/fd/{reading}"


class Executor(SubprocessExecutor):
    """Starts `client_process` for each message, or, with ``method`` "fork", has one that has imported all fork."""

    def __init__(self, method: str) -> None:
        self.command = [sys.executable, "-P", str(CLIENT_PROCESS), str(app_folder())]
        self.method = method
        self.forking: subprocess.Popen[str] | None = None

    def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[TaskType], set[str]]:
        return {TaskType.CLIENT_APP}, set()

    def reconcile(self) -> None:
        """Before each question for work: start the process that forks, unless it is there."""
        if self.method == "fork" and (self.forking is None or self.forking.poll() is not None):
            self.forking = subprocess.Popen(self.command, stdin=subprocess.PIPE, text=True)

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process; installing what an app asks for is never passed on to it."""
        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed(f"a task of kind {spec.task_type}: this site runs ClientApps only")
        arguments = ["--insecure", "--token", spec.token]
        arguments += ["--runtime-api-address", spec.runtime_api_address, "--parent-pid", str(spec.parent_pid)]
        if self.forking is None:
            subprocess.Popen([*self.command, *arguments])
        else:
            print(json.dumps(arguments), file=self.forking.stdin, flush=True)
        return LaunchResult.accepted()


def execute() -> None:
    address, method, supernode = sys.argv[1:]
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    secret = sys.stdin.buffer.read()
    with patch.object(run_superexec, "get_executor", lambda *_, **__: Executor(method)):
        run_superexec.run_superexec(address, insecure=True, superexec_auth_secret=secret, parent_pid=int(supernode))


if __name__ == "__main__":
    execute()

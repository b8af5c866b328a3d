"""Asks a SuperNode for work and starts a process for each message: ``flower-superexec``, with processes of our own.

    python -m protofl_common.tools.site.executor ADDRESS fork|spawn SUPERNODE-PID    the secret on standard input

Flower's own would start whatever kind of task a run asks for; this one knows messages for a ClientApp only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

from protofl_common.experiment.settings import app_folder

CLIENT_PROCESS = Path(__file__).with_name("client_process.py")


class Executor(SubprocessExecutor):
    """Starts `client_process` for each message, or, with ``method`` "fork", has one that has imported all fork."""

    def __init__(self, method: str) -> None:
        self.command = [sys.executable, "-P", str(CLIENT_PROCESS), str(app_folder())]
        self.method = method
        self.forking: subprocess.Popen[str] | None = None

    def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[TaskType], set[str]]:
        """The kinds of tasks to ask for."""
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


def main() -> None:
    """Work until the SuperNode ends."""
    address, method, supernode = sys.argv[1:]
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    secret = sys.stdin.buffer.read()
    with patch.object(run_superexec, "get_executor", lambda *_, **__: Executor(method)):
        run_superexec.run_superexec(address, insecure=True, superexec_auth_secret=secret, parent_pid=int(supernode))


if __name__ == "__main__":
    main()

"""Asks a SuperNode for work and starts a process for each message: ``flower-superexec``, with processes of our own.

    python -m protofl_common.tools.site.executor ADDRESS ALLOW SUPERNODE-PID    the secret comes on standard input

Flower's own would start whatever kind of task a run asks for; this one knows messages for a ClientApp only.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

from protofl_common.settings import app_folder

CLIENT_PROCESS = Path(__file__).with_name("client_process.py")


class Executor(SubprocessExecutor):
    """Starts `client_process` for each message; ``allow`` is one of its arguments."""

    def __init__(self, allow: str) -> None:
        self.allow = allow

    def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[TaskType], set[str]]:
        """The kinds of tasks to ask for."""
        return {TaskType.CLIENT_APP}, set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process; installing what an app asks for is never passed on to it."""
        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed(f"a task of kind {spec.task_type}: this site runs ClientApps only")
        command = [sys.executable, "-P", str(CLIENT_PROCESS), str(app_folder()), self.allow]
        command += ["--insecure", "--token", spec.token]
        command += ["--runtime-api-address", spec.runtime_api_address, "--parent-pid", str(spec.parent_pid)]
        subprocess.Popen(command)
        return LaunchResult.accepted()


def main() -> None:
    """Work until the SuperNode ends."""
    address, allow, supernode = sys.argv[1:]
    secret = sys.stdin.buffer.read()
    with patch.object(run_superexec, "get_executor", lambda *_, **__: Executor(allow)):
        run_superexec.run_superexec(address, insecure=True, superexec_auth_secret=secret, parent_pid=int(supernode))


if __name__ == "__main__":
    main()

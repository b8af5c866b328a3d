"""The executor of a site, and of a worker: it asks Flower for tasks, and starts a process for each.

Flower's own starts whatever kind of task a run asks for, and for it a process that unpacks and
imports the bundle that the run brought: the code of whoever submitted it. This one knows a single
kind of task, and its processes (`site/client_process`, `cli/worker`) run the code that is
installed here.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import getproxies, getproxies_environment

from protofl_common.tools.flower import ExecutionSpec, LaunchResult, SubprocessExecutor, TaskType
from protofl_common.tools.task_process import written_task

HAS_NVIDIA = Path("/dev/nvidiactl").exists()
START_METHOD = "fork" if sys.platform == "linux" and not HAS_NVIDIA else "spawn"
"""What a task starts by default: a copy of a process that has imported all, or a fresh one."""


class Executor(SubprocessExecutor):
    """Starts a Python script for each task of a ``kind``.

    The script reads the task from standard input (`tools/task_process.py`). With the ``method``
    "fork" it is started ahead, and forks for each.
    """

    def __init__(self, kind: TaskType, script: Sequence[str], method: str = START_METHOD) -> None:
        self.kind = kind
        self.method = method
        self.command = [sys.executable, "-P", *script]
        self.forking: subprocess.Popen[str] | None = None

    def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[TaskType], set[str]]:
        return {self.kind}, set()

    def reconcile(self) -> None:
        """Before each question for work: start the process that forks, unless it is there."""
        if self.method != "fork":
            return
        if self.forking is None or self.forking.poll() is not None:
            self.forking = self._started()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process, and hand over its arguments by its standard input.

        The token among them would let whoever reads it answer in the task's place, and any user of
        the machine may read the command line of a process. Flower's option to install what an app
        depends on is not passed on.
        """
        if spec.task_type != self.kind:
            kinds = f"a task of kind {spec.task_type}: only those of kind {self.kind} run here"
            return LaunchResult.failed(kinds)
        process = self.forking or self._started()
        assert process.stdin is not None
        try:
            print(written_task(_arguments(spec)), file=process.stdin, flush=True)
            if process is not self.forking:
                process.stdin.close()
        except BrokenPipeError:
            return LaunchResult.failed("the process of the task ended before it had read the task")
        return LaunchResult.accepted()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command, stdin=subprocess.PIPE, text=True)


def _arguments(spec: ExecutionSpec) -> list[str]:
    """Return the arguments of ``flwr-clientapp`` and ``flwr-serverapp`` for this task."""
    options = {
        "token": spec.token,
        "runtime-api-address": spec.runtime_api_address,
        "parent-pid": spec.parent_pid,
    }
    if not spec.insecure:
        options["root-certificates"] = spec.root_certificates_path
    arguments = [f"--{name}={value}" for name, value in options.items() if value]
    if spec.insecure:
        arguments.append("--insecure")
    return arguments


def environment_of_own_code() -> dict[str, str]:
    """Return an environment with this process's code, not the working directory's.

    It has no proxy for loopback, and lets Flower's loop ask for tasks ten times a second.
    """
    proxies = getproxies_environment()
    system_proxies = {}
    if not proxies:  # macOS then has its own, which no_proxy alone would switch off
        system_proxies = {f"{scheme}_proxy": url for scheme, url in getproxies().items()}

    without_proxy = proxies.get("no", "")
    if without_proxy != "*":
        without_proxy = f"127.0.0.1,localhost,::1,{without_proxy}".rstrip(",")
    paths = [path for path in sys.path if os.path.isabs(path)]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "no_proxy": without_proxy}
    defaults = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", **system_proxies}
    return {**defaults, **os.environ, **ours}

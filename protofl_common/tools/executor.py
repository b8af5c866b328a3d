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
from urllib.request import getproxies_environment

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
        """Start nothing yet; ``script`` is a Python script's file, followed by its arguments."""
        self.kind = kind
        self.method = method
        self.command = [sys.executable, "-P", *script]  # -P: no import from the script's folder
        self.forking: subprocess.Popen[str] | None = None

    def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[TaskType], set[str]]:
        return {self.kind}, set()

    def reconcile(self) -> None:
        """Start the process that forks for each task, unless it is there.

        Flower calls this each time before it asks for tasks. So the process has imported all it
        needs before the first task comes.
        """
        if self.method != "fork":
            return
        if self.forking is None or self.forking.poll() is not None:
            self.forking = self._start_process()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Give a task to the process that forks for each task, if there is one, else to a new one.

        The process reads the task's arguments from its standard input. They are not on its command
        line, which any user of the machine may read: whoever reads the token among them could
        answer in the task's place. Flower's option to install what an app depends on is not passed
        on. The result is a failure for a task of another kind, and if the process has ended.
        """
        if spec.task_type != self.kind:
            reason = f"a task of kind {spec.task_type}: only those of kind {self.kind} run here"
            return LaunchResult.failed(reason)
        process = self.forking or self._start_process()
        assert process.stdin is not None
        try:
            print(written_task(_arguments(spec)), file=process.stdin, flush=True)
            if process is not self.forking:  # that one will get further tasks
                process.stdin.close()
        except BrokenPipeError:
            return LaunchResult.failed("the process of the task ended before it had read the task")
        return LaunchResult.accepted()

    def _start_process(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command, stdin=subprocess.PIPE, text=True)


def _arguments(spec: ExecutionSpec) -> list[str]:
    """Return a task's arguments, as ``flwr-clientapp`` and ``flwr-serverapp`` take them."""
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
    """Return this process's environment, changed for the processes of tasks.

    They import the code that this process imports, and never that of the working directory. They
    reach this machine itself without a proxy. Flower's loop asks for tasks ten times a second,
    unless the operator has set another interval.
    """
    hosts_without_proxy = getproxies_environment().get("no", "")
    if hosts_without_proxy != "*":  # the sign for all hosts
        hosts_without_proxy = f"127.0.0.1,localhost,::1,{hosts_without_proxy}".rstrip(",")
    paths = [path for path in sys.path if os.path.isabs(path)]  # "" is the working directory
    ours = {"PYTHONPATH": os.pathsep.join(paths), "no_proxy": hosts_without_proxy}
    return {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", **os.environ, **ours}

"""The executor that asks Flower for tasks and starts a process of ours for each: that of a site, and that of a worker.

Flower's own starts whatever kind of task a run asks for, and for it a process that unpacks and imports the bundle that
the run brought: the code of whoever submitted it. This one knows a single kind of task, and its processes
(`site/client_process`, `cli/worker`) run the code that is installed here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch
from urllib.request import getproxies, getproxies_environment

from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor


class Executor(SubprocessExecutor):
    """Starts a Python script for each task of a ``kind``, or, with ``method`` "fork", has one that is ready fork."""

    def __init__(self, kind: TaskType, script: Sequence[str], method: str = "spawn") -> None:
        self.kind, self.method = kind, method
        self.command = [sys.executable, "-P", *script]
        self.forking: subprocess.Popen[str] | None = None

    def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[TaskType], set[str]]:
        return {self.kind}, set()

    def reconcile(self) -> None:
        """Before each question for work: start the process that forks, unless it is there."""
        if self.method == "fork" and (self.forking is None or self.forking.poll() is not None):
            self.forking = subprocess.Popen(self.command, stdin=subprocess.PIPE, text=True)

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process; Flower's option to install what an app depends on is not passed on to it."""
        if spec.task_type != self.kind:
            return LaunchResult.failed(f"a task of kind {spec.task_type}: only those of kind {self.kind} run here")
        given = {"token": spec.token, "runtime-api-address": spec.runtime_api_address, "parent-pid": spec.parent_pid}
        given |= {} if spec.insecure else {"root-certificates": spec.root_certificates_path}
        arguments = [f"--{key}={value}" for key, value in given.items() if value] + ["--insecure"] * spec.insecure
        if self.forking is None:
            subprocess.Popen([*self.command, *arguments])
        else:
            print(json.dumps(arguments), file=self.forking.stdin, flush=True)
        return LaunchResult.accepted()


def in_place_of_flowers(executor: Executor) -> AbstractContextManager[object]:
    """Have Flower's loop, which asks for tasks, hand them to ``executor``; an error where it has no such name."""
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    return patch.object(run_superexec, "get_executor", lambda *_, **__: executor)


def own_code() -> dict[str, str]:
    """Return the environment with this process's code, not the working directory's, and no proxy for loopback."""
    named = getproxies_environment()  # without any macOS has its own, which no_proxy alone would switch off
    system = {} if named else {f"{kind}_proxy": url for kind, url in getproxies().items()}
    direct = "*" if named.get("no") == "*" else f"127.0.0.1,localhost,::1,{named.get('no', '')}".rstrip(",")
    return system | os.environ | {"PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path)), "no_proxy": direct}

"""The SuperNode of ``protofl site run``: Flower's own, in this process, with an executor of ours that works for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import patch

from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

PAUSE = 1.0
"""Seconds before work is asked for again; flower-supernode's are 3, which a round waits for."""


def start(words: list[str], address: str, allow: str, start_method: str) -> None:
    """Start the executor, which ends when the SuperNode does, and be the SuperNode until it ends.

    ``words`` are options of ``flower-supernode``, ``address`` is where it listens for the executor; ``allow`` and
    ``start_method`` are the executor's.
    """
    secret, name = os.urandom(32), "protofl_common.tools.site.executor"
    command = [sys.executable, "-m", name, address, allow, start_method, str(os.getpid())]
    executor = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert executor.stdin is not None
    executor.stdin.write(secret)
    executor.stdin.close()
    sys.argv = ["flower-supernode", *words, "--isolation", "process"]
    sys.argv += ["--superexec-auth-secret-file", _pipe_with(secret)]
    hasty = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, PAUSE)))
    with patch.object(start_client_internal, "time", hasty):
        flower_supernode()


def _pipe_with(secret: bytes) -> str:
    """The name of a pipe from which this process reads ``secret`` once."""
    reading, writing = os.pipe()
    os.write(writing, secret)
    os.close(writing)
    return f"/dev/fd/{reading}"

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

HASTE = 0.1
"""Part of Flower's own pause before it looks again, and of the time it has waited, that a pause takes."""


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
    with patch.object(start_client_internal, "time", SimpleNamespace(sleep=Pauses())):
        flower_supernode()


class Pauses:
    """What the SuperNode sleeps: at first a tenth of what Flower would, later a tenth of what it has waited.

    Flower asks for work every 3 seconds and looks for the reply every 0.5, which each round waits for. So a site that
    waits long asks as seldom as Flower's own, and what a round waits for a site is at most a tenth of what it did wait.
    """

    def __init__(self) -> None:
        self.usual, self.since = 0.0, 0.0
        """What Flower would sleep, which says what it waits for, and since when it does."""

    def __call__(self, usual: float) -> None:
        """Sleep in the place of ``usual`` seconds."""
        now = time.monotonic()
        if usual != self.usual:
            self.usual, self.since = usual, now
        time.sleep(min(usual, HASTE * max(usual, now - self.since)))


def _pipe_with(secret: bytes) -> str:
    """The name of a pipe from which this process reads ``secret`` once."""
    reading, writing = os.pipe()
    os.write(writing, secret)
    os.close(writing)
    return f"/dev/fd/{reading}"

"""The SuperNode of ``protofl site run``: Flower's own, in this process, with an executor of ours that works for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from flwr.supercore.run import Run
from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

from protofl_common.config.options import Scalar
from protofl_common.experiment.settings import default_run_config

HASTE = 0.1
"""Part of Flower's own pause before it looks again, and of the time it has waited, that a pause takes."""


def start(words: list[str], address: str, start_method: str) -> None:
    """Start the executor, which ends when the SuperNode does, and be the SuperNode until it ends.

    ``words`` are options of ``flower-supernode``, ``address`` is where it listens for the executor, whose
    ``start_method`` is.
    """
    secret, name = os.urandom(32), "protofl_common.tools.site.executor"
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

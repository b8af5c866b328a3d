"""One ``flwr run``: submitted, followed, and its end looked up (``flwr run --stream`` exits 0 even when it failed)."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from protofl_common.config.options import Scalar
from protofl_common.tools.cli.assignments import as_run_config
from protofl_common.tools.cli.recipes import ROOT
from protofl_common.tools.cli.superlink import BIN, SuperLink

COMPLETED = "finished:completed"
KEPT_LINES = 60
CANNOT = "protofl: this run cannot go on"
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Ended:
    """How a run ended: Flower's status (``refused`` where Flower did not take it) and its last lines.

    Before these stands why it cannot go on, where our ServerApp has said so.
    """

    status: str
    tail: tuple[str, ...]

    @property
    def well(self) -> bool:
        """Whether it reached its end."""
        return self.status == COMPLETED

    @property
    def reason(self) -> str:
        """What went wrong, in one line: what our ServerApp said, else the last line."""
        lines = [line for line in map(_plain, self.tail) if line]
        said = [lines[i + 1] for i, line in enumerate(lines[:-1]) if line.startswith(CANNOT)]
        return said[-1] if said else f"{self.status}: {lines[-1] if lines else 'it said nothing'}"


def _plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line).strip()


def flwr_run(run_config: str, federation: Mapping[str, Scalar]) -> list[str]:
    """The command, as a person would type it in this folder."""
    app = "." if Path.cwd() == ROOT else str(ROOT)
    command = ["flwr", "run", app, "--stream", "--federation-config", as_run_config(federation)]
    return [*command, "--run-config", run_config] if run_config else command


def shown(command: list[str], superlink: SuperLink) -> str:
    """The exact command with the environment that belongs to it, to copy."""
    return shlex.join(["env", *(f"{key}={value}" for key, value in superlink.environment.items()), *command])


def follow(command: list[str], superlink: SuperLink, on_line: Callable[[str], None]) -> Ended:
    """Submit a run, hand on its log line by line, and wait for its end; KeyboardInterrupt stops the run first.

    ``command`` is that of `flwr_run`; the app that Flower packs is the SuperLink's copy.
    """
    tail: deque[str] = deque(maxlen=KEPT_LINES)
    said: list[str] = []
    run_id = ""
    process = subprocess.Popen(
        [str(BIN / "flwr"), "run", str(superlink.app), *command[3:]],
        env=superlink.full_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = re.search(r"Successfully started run (\d+)", line)
            run_id = found[1] if found and not run_id else run_id
            tail.append(line.rstrip("\n"))
            if _plain(line).startswith(CANNOT) or (len(said) == 1 and _plain(line)):
                said.append(line)  # what Ray says of its processes may be more than the lines that are kept
            on_line(line.rstrip("\n"))
        process.wait()
        return Ended(_status_at_end(run_id, superlink) if run_id else "refused", (*said, *tail))
    except KeyboardInterrupt:
        if run_id:
            _flwr(superlink, "stop", run_id)
            _status_at_end(run_id, superlink, STOP_SECONDS)
        raise
    finally:
        process.kill()
        process.wait()


def _status_at_end(run_id: str, superlink: SuperLink, patience: float = float("inf")) -> str:
    """The status once it is final: a run may outlive the connection that streams its log."""
    deadline = time.monotonic() + patience
    status = "unknown"
    while superlink.alive and time.monotonic() < deadline:
        listed = _flwr(superlink, "ls", "--run-id", run_id, "--format", "json")
        if listed.returncode == 0:
            status = str(json.loads(listed.stdout)["runs"][0]["status"])
            if status.startswith("finished"):
                return status
        time.sleep(1.0)
    return status if superlink.alive else "the SuperLink has died"


def _flwr(superlink: SuperLink, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "flwr"), *arguments]
    return subprocess.run(command, env=superlink.full_environment, capture_output=True, text=True, check=False)

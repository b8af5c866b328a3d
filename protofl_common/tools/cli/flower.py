"""One run, by ``flwr run``, whose end is looked up (``flwr run --stream`` exits 0 even when it failed), or in here."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from protofl_common.config.options import Scalar
from protofl_common.tools.cli.assignments import as_run_config
from protofl_common.tools.cli.gpus import KEY
from protofl_common.tools.cli.recipes import ROOT
from protofl_common.tools.cli.screen import FAILED
from protofl_common.tools.cli.superlink import BIN, SuperLink

COMPLETED = "finished:completed"
TAIL_LINES = 60
RESULTS = "results: "
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Ended:
    """How a run ended: Flower's status (``refused`` where Flower did not take it) and its last lines.

    Before these stands why it cannot go on, where our ServerApp has said so.
    """

    status: str
    tail: tuple[str, ...]
    folder: Path | None = None
    """Where its results are; None where they cannot be known, or it failed."""

    @property
    def well(self) -> bool:
        """Return whether it reached its end."""
        return self.status == COMPLETED

    @property
    def reason(self) -> str:
        """Say what went wrong in one line: the ServerApp's message, else the last line."""
        lines = [line for line in map(_plain, self.tail) if line]
        reasons = [lines[i + 1] for i, line in enumerate(lines[:-1]) if line.startswith(FAILED)]
        return reasons[-1] if reasons else f"{self.status}: {lines[-1] if lines else 'it said nothing'}"


def _plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line).strip()


def is_local(engine: str, federation: Mapping[str, Scalar]) -> bool:
    """Return whether the clients of ``federation`` are simulated by processes of this command."""
    return engine == "local" or (engine == "auto" and not federation.get(KEY))


def cpus_of(federation: Mapping[str, Scalar]) -> int:
    """Return how many processors each client at work gets."""
    return int(federation.get("client-resources-num-cpus", 1))


def get_ready(federation: Mapping[str, Scalar]) -> None:
    """Start the processes for `here`, before a thread draws on the screen (`local.pool`)."""
    from protofl_common.tools.local import workers_for

    workers_for(cpus_of(federation))


def here(run_config: Mapping[str, Scalar], federation: Mapping[str, Scalar], on_line: Callable[[str], None]) -> Ended:
    """Run a federation in processes of this one (`protofl_common/tools/local.py`); its lines go to ``on_line``."""
    from protofl_common.tools.local import simulate, workers_for  # PyTorch and Flower, two seconds

    tail: deque[str] = deque(maxlen=TAIL_LINES)

    def note(line: str) -> None:
        tail.append(line)
        on_line(line)

    clients, cpus = int(federation["num-supernodes"]), cpus_of(federation)
    try:
        return Ended(COMPLETED, (), simulate(run_config, clients, note, workers_for(cpus), cpus))
    except Exception as error:
        if FAILED not in tail:  # an error that no setting mends: of one's own code, perhaps
            for line in "".join(traceback.format_exception(error)).splitlines():
                note(line)
        return Ended("failed", tuple(tail))


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
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    reason: list[str] = []
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
            if _plain(line).startswith(FAILED) or (len(reason) == 1 and _plain(line)):
                reason.append(line)  # what Ray says of its processes may be more than the lines that are kept
            on_line(line.rstrip("\n"))
        process.wait()
        results = [line.removeprefix(RESULTS) for line in tail if line.startswith(RESULTS)]
        status = _status_at_end(run_id, superlink) if run_id else "refused"
        return Ended(status, (*reason, *tail), Path(results[-1]) if results else None)
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

"""Show a run's log and wait for its end: ``python follow.py RUN_ID``.

The exit status is 1 unless the run was completed.

A SuperLink that is gone for a while (a restart) is waited for, up to five minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

SILENCE_SECONDS = 300.0
"""Seconds without an answer from the SuperLink."""
PAUSE = 2.0
"""Seconds before it is asked again."""


def main(run: str) -> int:
    """Show the log while the run lasts; where it breaks off, ask why, and go on from there."""
    shown, answered = 0, time.monotonic()
    while time.monotonic() - answered < SILENCE_SECONDS:
        shown = show_log(run, shown)
        status = status_of(run)
        if status is not None:
            answered = time.monotonic()
            if status.startswith("finished"):
                print(f"run {run}: {status}")
                return int(status != "finished:completed")
        time.sleep(PAUSE)
    print(f"run {run}: no answer from the SuperLink for {SILENCE_SECONDS:.0f} s")
    return 1


def show_log(run: str, shown: int) -> int:
    """Print the log's lines after the first ``shown``; return how many are shown now."""
    command = ["flwr", "log", run, "federation", "--stream"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as log:
        assert log.stdout is not None
        for number, line in enumerate(log.stdout, start=1):
            if number > shown and line.endswith("\n"):
                print(line, end="", flush=True)
                shown = number
    return shown


def status_of(run: str) -> str | None:
    """What the SuperLink says of the run; None when it does not answer."""
    command = ["flwr", "ls", "federation", "--run-id", run, "--format", "json"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        answer = json.loads(listed.stdout)
        return str(answer["runs"][0]["status"]) if answer.get("success", True) else None
    except (subprocess.SubprocessError, ValueError, LookupError):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Runs whose process has died: the worker lets them go on, as ``flwr run`` with resume.toml would.

A run goes on by itself if a crash has ended it, of its process, the worker, or the machine. It does
not if somebody has stopped it (``flwr stop``) or resumed it since, if an error has ended it, which
would come again, or if the code has changed.
"""

import json
import os
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from protofl_common.basics.run_history import RunHistory
from protofl_common.experiment.node import code_at_server
from protofl_common.experiment.settings import app_folder, default_run_config
from protofl_common.tools.flower import Run, has_crashed, superlink_at
from protofl_common.tools.known_runs import (
    SECONDS_PER_DAY,
    KnownRun,
    main_run,
    runs_in,
    stopped_runs,
)
from protofl_common.tools.superlink import submissions_of

LOOK_SECONDS = 10.0  # between two looks
MOST_SECONDS = 7 * SECONDS_PER_DAY
"""Since the last round: who has waited longer has given the run up."""
MOST_SUBMISSIONS = 1000
FLWR = (
    sys.executable,
    "-P",
    "-c",
    "from protofl_common.tools.flower import console_script; console_script('flwr')()",
)
"""The command ``flwr`` of this Python; it may not be on the PATH."""
NAME = "superlink"  # of the connection, in a configuration of Flower's that is made for one call


class Resuming(threading.Thread):
    """Looks, as long as the worker lives, for runs that crashed, and submits each again once."""

    def __init__(self, options: list[str], out_dir: Path) -> None:
        """Take the SuperLink from ``options``, which are those of flower-superexec."""
        super().__init__(daemon=True)
        parser = ArgumentParser("protofl worker", add_help=False, allow_abbrev=False)
        parser.add_argument("--runtime-api-address", default="")
        parser.add_argument("--root-certificates", type=os.path.abspath)
        known, _ = parser.parse_known_args(options)
        self.address: str = known.runtime_api_address
        self.root_certificates: str | None = known.root_certificates
        self.out_dir = out_dir
        self.last_said = ""
        self.not_submitted: set[Path] = set()  # runs whose submission failed: it is not tried again

    def run(self) -> None:
        """Look for crashed runs again and again; an error is printed, and ends nothing."""
        while True:
            time.sleep(LOOK_SECONDS)
            try:
                self.look()
            except Exception as error:  # such as while the SuperLink is down
                self._say(f"cannot look after runs that stopped ({error})")

    def look(self) -> None:
        """Submit each run that a crash has ended once more, and print that."""
        runs = runs_in(self.out_dir)
        if not stopped_runs(runs):
            return
        superlink = superlink_at(NAME, self.address, self.root_certificates)
        for run in crashed_runs(runs, submissions_of(superlink, MOST_SUBMISSIONS)):
            if run.path in self.not_submitted:
                continue
            self._say(f"{run.path.name} has stopped without an error; it goes on by itself")
            try:
                self._submit(run.path / "resume.toml")
            except (OSError, subprocess.SubprocessError) as error:  # others must go on
                self.not_submitted.add(run.path)
                self._say(f"{run.path.name} does not go on by itself ({error})")

    def _submit(self, settings: Path) -> None:
        """Submit a run of the file ``settings`` to the worker's SuperLink, by ``flwr run``.

        Flower reads the connection from a configuration that is made for this call. OSError or
        SubprocessError if the call fails.
        """
        with TemporaryDirectory() as home:
            lines = [f"[superlink.{NAME}]", f"address = {json.dumps(self.address)}"]
            if self.root_certificates:
                certificates = json.dumps(str(self.root_certificates), ensure_ascii=False)
                lines.append(f"root-certificates = {certificates}")
            else:
                lines.append("insecure = true")
            Path(home, "config.toml").write_text("\n".join(lines), encoding="utf-8")
            subprocess.run(
                [*FLWR, "run", str(app_folder()), NAME, "--run-config", str(settings)],
                env={**os.environ, "FLWR_HOME": home},
                check=True,
            )

    def _say(self, text: str) -> None:
        """Print a line, unless it is the same as the last one, as it may be after every look."""
        if text != self.last_said:
            print(f"protofl: {text}", file=sys.stderr, flush=True)
        self.last_said = text


def crashed_runs(runs: list[KnownRun], submitted: list[Run]) -> list[KnownRun]:
    """Return those of ``runs`` that a crash has ended, and that may be submitted again.

    If a baseline has crashed, its main run is returned, which resumes it. ``submitted`` are
    Flower's runs, as the SuperLink knows them.
    """
    flower_runs = {run.run_id: run for run in submitted}
    # name of a run -> when it was last submitted to resume, as a text that sorts by time
    resumed_last: dict[Any, str] = {}
    for submission in submitted:
        config = submission.override_config
        if config.get("resume"):
            name = config.get("run-name")
            resumed_last[name] = max(resumed_last.get(name, ""), submission.pending_at)

    crashed: list[KnownRun] = []
    for run in stopped_runs(runs):
        facts = run.checkpoint_facts()
        if not facts:  # there is nothing to go on from
            continue
        history = RunHistory.parse(facts["run_history"])
        if not _may_go_on(run, facts, history):
            continue
        flower_run = flower_runs.get(history.run_id)
        if flower_run is None or not has_crashed(flower_run):
            continue
        main = main_run(run, runs)
        # somebody has submitted it since its last Flower run was submitted
        was_resumed = resumed_last.get(main.path.name, "") > flower_run.pending_at
        if not was_resumed and main not in crashed:
            crashed.append(main)
    return crashed


def _may_go_on(run: KnownRun, facts: dict[str, Any], history: RunHistory) -> bool:
    """Return whether a stopped run may go on by itself; ``facts`` are those of its checkpoint.

    If it was resumed before, it must have done a round since, or it would crash again and again;
    its last round must not be long ago; and the code must not have changed.
    """
    began_after = -1  # if it was never resumed, a checkpoint of any round will do
    if history.earlier:
        _, began_after = history.earlier[-1]  # the last round before it was resumed
    came_further = facts["round"] > began_after

    newest = run.checkpoints()[0]
    age = time.time() - newest.stat().st_mtime
    settings = {**default_run_config(), **facts["settings"]}
    has_same_code = facts["code"] == code_at_server(settings)
    return came_further and age < MOST_SECONDS and has_same_code

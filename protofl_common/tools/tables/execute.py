"""Runs one after another; what is finished is not repeated, what was interrupted goes on after its last round.

Several processes, on several machines too, may work on one folder: each run has a lock.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from protofl_common.config.options import Config
from protofl_common.experiment.settings import default_run_config, to_run_config
from protofl_common.runs.folder import SUMMARY, RunFolder
from protofl_common.tools.cli.run import ROUND
from protofl_common.tools.cli.runs import HEAVY
from protofl_common.tools.tables.plan import Run, experiment

Launch = Callable[[Run, Path, bool, Callable[[int], None]], str]  # (run, folder, resume, on_round) -> why it failed


class Runs:
    """All runs, and how those of now ended; without ``keep_models`` a finished one keeps only its figures.

    ``patience``: how many seconds to wait for another process that makes the same run; -1: until it has ended.
    """

    def __init__(self, folder: Path, keep_models: bool = False, patience: float = 0) -> None:
        self.folder, self.keep_models, self.patience = folder.resolve(), keep_models, patience
        self.failed: dict[str, str] = {}

    def folder_of(self, run: Run) -> Path:
        return self.folder / run.name

    def finished(self, run: Run) -> bool:
        """Return whether the run's folder holds a finished one with these settings and as many clients."""
        summary = RunFolder(self.folder_of(run)).summary()
        if summary is None:
            return False
        wanted, made = experiment(to_run_config(run.settings)), summary["settings"]
        same = all(made[key] == value for key, value in wanted.items() if key in made)
        return same and len(summary["clients"]) == run.federation["num-supernodes"]

    def lock(self, name: str) -> FileLock:
        logs = self.folder.parent / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return FileLock(logs / f".{name}.lock")

    def execute(self, run: Run, launch: Launch, on_round: Callable[[int], None]) -> bool:
        """Make a run unless it is finished; False where another process makes it."""
        try:
            with self.lock(run.name).acquire(self.patience):
                if not self.finished(run):
                    self._execute(run, launch, on_round)
        except Timeout:
            return False
        return True

    def _execute(self, run: Run, launch: Launch, on_round: Callable[[int], None]) -> None:
        folder = self.folder_of(run)
        resume = (folder / "checkpoints").exists() and not (folder / SUMMARY).exists()
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)  # what is there is of other defaults, or has no checkpoint
        reason = launch(run, self.folder, resume, on_round)
        if resume and reason.startswith("resume = true"):  # it cannot go on: of another version, or damaged
            shutil.rmtree(folder, ignore_errors=True)
            reason = launch(run, self.folder, False, on_round)
        if not reason and not self.finished(run):
            reason = f"it left no summary of these settings in {folder}"
        if reason:
            self.failed[run.name] = reason
        else:
            self.failed.pop(run.name, None)
            for part in () if self.keep_models else HEAVY:
                shutil.rmtree(folder / part, ignore_errors=True)


def launcher(resources: Callable[[Config], Config]) -> Launch:
    """Return what runs one, with a log in ``logs/NAME.log``; ``resources``: what a client gets of this machine."""

    def launch(run: Run, folder: Path, resume: bool, on_round: Callable[[int], None]) -> str:
        from protofl_common.tools.local import attempt  # PyTorch and Flower, two seconds

        config = run.config | {"out-dir": str(folder), "run-name": run.name} | ({"resume": True} if resume else {})
        log = folder.parent / "logs" / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file:

            def note(line: str) -> None:
                print(line, file=file, flush=True)
                if match := ROUND.match(line):
                    on_round(int(match[2]))

            return attempt(default_run_config() | config, resources(run.federation), note)[1]

    return launch

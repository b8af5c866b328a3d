"""A stand-in for what makes the runs of a table."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from protofl_common.runs.events import Failed
from protofl_common.tools.tables.plan import Run
from server_app.run.checkpoint import CannotResume

Which = Callable[[Run], bool]


def none(run: Run) -> bool:
    return False


class Launcher:
    """Notes each run that it gets, and calls ``finish``, which writes what a run leaves."""

    damaged = False  # True: a run that is to be resumed cannot be

    def __init__(self, broken: Which = none, interrupt_at: int = 0, **changes: Any) -> None:
        """Let runs fail that are ``broken``, and Ctrl-C stop the run number ``interrupt_at``.

        0 stops none. That run leaves a checkpoint. ``changes`` are attributes, such as ``damaged``.
        """
        self.runs: list[Run] = []
        self.resumed: list[str] = []
        self.broken = broken
        self.interrupt_at = interrupt_at
        vars(self).update(changes)

    @property
    def launched(self) -> list[str]:
        return [run.name for run in self.runs]

    def __call__(
        self, run: Run, folder: Path, resume: bool, on_round: Callable[[int], None]
    ) -> Failed | None:
        """Take the place of what makes one run: return its failure, or None if it has finished."""
        run_folder = folder / run.name
        assert run_folder.exists() is resume
        self.runs.append(run)
        if resume:
            self.resumed.append(run.name)
        if resume and self.damaged:
            return Failed(CannotResume.__name__, "the run was started with other settings")
        if len(self.runs) == self.interrupt_at:
            (run_folder / "checkpoints").mkdir(parents=True)
            (run_folder / "checkpoints/000001.safetensors").touch()
            raise KeyboardInterrupt
        if self.broken(run):
            return Failed("OSError", "it exploded")

        on_round(1)
        self.finish(run, run_folder)
        return None

    def finish(self, run: Run, folder: Path) -> None:
        raise NotImplementedError

"""Checkpoints: the server's state after every round, so that a run that was stopped can go on.

``<run>/checkpoints/000012.safetensors`` has the tensors that the algorithm names in its ``state``,
after round 12, and in its metadata, as JSON, the other fields of `Checkpoint`. The last
`KEPT_CHECKPOINTS` are kept: where the newest is damaged, the run goes on from the one before. Draws
of clients and seeds of their training are not stored, as they follow from the seed and the round.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from filelock import FileLock, Timeout

from protofl_common.basics.files import TensorFileError
from protofl_common.basics.run_history import RunHistory
from protofl_common.basics.tensorfile import read_tensors, write_tensors
from protofl_common.config.options import Scalar, SettingsError
from protofl_common.config.sections import keys_that_change
from protofl_common.runs.folder import CHECKPOINT_FORMAT, CHECKPOINTS, SETTINGS, RunFolder
from server_app.run.log import say

KEPT_CHECKPOINTS = 3  # Clients keep their states of as many rounds (`client_app/site/state.py`)

MAY_DIFFER = keys_that_change("name", "machine", "waiting", "display") - {"state-dir"}
"""Settings that a resumed run may change; with another state-dir, clients' models began anew."""


class CannotResume(SettingsError):
    """What a run left is of another version, or of other settings or data: it must begin anew."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after one of its rounds."""

    settings: dict[str, Scalar]
    run_history: RunHistory
    round: int = 0  # 0: before the first one
    sites: tuple[str, ...] = ()
    owners: dict[str, int] = field(default_factory=dict)
    """Site -> the Flower node that it is bound to."""
    counted: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Site -> the round of its last merged reply, and the part of it that was used."""
    num_partitions: int = 0
    """Clients among which the data set is divided; 0 where sites bring data of their own."""
    seconds: float = 0.0  # That the run has taken so far
    metrics_bytes: int = 0
    """Length of ``metrics.jsonl``; what follows there is of a round that does not count."""
    code: str = ""
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write this checkpoint into a run's ``folder``.

        Those of later rounds, and all but the last `KEPT_CHECKPOINTS`, are removed.
        """
        facts: dict[str, Any] = {**vars(self), "run_history": self.run_history.text}
        del facts["state"]
        path = folder / CHECKPOINTS / f"{self.round:06d}.safetensors"  # zeros, as names are sorted
        write_tensors(path, self.state, {"format": CHECKPOINT_FORMAT, "facts": json.dumps(facts)})
        for other in RunFolder(folder).checkpoints():
            if not self.round - KEPT_CHECKPOINTS < int(other.stem) <= self.round:
                other.unlink()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a checkpoint.

        Raises TensorFileError if the file is damaged, CannotResume if it is of another version.
        """
        state, metadata = read_tensors(path, torch.device("cpu"))
        version = metadata.get("format")
        if version != CHECKPOINT_FORMAT:
            raise CannotResume(
                f"resume = true: {path} is of the version {version}, not {CHECKPOINT_FORMAT}"
            )
        stored = json.loads(metadata["facts"])
        stored["run_history"] = RunHistory.parse(stored["run_history"])
        stored["sites"] = tuple(stored["sites"])
        return cls(**stored, state=state)


def newest_undamaged(folder: Path, complaint: str) -> Checkpoint:
    """Return the newest checkpoint in a run's folder that is undamaged.

    Raises TensorFileError, about the oldest, if all are damaged, and SettingsError, whose text
    begins with ``complaint``, if there is none at all.
    """
    newest_first = RunFolder(folder).checkpoints()
    if not newest_first:
        raise SettingsError(f"{complaint}, there is no checkpoint in {folder / CHECKPOINTS}")
    *newer, oldest = newest_first
    for path in newer:
        try:
            return Checkpoint.read(path)
        except TensorFileError as error:
            say(f"{error}; going back a round")
    return Checkpoint.read(oldest)  # behind it there is nothing to go back to


def check_free(folder: Path) -> None:
    """Raise SettingsError if the folder has a run."""
    if (folder / SETTINGS).exists():
        hint = "choose another name, or let it go on with resume = true"
        raise SettingsError(f"run-name = {folder.name!r}: {folder} holds a run already; {hint}")


def starting_point(config: dict[str, Scalar], code: str, folder: Path, run_id: int) -> Checkpoint:
    """Return the checkpoint from which a run begins: a new one, or with ``resume`` its newest.

    ``config`` are the run's settings, ``code`` the version of the code that computes. Raises
    SettingsError if the folder has a run already, or with ``resume`` none that can go on. If the
    code or the machine's settings differ from those before, the run says so and goes on.
    """
    if not config["resume"]:
        check_free(folder)
        return Checkpoint(config, RunHistory(run_id), code=code)
    newest = newest_undamaged(folder, complaint="resume = true: nothing to resume")
    check_same(newest.settings, config, folder)
    if newest.code != code:
        say(
            "resuming with other code: "
            f"the run's last round was made by {newest.code}, this is {code}"
        )
    for key in ("device", "precision", "threads"):
        before = newest.settings[key]
        if config[key] != before:
            say(
                f"resuming with {key} = {config[key]}: the run has {key} = {before}; "
                "figures may differ in their last digits"
            )
    run_history = newest.run_history.continued_by(run_id, newest.round)
    return replace(newest, code=code, run_history=run_history)


def check_same(before: dict[str, Scalar], now: dict[str, Scalar], folder: Path) -> None:
    """Raise CannotResume if a resumed run would have another result than the run as it began.

    ``before`` are the settings with which it began, and ``now`` those that it has. All but those in
    `MAY_DIFFER` must be equal, and the code that divides the data must be of the same version.
    """
    changes = []
    for key in {**before, **now}:
        if key not in MAY_DIFFER and before.get(key) != now.get(key):
            change = f"{key} = {_text(now, key)}: the run has {key} = {_text(before, key)}"
            changes.append(change)
    if changes:
        first = f"resume = true: the run {folder.name!r} was started with other settings"
        raise CannotResume("\n".join([first, *changes]))
    RunFolder(folder).check_division(str(now["partition"]))


def _text(settings: dict[str, Scalar], key: str) -> str:
    if key not in settings:
        return "(not set)"
    return json.dumps(settings[key], ensure_ascii=False)


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Within the ``with`` block, keep other processes from running or resuming this run.

    Raises SettingsError if one is at work on it, or if the folder cannot be written to. The files
    that a killed process has half written are removed.
    """
    lock = FileLock(RunFolder(folder).lock)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise SettingsError(
            f"run-name = {folder.name!r}: another process is at work on {folder}; "
            "what a killed `protofl run` has left ends within half a minute"
        ) from None
    except OSError as error:
        why = f"{folder.parent} cannot be written ({error.strerror})"
        raise SettingsError(f"out-dir: {why}") from error
    RunFolder(folder).remove_leftovers()
    try:
        yield
    finally:
        # a process that has this file open already notices that it is gone, and makes a new one
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()

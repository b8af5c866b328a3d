"""What the server keeps after every round, so that a run that was stopped, by whatever, goes on after it.

``<run>/checkpoint.safetensors`` holds the state that the algorithm names in its ``keeps`` and, as JSON beside it, the
rest. Draws of clients and seeds of their training need no keeping: they derive from the seed and the round.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from protofl_common.config.options import Scalar, SettingsError
from protofl_common.config.sections import keys_that_change
from protofl_common.lineage import Lineage
from protofl_common.run_folder import SUMMARY
from protofl_common.settings import Settings, to_run_config
from protofl_common.tensorfile import read_tensors, write_tensors

FORMAT = "protofl-checkpoint-2"
NAME = "checkpoint.safetensors"

MAY_DIFFER = keys_that_change("name", "machine", "waiting", "display") - {"state-dir"}
"""Settings that a resumed run may change; but without the clients' models these would begin anew."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after one of its rounds."""

    settings: dict[str, Scalar]
    lineage: Lineage
    round: int = 0
    """0: before the first."""
    sites: tuple[str, ...] = ()
    num_partitions: int = 0
    """Among how many clients the data set is divided; 0 where sites bring data of their own."""
    seconds: float = 0.0
    """That the run has taken so far."""
    metrics_bytes: int = 0
    """Length of ``metrics.jsonl``; what it holds beyond that is of a round that does not count."""
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def resumed(self) -> bool:
        """Whether the present Flower run goes on with what an earlier one began."""
        return bool(self.lineage.earlier)

    def write(self, folder: Path) -> None:
        """Replace the checkpoint of a run in one step."""
        facts: dict[str, Any] = {key: value for key, value in vars(self).items() if key != "state"}
        facts |= {"lineage": self.lineage.text}
        write_tensors(folder / NAME, self.state, {"format": FORMAT, "facts": json.dumps(facts)})

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """The checkpoint of a run; TensorFileError if it is missing or damaged, SettingsError if of another version."""
        state, facts = read_tensors(folder / NAME, torch.device("cpu"))
        if facts.get("format") != FORMAT:
            raise SettingsError(f"resume = true: {folder / NAME} is not of this version ({FORMAT})")
        kept = json.loads(facts["facts"])
        return cls(**kept | {"lineage": Lineage.parse(kept["lineage"]), "sites": tuple(kept["sites"]), "state": state})


def starting_point(settings: Settings, folder: Path, run_id: int) -> Checkpoint:
    """Where a run begins: before its first round, or, with ``resume``, after the last one that it finished.

    Raises
    ------
    SettingsError
        If there is a run of that name already, or, with ``resume``, none that could go on with these settings.
    """
    name, wanted = folder.name, to_run_config(settings)
    if not settings.run.resume:
        if (folder / "settings.toml").exists():
            hint = "choose another name, or let it go on with resume = true"
            raise SettingsError(f"run-name = {name!r}: {folder} holds a run already; {hint}")
        return Checkpoint(wanted, Lineage(run_id))
    if (folder / SUMMARY).exists():
        raise SettingsError(f"resume = true: nothing to resume, the run {name!r} is complete: {folder}")
    if not (folder / NAME).exists():
        raise SettingsError(f"resume = true: nothing to resume, there is no {folder / NAME}")
    found = Checkpoint.read(folder)
    if lines := _differences(found.settings, wanted):
        raise SettingsError(f"resume = true: the run {name!r} was started with other settings\n" + "\n".join(lines))
    return replace(found, lineage=found.lineage.then(run_id, found.round))


def _differences(before: dict[str, Scalar], now: dict[str, Scalar]) -> list[str]:
    """A line for each setting that must not change and has."""
    keys = [key for key in {**before, **now} if key not in MAY_DIFFER and before.get(key) != now.get(key)]
    return [f"{key} = {_as_text(now, key)}: the run has {key} = {_as_text(before, key)}" for key in keys]


def _as_text(settings: dict[str, Scalar], key: str) -> str:
    return json.dumps(settings[key], ensure_ascii=False) if key in settings else "(not set)"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Nobody else may run or resume this run meanwhile; SettingsError if somebody does."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise SettingsError(f"run-name = {folder.name!r}: another process is at work on {folder}") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()

"""The state that never leaves a client: its algorithm's, after the last round that counts and the one it trains.

One file per round, ``<folder>/<site>/<round>-<Flower run id>.safetensors``. A server that died may ask for its last
round again, or for the one before it where its newest checkpoint is damaged, and the client must then start from where
it stood before. So two older ones stay (`StateFolder.save`): at rest there are three files, at last one.
On a site with an operator, the server's word alone removes nothing of other Flower runs: a run that was stopped and
resumed leaves up to three more files there each time.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protofl_common.basics.files import TensorFileError, locked, remove, write_text
from protofl_common.basics.run_history import RunHistory
from protofl_common.basics.tensorfile import read_tensors, write_tensors
from protofl_common.wire.schema import RefusedMessage

FORMAT = "protofl-client-state-3"
_NAME = re.compile(r"(\d+)-(\d+)\.safetensors(\.\w+\.tmp)?")
_Key = tuple[int, int]  # (round, Flower run id)


class LedgerError(RuntimeError):
    """The privacy ledger cannot be locked, read or written; the message says which file and why."""


class StateError(RuntimeError):
    """The state on disk cannot be used, or not be written; the message says which file and why."""


@contextmanager
def record_in(path: Path, unknown: str) -> Iterator[dict[str, Any]]:
    """Lock a site's record, {} where there is no file yet, and write what the block changes; no error writes anything.

    StateError, which says what is ``unknown`` then, for a file that cannot be used, or whose content is another.
    """
    try:
        with locked(path):
            record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            before = json.dumps(record)
            yield record
            if (after := json.dumps(record)) != before:
                write_text(path, after + "\n", private=True)
    except RefusedMessage:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StateError(f"state-dir: {path} cannot be read or written ({error}): {unknown} is not known") from error


class StateFolder:
    """The states of one client in one run."""

    def __init__(self, folder: Path, name: str, run_history: RunHistory, *, wary: bool = False, use: str = "") -> None:
        self.folder, self.run_history = folder / name, run_history
        self.wary = wary  # Whether only states of the present Flower run may be removed, and never its newest
        self.use = use  # Algorithm and exchange: no private model must come to one that uploads it

    @property
    def beginning(self) -> str:
        """Say how this Flower run begins, for the log of a site: anew, or after which round."""
        run, earlier = self.folder.parents[1], self.run_history.earlier
        begins = "goes on after round {1} of the Flower run {0}".format(*earlier[-1]) if earlier else "begins"
        alike = run.parent.glob(f"{escape(run.name.rpartition('-')[0])}-*")
        others = ", ".join(sorted(folder.name for folder in alike if folder != run and folder.is_dir()))
        return f"{begins}, in {run}" + (f"; others of this name stay as they are: {others}" if others else "")

    def load(self, before: int, arch: str, device: torch.device) -> tuple[dict[str, Tensor], int] | None:
        """The last whole state before round ``before`` that counts, with its round; StateError if none can be used."""
        if (key := self._last(before)) is None:
            return None
        path = self._path(key)
        try:
            tensors, facts = read_tensors(path, device)
        except TensorFileError as error:
            if self._last(key[0]) is None:
                raise StateError(f"{error}; remove it to start afresh") from error
            print(f"protofl: {error}; going on from an older state", file=sys.stderr, flush=True)
            return self.load(key[0], arch, device)
        if facts.get("format") != FORMAT:
            raise StateError(f"{path} is of the version {facts.get('format')}, not {FORMAT}; remove it to start afresh")
        if facts["arch"] != arch:
            raise StateError(f"{path} is of a {facts['arch']}, but this client is now a {arch}")
        if facts["use"] != self.use:
            raise StateError(f"{path} was stored under {facts['use']}, and is not for {self.use}")
        return tensors, key[0]

    def uncounted(self, before: int) -> Path | None:
        """A state for this use of a round before that one, of a Flower run in the history, whatever the run's name was.

        For where no state counts: then none of them does, though the history has the Flower runs of which they are.
        """
        for run_id in self.run_history.known:
            for path in self.folder.parents[2].glob(f"*/clients/{escape(self.folder.name)}/*-{run_id}.safetensors"):
                name = _NAME.fullmatch(path.name)
                if name and int(name[1]) < before and read_tensors(path, torch.device("cpu"))[1]["use"] == self.use:
                    return path
        return None

    def save(self, after: int, arch: str, tensors: dict[str, Tensor]) -> None:
        """Keep a round's state beside the one that it started from, and the one before; StateError leaves these."""
        start = self._last(after)
        self._tidy(self._last(start[0]) if start else None)
        path = self._path((after, self.run_history.run_id))
        facts = {"format": FORMAT, "round": str(after), "arch": arch, "use": self.use}
        try:
            write_tensors(path, tensors, facts, durable=self.wary)  # a simulation waits for the disk once a round
        except TensorFileError as error:
            newest = f"the state after round {start[0]}" if start else "no older state"
            raise StateError(f"round {after} is lost on this client, which has {newest}: {error}") from error

    def finish(self, last_round: int) -> None:
        self._tidy(self._last(last_round + 1))

    def _tidy(self, start: _Key | None) -> None:
        """Remove what is older than ``start``, or of rounds that do not count; files of unknown run ids stay."""
        files, present = self._files(), self.run_history.run_id
        newest = max((key[0] for path, key in files if key[1] == present and path.suffix != ".tmp"), default=0)
        for path, (number, run_id) in files:
            old = start is not None and number < start[0]
            if self.wary:
                old = old and run_id == present and number < newest
            elif run_id in self.run_history.known:
                old = old or not self.run_history.counts(run_id, number)
            if old:
                remove(path)

    def _last(self, before: int) -> _Key | None:
        whole = [key for path, key in self._files() if path.suffix != ".tmp"]
        return max((key for key in whole if key[0] < before and self.run_history.counts(key[1], key[0])), default=None)

    def _files(self) -> list[tuple[Path, _Key]]:
        """All states, and what a killed client was about to write (``.tmp``)."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return [(path, (int(name[1]), int(name[2]))) for path in paths if (name := _NAME.fullmatch(path.name))]

    def _path(self, key: _Key) -> Path:
        return self.folder / f"{key[0]:06d}-{key[1]}.safetensors"

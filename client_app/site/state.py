"""The state of an algorithm that never leaves a client, from one of its rounds to the next.

One file per round, ``<folder>/<site>/<round>-<Flower run id>.safetensors``. A server that died may
ask for its last round again, or for the one before it where its newest checkpoint is damaged, and
the client must then start from where it stood before. So two older ones stay (`StateFolder.save`):
at rest there are three files, at last one. On a site with an operator, the server's word alone
removes nothing of other Flower runs: a run that was stopped and resumed leaves up to three more
files there each time.
"""

import re
import sys
from glob import escape
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from client_app.site.record import StateError
from protofl_common.basics.files import TensorFileError, remove
from protofl_common.basics.run_history import RunHistory
from protofl_common.basics.tensorfile import read_tensors, write_tensors

FORMAT = "protofl-client-state-3"
LOST = (
    "Put this folder back, and resume; or begin the run anew. "
    "Machines of one `flwr run` must share the out-dir; those of `protofl run --cluster` need not"
)
_NAME = re.compile(r"(\d+)-(\d+)\.safetensors(\.\w+\.tmp)?")


class LostStateError(StateError):
    """A simulated client lacks the state to go on from; the run ends, as its figures would differ.

    A site with an operator says it in its log, and goes on from what it has.
    """


class _Key(NamedTuple):
    """What a file's name says: after which round, of which Flower run, the state is."""

    round: int
    run_id: int


class StateFolder:
    """The states of one client in one run."""

    def __init__(
        self,
        folder: Path,
        name: str,
        run_history: RunHistory,
        *,
        is_site: bool = False,
        use: str = "",
    ) -> None:
        """Open the states of the client ``name`` in a run's ``folder``.

        With ``is_site``, only states of the present Flower run may be removed, and never its
        newest. ``use`` is algorithm and exchange: no private model must come to one that uploads
        it.
        """
        self.folder = folder / name
        self.run_history = run_history
        self.is_site = is_site
        self.use = use

    def describe_beginning(self) -> str:
        """Say how this Flower run begins, for the log of a site: anew, or after which round.

        It also names the folders that earlier Flower runs of the same run name have left beside.
        """
        begins = "begins"
        if self.run_history.earlier:
            run_id, last_round = self.run_history.earlier[-1]
            begins = f"goes on after round {last_round} of the Flower run {run_id}"
        run = self.folder.parents[1]  # the states are in RUN/clients/SITE
        text = f"{begins}, in {run}"

        name, _, _ = run.name.rpartition("-")  # the folder's name ends in the Flower run's id
        folders = run.parent.glob(f"{escape(name)}-*")
        others = sorted(folder.name for folder in folders if folder != run and folder.is_dir())
        if others:
            text += f"; others of this name stay as they are: {', '.join(others)}"
        return text

    def load(
        self, before: int, arch: str, device: torch.device, counted: int = 0
    ) -> tuple[dict[str, Tensor], int] | None:
        """The last whole state before round ``before`` that counts, with its round, or None.

        ``counted`` is the last round of this client that the server has merged, 0 for none: a
        client has a state after that round, or a later one. StateError where there are states, and
        none of them can be used. A simulated client has LostStateError in its place, and also where
        the state is older than ``counted``.
        """
        error_kind = StateError if self.is_site else LostStateError
        key = self._last(before)
        if not self.is_site:
            self._check_newest(key, counted)
        if key is None:
            return None
        path = self._path(key)
        try:
            tensors, facts = read_tensors(path, device)
        except TensorFileError as error:
            older = self._last(key.round)
            if not self.is_site and counted > (older.round if older else 0):
                raise LostStateError(f"{self.folder.name}: {error}. {LOST}") from error
            if older is None:
                raise error_kind(f"{error}; remove it to start afresh") from error
            print(f"protofl: {error}; going on from an older state", file=sys.stderr, flush=True)
            return self.load(key.round, arch, device, counted)

        if facts.get("format") != FORMAT:
            version = f"{path} is of the version {facts.get('format')}, not {FORMAT}"
            raise error_kind(f"{version}; remove it to start afresh")
        if facts["round"] != str(key.round):
            raise error_kind(f"{path} is of round {facts['round']}; put the right one in its place")
        if facts["arch"] != arch:
            raise error_kind(f"{path} is of a {facts['arch']}, but this client is now a {arch}")
        if facts["use"] != self.use:
            raise error_kind(f"{path} was stored under {facts['use']}, and is not for {self.use}")
        return tensors, key.round

    def _check_newest(self, key: _Key | None, counted: int) -> None:
        """LostStateError where the newest state is of a round before that which counted last."""
        newest = key.round if key else 0
        if newest >= counted:
            return
        run_ids = sorted(self.run_history.run_ids)
        run_id = next(each for each in run_ids if self.run_history.counts(each, counted))
        path = self._path(_Key(counted, run_id))
        file = path.relative_to(self.folder.parents[2])
        there = f"the newest is of round {newest}" if newest else "there is none"
        missing = f"{file}, its state after round {counted}, is missing; {there}"
        raise LostStateError(f"{self.folder.name}: {missing}. {LOST}")

    def find_uncounted_state(self, before: int) -> Path | None:
        """Find a state of an earlier round for this use, in the folder of a run of any name.

        It is of a Flower run in the history, which nevertheless counts no round of it: this is for
        where no state counts. StateError where one of them cannot be read.
        """
        cpu = torch.device("cpu")
        all_runs = self.folder.parents[2]
        for run_id in self.run_history.run_ids:
            pattern = f"*/clients/{escape(self.folder.name)}/*-{run_id}.safetensors"
            for path in all_runs.glob(pattern):
                name = _NAME.fullmatch(path.name)
                if name is None or int(name[1]) >= before:
                    continue
                try:
                    _, facts = read_tensors(path, cpu)
                except TensorFileError as error:
                    raise StateError(f"{error}; remove it to start afresh") from error
                if facts.get("use") == self.use:
                    return path
        return None

    def save(self, after: int, arch: str, tensors: dict[str, Tensor]) -> None:
        """Keep a round's state beside the one that it started from, and the one before.

        StateError, which leaves these as they are, where it cannot be written.
        """
        start = self._last(after)
        self._remove_before(self._last(start.round) if start else None)
        path = self._path(_Key(after, self.run_history.run_id))
        facts = {"format": FORMAT, "round": str(after), "arch": arch, "use": self.use}
        try:
            # a simulation waits for the disk once a round
            write_tensors(path, tensors, facts, durable=self.is_site)
        except TensorFileError as error:
            newest = f"the state after round {start.round}" if start else "no older state"
            raise StateError(
                f"round {after} is lost on this client, which has {newest}: {error}"
            ) from error

    def finish(self, last_round: int) -> None:
        """Remove all states but that of the last round."""
        self._remove_before(self._last(last_round + 1))

    def _remove_before(self, start: _Key | None) -> None:
        """Remove what is older than ``start``, or of rounds that do not count.

        Files of unknown run ids stay. At a wary site all stay but older ones of this Flower run.
        """
        files = self._files()
        present = self.run_history.run_id
        rounds = [key.round for path, key in files if key.run_id == present and _is_whole(path)]
        newest = max(rounds, default=0)
        for path, key in files:
            old = start is not None and key.round < start.round
            if self.is_site:
                old = old and key.run_id == present and key.round < newest
            elif key.run_id in self.run_history.run_ids:
                old = old or not self.run_history.counts(key.run_id, key.round)
            if old:
                remove(path)

    def _last(self, before: int) -> _Key | None:
        """The newest whole state of a round before ``before`` that counts."""
        last: _Key | None = None
        for path, key in self._files():
            counts = key.round < before and self.run_history.counts(key.run_id, key.round)
            if counts and _is_whole(path) and (last is None or key > last):
                last = key
        return last

    def _files(self) -> list[tuple[Path, _Key]]:
        """All states, and what a killed client was about to write (``.tmp``)."""
        if not self.folder.is_dir():
            return []
        files = []
        for path in self.folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name:
                files.append((path, _Key(int(name[1]), int(name[2]))))
        return files

    def _path(self, key: _Key) -> Path:
        return self.folder / f"{key.round:06d}-{key.run_id}.safetensors"


def _is_whole(path: Path) -> bool:
    return path.suffix != ".tmp"

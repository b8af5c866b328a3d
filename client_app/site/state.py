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

FORMAT = "protofl-client-state-4"
LOST = (
    "Put this folder back, and resume; or begin the run anew. "
    "Machines of one `flwr run` must share the out-dir; those of `protofl run --cluster` need not"
)
_NAME = re.compile(r"(\d+)-(\d+)\.safetensors(\.\w+\.tmp)?")


class LostStateError(StateError):
    """A simulated client lacks the state to go on from; the run ends, as its figures would differ.

    A site with an operator does not raise it: it goes on from the newest state that it has.
    """


class _Key(NamedTuple):
    """The round after which a state was stored, and the Flower run: what its file's name says."""

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
        newest. ``use`` names algorithm and exchange: a state is loaded for the same use only, so
        that a private model never gets into an algorithm that uploads it.
        """
        self.folder = folder / name
        self.run_history = run_history
        self.is_site = is_site
        self.use = use

    def describe_beginning(self) -> str:
        """Return a text for a site's log: whether this run begins anew, or after which round."""
        begins = "begins"
        if self.run_history.earlier:
            run_id, last_round = self.run_history.earlier[-1]
            begins = f"goes on after round {last_round} of the Flower run {run_id}"
        return f"{begins}, in {self.folder.parents[1]}"  # the states are in RUN/clients/SITE

    def load(
        self, before: int, arch: str, device: torch.device, counted: int = 0
    ) -> tuple[dict[str, Tensor], int] | None:
        """Return the newest state of a round before ``before``, and its round; None without one.

        Only rounds of the run history count, and only states of this ``arch`` and `use` fit.
        ``counted`` is the last round of this client that the server has merged, 0 for none, so a
        state after that round or a later one should be there. A damaged file is passed over for an
        older one. StateError where states are there and none can be used. A simulated client raises
        LostStateError instead, and also for a state older than ``counted``.
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

        for fact, wanted in self._facts(key.round, arch).items():
            if facts.get(fact) != wanted:
                raise error_kind(
                    f"{path} was stored with {fact} = {facts.get(fact)!r}, not {wanted!r}; put the"
                    " right one in its place, or remove it to start afresh"
                )
        return tensors, key.round

    def _facts(self, round_number: int, arch: str) -> dict[str, str]:
        """Return what the file of the state after a round says of it.

        A state is loaded only if all of this is as it should be.
        """
        return {"format": FORMAT, "round": str(round_number), "arch": arch, "use": self.use}

    def _check_newest(self, key: _Key | None, counted: int) -> None:
        """Raise LostStateError where the newest state, of ``key``, is older than round ``counted``.

        The text says how the name of the file begins that should be there.
        """
        newest = key.round if key else 0
        if newest >= counted:
            return
        there = f"the newest is of round {newest}" if newest else "there is none"
        path = self.folder.relative_to(self.folder.parents[2])  # RUN/clients/SITE
        raise LostStateError(
            f"{self.folder.name}: {path}/{counted:06d}-*,"
            f" its state after round {counted}, is missing; {there}. {LOST}"
        )

    def find_uncounted_state(self, before: int) -> Path | None:
        """Find a state of a round before ``before`` for this use, under any name of a run.

        It is called where `load` finds no state. A file of a Flower run of the history then shows
        that the server has changed the run's name, or its history, so that the state no longer
        counts. StateError where such a file cannot be read.
        """
        cpu = torch.device("cpu")
        all_runs = self.folder.parents[2]  # the folder is RUN/clients/SITE in it
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
        """Store the state ``after`` a round, and remove all but the two states before it.

        The two are the state from which the round started and the one before that: the server may
        ask for the last two rounds again. StateError where it cannot be written; the two stay then.
        """
        start = self._last(after)  # from which the round started
        before_start = self._last(start.round) if start else None
        self._remove_before(before_start)
        path = self._path(_Key(after, self.run_history.run_id))
        try:
            # a simulation does not wait for the disk with each client: it does so once a round
            write_tensors(path, tensors, self._facts(after, arch), durable=self.is_site)
        except TensorFileError as error:
            newest = f"the state after round {start.round}" if start else "no older state"
            raise StateError(
                f"round {after} is lost on this client, which has {newest}: {error}"
            ) from error

    def finish(self, last_round: int) -> None:
        """Remove all states but that of the last round."""
        self._remove_before(self._last(last_round + 1))

    def _remove_before(self, oldest_kept: _Key | None) -> None:
        """Remove states of rounds before ``oldest_kept``, and those that do not count.

        With None no state is too old. Files of Flower runs that are not in the history stay. A site
        removes older states of the present Flower run only, never the newest, and none for not
        counting: the history is the server's word.
        """
        files = self._files()
        present = self.run_history.run_id
        rounds = [key.round for path, key in files if key.run_id == present and _is_whole(path)]
        newest = max(rounds, default=0)
        for path, key in files:
            is_superfluous = oldest_kept is not None and key.round < oldest_kept.round
            if self.is_site:
                is_older = key.run_id == present and key.round < newest
                is_superfluous = is_superfluous and is_older
            elif key.run_id in self.run_history.run_ids:
                counts = self.run_history.counts(key.run_id, key.round)
                is_superfluous = is_superfluous or not counts
            if is_superfluous:
                remove(path)

    def _last(self, before: int) -> _Key | None:
        """Return the newest whole state before round ``before`` that the run history counts."""
        last: _Key | None = None
        for path, key in self._files():
            counts = key.round < before and self.run_history.counts(key.run_id, key.round)
            if counts and _is_whole(path) and (last is None or key > last):
                last = key
        return last

    def _files(self) -> list[tuple[Path, _Key]]:
        """Return all files of states, with those that a killed client left half-written (.tmp)."""
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
    return path.suffix != ".tmp"  # a file gets its own name once it is written

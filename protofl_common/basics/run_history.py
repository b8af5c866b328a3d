"""The Flower runs that one of our runs consists of.

Flower gives every `flwr run` a new id, also when it resumes. The rounds that a resumed run repeats
have been trained before by some clients, for a server that then died: what these kept of them must
not count. So the server tells every client the run's history. ``"11:5,12:6,13"``: run 11 counts up
to round 5, run 12 for round 6, and run 13 after that.
"""

import re
from dataclasses import dataclass

_TEXT = re.compile(r"(?:[0-9]{1,20}:[0-9]{1,9},){0,400}[0-9]{1,20}")


@dataclass(frozen=True)
class RunHistory:
    """The Flower run that goes on now, and those before it."""

    run_id: int
    earlier: tuple[tuple[int, int], ...] = ()
    """The Flower runs that were stopped and gone on with, oldest first.

    Each is (run id, the last round of it that counts).
    """

    @property
    def first(self) -> int:
        if not self.earlier:
            return self.run_id
        run_id, _ = self.earlier[0]
        return run_id

    @property
    def known(self) -> set[int]:
        return {self.run_id, *(run_id for run_id, _ in self.earlier)}

    def counts(self, run_id: int, server_round: int) -> bool:
        """Return whether this round of this Flower run is a part of the history.

        A run that is stopped goes on as another Flower run from its last checkpoint. What a client
        stored in later rounds of the stopped one does not count: these rounds are made anew. So
        each Flower run has the rounds after its predecessor's last, up to its own last.
        """
        first = 1
        for earlier_id, last in self.earlier:
            if run_id == earlier_id:
                return first <= server_round <= last
            first = last + 1
        return run_id == self.run_id and server_round >= first

    def then(self, run_id: int, last: int) -> "RunHistory":
        """This history, ended after the round ``last`` and continued by another Flower run."""
        return RunHistory(run_id, (*self.earlier, (self.run_id, last)))

    @property
    def text(self) -> str:
        ended = [f"{run_id}:{last}" for run_id, last in self.earlier]
        return ",".join([*ended, str(self.run_id)])

    @classmethod
    def parse(cls, text: str) -> "RunHistory":
        """Read a history in the form that `text` has; ValueError for a text of another form."""
        if not _TEXT.fullmatch(text):
            raise ValueError(f"{text!r} is no run_history, such as '11:5,12:6,13'")
        *ended, now = text.split(",")
        earlier = []
        for entry in ended:
            run_id, last = entry.split(":")
            earlier.append((int(run_id), int(last)))
        return cls(int(now), tuple(earlier))

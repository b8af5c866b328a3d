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
        """The id of the first of the Flower runs."""
        if not self.earlier:
            return self.run_id
        run_id, _ = self.earlier[0]
        return run_id

    @property
    def run_ids(self) -> set[int]:
        return {self.run_id, *(run_id for run_id, _ in self.earlier)}

    def counts(self, run_id: int, server_round: int) -> bool:
        """Return whether this round of this Flower run is a part of the history.

        A run that is stopped goes on as another Flower run from its last checkpoint. Rounds after
        that checkpoint are made anew, so what a client stored in them for the stopped run does not
        count. Each Flower run has the rounds after its predecessor's last, up to its own last.
        """
        first_round = 1
        for earlier_id, last_round in self.earlier:
            if run_id == earlier_id:
                return first_round <= server_round <= last_round
            first_round = last_round + 1
        return run_id == self.run_id and server_round >= first_round

    def continued_by(self, run_id: int, last_round: int) -> "RunHistory":
        """Return the history of another Flower run, which goes on after this one's last round."""
        return RunHistory(run_id, (*self.earlier, (self.run_id, last_round)))

    @property
    def text(self) -> str:
        ended = [f"{run_id}:{last}" for run_id, last in self.earlier]
        return ",".join([*ended, str(self.run_id)])

    @classmethod
    def parse(cls, text: str) -> "RunHistory":
        """Read a history from its `text`, such as ``11:5,12:6,13``; ValueError for another form."""
        if not _TEXT.fullmatch(text):
            raise ValueError(f"{text!r} is no run_history, such as '11:5,12:6,13'")
        *ended, run_id_now = text.split(",")
        earlier = []
        for entry in ended:
            run_id, last_round = entry.split(":")
            earlier.append((int(run_id), int(last_round)))
        return cls(int(run_id_now), tuple(earlier))

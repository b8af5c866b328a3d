"""How long an exchange waits for sites that are late, by how long sites took before."""

import statistics
from collections.abc import Collection, Iterable


class ReplyTimes:
    """The seconds of each site's slowest reply so far, to each kind of work.

    A reply that came late counts too: otherwise a site that is slower than the others would be cut
    off in each round, and nobody would learn how much time it needs.
    """

    def __init__(self) -> None:
        self._slowest: dict[str, dict[str, float]] = {}  # Kind of work -> site -> seconds
        self._heard: dict[str, float] = {}  # Site -> when its last reply came, monotonic

    def has(self, kind: str) -> bool:
        """Return whether any site has answered such a message by now."""
        return _work(kind) in self._slowest

    def note(self, kind: str, site: str, asked: float, answered: float) -> None:
        """Note when a site was asked, and when it answered, on the monotonic clock.

        A site works on one message at a time, so it cannot have begun before its last reply.
        """
        seconds = answered - max(asked, self._heard.get(site, asked))
        self._heard[site] = answered
        of_work = self._slowest.setdefault(_work(kind), {})
        of_work[site] = max(seconds, of_work.get(site, 0.0))

    def slowest(self, kind: str, site: str) -> float:
        """Return the seconds of a site's slowest reply to such work so far; 0 without any."""
        return self._slowest.get(_work(kind), {}).get(site, 0.0)

    def patience(
        self,
        kind: str,
        taken: Iterable[float],
        pending: Collection[str],
        grace: float,
        least: float,
    ) -> float:
        """Return the seconds that an exchange waits, of which some replies have ``taken`` these.

        That is ``grace`` times their median, or the slowest reply of a site that is ``pending``,
        and ``least`` where that is longer.
        """
        expected = statistics.median(taken)
        for site in pending:
            expected = max(expected, self.slowest(kind, site))
        return max(least, grace * expected)


def _work(kind: str) -> str:
    """Return what a kind of message asks for: to train, to evaluate, or an answer at once.

    All steps of a secure sum but the training are of the last.
    """
    return kind.partition(".")[0]

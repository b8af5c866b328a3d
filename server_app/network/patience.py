"""How long an exchange waits for sites that are late, judged by their earlier replies."""

import statistics
from collections.abc import Collection, Iterable


class ReplyTimes:
    """The seconds of each site's slowest reply so far, to each kind of work.

    A reply that came late counts too: otherwise a site that is slower than the others would be cut
    off in each round, and nobody would learn how much time it needs.
    """

    def __init__(self) -> None:
        self._slowest: dict[str, dict[str, float]] = {}  # Kind of work -> site -> seconds
        self._last_reply: dict[str, float] = {}  # Site -> when it came, on the monotonic clock

    def has(self, kind: str) -> bool:
        """Return whether any site has answered such a message by now."""
        return _work(kind) in self._slowest

    def note(self, kind: str, site: str, asked: float, answered: float) -> None:
        """Note when a site was asked, and when it answered, on the monotonic clock.

        A site works on one message at a time, so it cannot have begun before its last reply.
        """
        seconds = answered - max(asked, self._last_reply.get(site, asked))
        self._last_reply[site] = answered
        slowest = self._slowest.setdefault(_work(kind), {})
        slowest[site] = max(seconds, slowest.get(site, 0.0))

    def slowest(self, kind: str, site: str) -> float:
        """Return the seconds of a site's slowest reply to such work so far; 0 without any."""
        return self._slowest.get(_work(kind), {}).get(site, 0.0)

    def patience(
        self,
        kind: str,
        taken: Iterable[float],
        pending: Collection[str],
        grace: float,
        min_wait: float,
    ) -> float:
        """Return how many seconds an exchange waits in all.

        ``taken`` has the seconds of the replies that have come. It waits ``grace`` times their
        median, or ``grace`` times the slowest earlier reply of any ``pending`` site if that is
        longer, and at least ``min_wait``.
        """
        expected = statistics.median(taken)
        for site in pending:
            expected = max(expected, self.slowest(kind, site))
        return max(min_wait, grace * expected)


def _work(kind: str) -> str:
    """Return the kind of work that a message asks for, such as "query" for Flower's "query.share".

    All queries are one kind, as a site answers them at once.
    """
    return kind.partition(".")[0]

"""What operators see of a round that waits for sites."""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from protofl_common.basics.text import in_order
from protofl_common.runs.events import Waiting
from protofl_common.runs.folder import WAITING, Awaited, RunFolder
from server_app.network.patience import ReplyTimes
from server_app.run.log import emit

FIRST_WORD_SECONDS = 30.0  # that a round waits before it says so; then twice as many, and so on


class Waits:
    """Tells for whom an exchange waits, by events, and by a file that ``protofl status`` reads."""

    def __init__(self, folder: Path, times: ReplyTimes) -> None:
        self.folder = RunFolder(folder)
        self.times = times
        self.next_word = FIRST_WORD_SECONDS

    def tell(
        self, number: int, kind: str, sites: Iterable[str], seconds: float, longest: float
    ) -> None:
        """Say that round ``number`` has waited for these ``seconds``, of at most ``longest``."""
        slowest = {site: self.times.slowest(kind, site) for site in in_order(sites)}
        since = time.time() - seconds
        awaited = Awaited(round=number, since=since, until=since + longest, sites=slowest)
        with suppress(OSError):  # a full disk, which must not end the run before it has to
            self.folder.write(WAITING, awaited)
        if seconds >= self.next_word:
            self.next_word *= 2
            emit(Waiting(number, seconds, longest - seconds, slowest))

    def end(self) -> None:
        self.next_word = FIRST_WORD_SECONDS
        (self.folder.path / WAITING).unlink(missing_ok=True)

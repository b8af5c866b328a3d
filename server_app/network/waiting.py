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
    """Tells which sites an exchange waits for: by events, and in a file for ``protofl status``."""

    def __init__(self, folder: Path, times: ReplyTimes) -> None:
        self.folder = RunFolder(folder)
        self.times = times
        self.next_word = FIRST_WORD_SECONDS

    def tell(
        self, number: int, kind: str, sites: Iterable[str], seconds: float, longest: float
    ) -> None:
        """Tell that round ``number`` has waited ``seconds`` of at most ``longest`` for these sites.

        ``kind`` is the type of message that they were sent. The file is written each time. An event
        is emitted after `FIRST_WORD_SECONDS`, after twice that, and so on.
        """
        slowest = {site: self.times.slowest(kind, site) for site in in_order(sites)}
        since = time.time() - seconds
        awaited = Awaited(round=number, since=since, until=since + longest, sites=slowest)
        with suppress(OSError):  # a full disk must not end the run over a file that is only shown
            self.folder.write(WAITING, awaited)
        if seconds >= self.next_word:
            self.next_word *= 2
            emit(Waiting(number, seconds, longest - seconds, slowest))

    def end(self) -> None:
        self.next_word = FIRST_WORD_SECONDS
        (self.folder.path / WAITING).unlink(missing_ok=True)

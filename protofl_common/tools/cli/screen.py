"""The screen of a run: the ServerApp's lines, on a terminal one live line for its rounds, and a box at the end."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.status import Status
from rich.text import Text

from protofl_common.basics.text import printable

ROUND = re.compile(r"(\S.*: )?round +(\d+)/\d+ ")
MOST_RECENT = 40
RESULT = re.compile(r"(result|results|report): ")


def plain(text: object) -> str:
    """Return ``text`` for a table on a terminal, without markup and control characters of a stranger's run."""
    return escape(printable(str(text)))


class Screen:
    """Called with every line of a run; used by ``with``, which ends the live line."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.quiet = quiet
        self.results: list[str] = []
        self.recent = deque[str](maxlen=MOST_RECENT)  # lines that a quiet screen shows where the run fails
        live = self.console.is_terminal and not quiet
        self._live: Status | None = self.console.status("starting") if live else None

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, line: str) -> None:
        if self.quiet:
            self.recent.append(line)
        if RESULT.match(line) or (self.quiet and line.startswith("warning: ")):
            self.results.append(line.replace(f"{Path.cwd()}/", ""))
            if self._live:
                self._live.update("drawing the page")
        elif self._live and ROUND.match(line):
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif not self.quiet and line.strip():
            self._print(line)

    def conclude(self, following: str) -> None:
        """Show the result, the paths that matter, and the command to type next, if any."""
        lines = [*self.results, *([f"next: {following}"] if following else [])]
        if self._live:
            self._live.stop()
            self.console.print(Panel.fit(Text("\n".join(lines)), padding=(1, 2)), soft_wrap=False)
        else:
            for line in lines:
                self._print(line)

    def _print(self, line: str) -> None:
        self.console.print(Text.from_ansi(line) if self.console.is_terminal else Text(line))

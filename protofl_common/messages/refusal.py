"""Why a message is not accepted."""

from __future__ import annotations

from protofl_common.text import printable


class RefusedMessage(ValueError):
    """What arrived is not what the catalog declares; the message, of bounded length, says what is wrong with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))

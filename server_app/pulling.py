"""Fetching replies so that one that Flower itself cannot read costs only its sender."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, DecodeError)
"""What Flower raises for an array whose shape is not one, text that is not JSON, a missing part, bad protobuf bytes."""


def pull_each(grid: Grid, message_ids: Iterable[str]) -> list[tuple[str, Message | str]]:
    """What has been answered: (message id, reply), or (message id, why the reply cannot be read).

    Flower decodes replies inside ``pull_messages`` and hands over all of one call or none: the exception for one
    garbled reply would end the run and lose the others. So each is asked for in a call of its own.
    """
    found: list[tuple[str, Message | str]] = []
    for key in message_ids:
        try:
            found += [(key, reply) for reply in grid.pull_messages([key])]
        except UNREADABLE as error:
            found.append((key, f"a reply that Flower cannot read: {type(error).__name__}: {error}"))
    return found

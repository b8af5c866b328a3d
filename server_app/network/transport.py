"""Sending and fetching through Flower, so that what goes wrong with one message costs no more than it must."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from server_app.log import say
from server_app.network.flower_compat import DecodeError, ObjectPushError

UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, DecodeError)
"""What Flower raises for an array whose shape is not one, text that is not JSON, a missing part, bad protobuf bytes."""
TRIES = 3
"""How often messages are sent before a SuperLink that keeps losing them ends the run."""


def push_each(grid: Grid, messages: Iterable[Message]) -> list[tuple[Message, bool]]:
    """Send, and yield (message, whether Flower took it) in the order given.

    A SuperLink that is restarted while messages are on their way to it refuses their remaining parts for ever, and
    Flower raises. They are sent again then, as copies: a client that had got its message all the same answers twice,
    from the same state, and only the reply to the copy is fetched.

    ObjectPushError if that happens `TRIES` times in a row.
    """
    sent = list(messages)
    for _ in range(TRIES - 1):
        try:
            return _push(grid, sent)
        except ObjectPushError:
            say("  the SuperLink lost messages that were half sent; sending them again")
            sent = [copy_for(message, int(message.metadata.dst_node_id)) for message in sent]
    return _push(grid, sent)


def copy_for(message: Message, node: int) -> Message:
    """The same message, for a node."""
    meta = message.metadata
    return Message(message.content, node, meta.message_type, group_id=meta.group_id)


def _push(grid: Grid, messages: list[Message]) -> list[tuple[Message, bool]]:
    taken = set(grid.push_messages(messages))
    return [(message, message.metadata.message_id in taken) for message in messages]


def pull_each(grid: Grid, message_ids: Iterable[str]) -> list[tuple[str, Message | str]]:
    """Yield the answers: (message id, reply), or (message id, why the reply cannot be read).

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

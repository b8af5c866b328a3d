"""Sending and fetching through Flower, so that what goes wrong with one message costs no more than it must."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Error, Message
from flwr.serverapp import Grid

from server_app.log import say
from server_app.network.flower_compat import DecodeError, ObjectPushError

UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, DecodeError)
"""What Flower raises for an array whose shape is not one, text that is not JSON, a missing part, bad protobuf bytes."""
TRIES = 3
"""How often messages are sent before a SuperLink that keeps losing them ends the run."""


def push_each(grid: Grid, messages: Iterable[Message]) -> list[tuple[Message, bool]]:
    """Send, and return (message, whether Flower took it) in the order given.

    A SuperLink that is restarted while messages are on their way to it refuses their remaining parts for ever, and
    Flower raises. They are sent again then, as copies: a client that had got its message all the same answers twice,
    from the same state, and only the reply to the copy is fetched. ObjectPushError after `TRIES` in a row.
    """
    sent = list(messages)
    for left in reversed(range(TRIES)):
        try:
            taken = set(grid.push_messages(sent))
            break
        except ObjectPushError:
            if not left:
                raise
            say("  the SuperLink lost messages that were half sent; sending them again")
            sent = [copy_for(message, int(message.metadata.dst_node_id)) for message in sent]
    return [(message, id_of(message) in taken) for message in sent]


def copy_for(message: Message, node: int) -> Message:
    """The same message, for a node."""
    return Message(message.content, node, message.metadata.message_type, group_id=message.metadata.group_id)


def pull_each(grid: Grid, messages: Iterable[Message]) -> list[tuple[Message, Message]]:
    """Return the messages that have been answered, each with its reply; one that cannot be read is an error.

    Flower decodes replies inside ``pull_messages`` and hands over all of one call or none: the exception for one
    garbled reply would end the run and lose the others. So each is asked for in a call of its own.
    """
    answered: list[tuple[Message, Message]] = []
    for message in messages:
        try:
            answered += [(message, reply) for reply in grid.pull_messages([id_of(message)])]
        except UNREADABLE as error:
            why = Error(0, f"a reply that Flower cannot read: {type(error).__name__}: {error}")
            answered.append((message, Message(why, reply_to=message)))
    return answered


def id_of(message: Message) -> str:
    """The name that Flower gave a message when it was sent."""
    return str(message.metadata.message_id)

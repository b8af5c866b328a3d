"""Flower's private names, and sending and fetching through it, so that a bad message costs no more than it must."""

import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any
from unittest.mock import patch

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode as ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, ObjectUnavailableError
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from protofl_common.wire import envelope
from server_app.log import say, tell_silence

UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, RecursionError, DecodeError)  # of JSON that is none …
BESIDE = 2**24  # Bytes of a reply beside its arrays: figures, names, keys, and 2**10 for each of its parts
MOST_VALUES = 2**20  # of a reply's records: one of a few MB may be there under a million names
TRIES = 3  # How often messages are sent before a SuperLink that loses them each time ends the run


def is_simulated(grid: Grid) -> bool:
    """Return whether the clients are simulated by processes of Ray beside the server."""
    # by the name of a class whose import would take a server on a network half a second
    return type(getattr(grid, "state", None)).__name__ == "InMemoryLinkState"


def find_messages_by_node(grid: Grid) -> None:
    """In simulation, let Flower find the messages for a node without a look at those for all others.

    Its engine asks for each node's messages ten times a second, and Flower 1.41 looks through all messages for each
    answer: 5.9 s of the server's process, for 1,000 messages to 1,000 nodes. A SuperLink on a network stays as it is.
    """
    if not is_simulated(grid):
        return
    state: Any = grid.state  # type: ignore[attr-defined]
    store = state.store_message_ins
    waiting: dict[int, list[Message]] = defaultdict(list)

    def store_message_ins(message: Message) -> str | None:
        with state.lock:
            key: str | None = store(message)
            if key:
                waiting[message.metadata.dst_node_id].append(message)
            return key

    def get_message_ins(node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        with state.lock:
            messages = waiting.pop(node_id, [])
            for message in messages:
                message.metadata.delivered_at = datetime.now(UTC).isoformat()
            return messages

    state.store_message_ins = store_message_ins
    state.get_message_ins = get_message_ins


def push_each(grid: Grid, messages: Iterable[Message]) -> list[tuple[Message, bool]]:
    """Send, and return (message, whether Flower took it) in the order given.

    A SuperLink that is restarted while messages are on their way to it refuses their remaining parts for ever, and
    Flower raises. They are sent again then, as copies: a client that had got its message all the same answers twice,
    from the same state, and only the reply to the copy is fetched. ObjectPushError after `TRIES` in a row.
    """
    sent, alike = list(messages), dict[bytes, bytes]()
    for message in sent if _superlink_of(grid) else ():
        message.content = envelope.put_in(message.content, alike)
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
    return Message(message.content, node, message.metadata.message_type, group_id=message.metadata.group_id)


def pull_each(grid: Grid, messages: Iterable[Message], arrays: int = 0) -> list[tuple[Message, Message]]:
    """Return the messages that have been answered, each with its reply; one that cannot be read is an error.

    So is one that proves too large for so many bytes of ``arrays``. Flower decodes replies inside ``pull_messages`` and
    hands over all of one call or none: the exception for one garbled reply would end the run and lose the others. So
    each is taken in a call of its own, but the SuperLink is asked once for all: most looks find nothing, and a request
    for every site that is still at work would keep it busy. It names a reply once, as soon as a site begins to send it;
    the reply is left until all of its parts are there.
    """
    asked = {id_of(message): message for message in messages}
    client = _superlink_of(grid)
    if not asked or client is None:
        return [pair for message in asked.values() for pair in _pull(grid, message)]
    start, answered = time.monotonic(), list[tuple[Message, Message]]()
    if new := [key for key, message in asked.items() if "begun" not in vars(message)]:
        arrived = client.PullMessages(PullAppMessagesRequest(message_ids=new))
        for reply, tree in zip(arrived.messages_list, arrived.message_object_trees, strict=True):
            if message := asked.get(reply.metadata.reply_to_message_id):
                vars(message)["begun"] = PullAppMessagesResponse(messages_list=[reply], message_object_trees=[tree]), {}
    tell_silence(start)
    for message, (alone, parts) in [(each, vars(each)["begun"]) for each in asked.values() if "begun" in vars(each)]:
        ours = patch.object(client, "PullMessages", lambda _, alone=alone: alone)
        present = patch.object(
            sys.modules[type(grid).__module__], "pull_objects", partial(_pull_present, parts, arrays + BESIDE)
        )
        with suppress(ObjectUnavailableError), ours, present:
            answered += (pulled := _pull(grid, message))
            if any(reply.has_error() and not reply.error.code for _, reply in pulled):  # or the SuperLink would keep it
                sent = alone.messages_list[0].metadata
                which = {"node": vars(grid)["node"], "run_id": sent.run_id, "message_object_id": sent.message_id}
                client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(**which))
    return answered


def _pull_present(parts: dict[str, bytes], most: int, object_ids: list[str], pull_object_fn: Any) -> dict[str, bytes]:
    """Add to a reply's ``parts`` those that have come, and raise for the rest: Flower would wait for it two hours."""
    with ThreadPoolExecutor(2) as threads:  # and for both: the next look must not ask for what is still on its way
        missing = [name for name in dict.fromkeys(object_ids) if name not in parts]  # a part may be named many times
        size = sum(map(len, parts.values())) + 2**10 * len(missing)  # a request costs as much as a kilobyte more
        for length in threads.map(lambda name: len(parts.setdefault(name, pull_object_fn(name))), missing):
            if (size := size + length) > most:
                raise ValueError(f"{len(missing)} parts of a reply with more than {most} bytes")
    if (beside := sum(len(part) for part in parts.values() if not part.startswith(b"ArrayChunk "))) > BESIDE:
        raise ValueError(f"{beside} bytes beside arrays")  # once decoded each number or list in them is an object
    envelope.check_parts(parts, most)
    return parts


def _pull(grid: Grid, message: Message) -> list[tuple[Message, Message]]:
    try:
        replies = list(grid.pull_messages([id_of(message)]))
        records = [record for reply in replies if reply.has_content() for record in reply.content.values()]
        if (values := sum(map(len, records))) > MOST_VALUES:
            raise ValueError(f"{values} values in {len(records)} records")
    except UNREADABLE as error:
        why = Error(0, f"a reply that Flower cannot read: {type(error).__name__}: {error}")
        return [(message, Message(why, reply_to=message))]
    for reply in replies:
        if reply.has_content():
            reply.content = envelope.take_out(reply.content)
    return [(message, reply) for reply in replies]


def _superlink_of(grid: Grid) -> Any:
    """Return the client of the SuperLink's, None where clients are simulated, by processes or in this one."""
    return getattr(grid, "_runtime_client", None)


def id_of(message: Message) -> str:
    return str(message.metadata.message_id)

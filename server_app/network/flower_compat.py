"""Sending and fetching messages by Flower's Grid, with parts of it replaced.

So a reply that is garbled or too large is one site's error, and does not end the run.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from flwr.app import Error, Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from protofl_common.basics.replaced import replaced
from protofl_common.flower import (
    ConfirmMessageReceivedRequest,
    ObjectPushError,
    ObjectUnavailableError,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    needing_flowers_names,
)
from protofl_common.wire import envelope
from server_app.run.log import say, tell_silence

UNREADABLE = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,
    DecodeError,
)
"""What Flower raises over a reply that cannot be decoded, such as JSON that is none."""
MOST_BESIDE_ARRAYS = 2**24
"""The most bytes of a reply beside its arrays: figures, names, keys, and 2**10 for each part."""
MOST_VALUES = 2**20
"""The most values in a reply's records: few bytes may stand there under millions of names."""
TRIES = 3
"""How often messages are sent before a SuperLink that loses them each time ends the run."""


@dataclass(frozen=True)
class _BegunReply:
    """A reply that a site has begun to send."""

    announcement: PullAppMessagesResponse  # The SuperLink's, of this reply alone
    parts: dict[str, bytes] = field(default_factory=dict)  # Object id -> content of those here


_BEGUN: WeakKeyDictionary[Message, _BegunReply] = WeakKeyDictionary()
"""Message -> its reply, as long as somebody waits for it: the SuperLink names a reply only once."""


def is_simulated(grid: Grid) -> bool:
    """Return whether the clients are simulated by processes of Ray beside the server."""
    # By the name of a class whose import would take a server on a network half a second
    return type(getattr(grid, "state", None)).__name__ == "InMemoryLinkState"


def find_messages_by_node(grid: Grid) -> None:
    """Make Flower's simulation find the messages of a node by an index, for speed.

    Its engine asks for each node's messages ten times a second, and Flower 1.41 looks through all
    messages each time: 5.9 s of the server's process, for 1,000 messages to 1,000 nodes. Two
    methods of the grid's state are replaced. A grid that talks to a SuperLink stays as it is.
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

    # with the parameters of Flower's method, of which only the node counts
    def get_message_ins(
        node_id: int, limit: int | None, *, run_id: int | None = None
    ) -> list[Message]:
        with state.lock:
            messages = waiting.pop(node_id, [])
            for message in messages:
                message.metadata.delivered_at = datetime.now(UTC).isoformat()
            return messages

    state.store_message_ins = store_message_ins
    state.get_message_ins = get_message_ins


# -- sending
def push_each(grid: Grid, messages: Iterable[Message]) -> list[tuple[Message, bool]]:
    """Send messages, and return each with whether Flower has taken it, in the order given.

    A SuperLink that restarts while messages are on their way refuses their remaining parts for
    ever, and Flower raises. They are then sent again as copies, which are returned in their place.
    A client that had received the first message answers twice, from the same state, and only the
    reply to the copy is fetched. ObjectPushError after `TRIES` in a row.
    """
    sent = list(messages)
    if _superlink_of(grid):
        envelopes: dict[bytes, bytes] = {}  # lets equal records share their memory
        for message in sent:
            message.content = envelope.put_in(message.content, envelopes)

    for tries_left in reversed(range(TRIES)):
        try:
            taken = set(grid.push_messages(sent))
            break
        except ObjectPushError:
            if not tries_left:
                raise
            say("  the SuperLink lost messages that were half sent; sending them again")
            sent = [copy_for(message, int(message.metadata.dst_node_id)) for message in sent]
    return [(message, id_of(message) in taken) for message in sent]


def copy_for(message: Message, node: int) -> Message:
    """Return a new message to ``node`` with the content of another."""
    about = message.metadata
    return Message(message.content, node, about.message_type, group_id=about.group_id)


def id_of(message: Message) -> str:
    return str(message.metadata.message_id)


# -- fetching
def pull_each(
    grid: Grid, messages: Iterable[Message], arrays: int = 0
) -> list[tuple[Message, Message]]:
    """Return the messages that have been answered, each with its reply.

    An error takes the place of a reply that cannot be read, or that is larger than ``arrays`` and
    `MOST_BESIDE_ARRAYS` bytes together.

    Flower decodes the replies of one ``pull_messages`` together, so a garbled one would lose the
    others and end the run: each is read in a call of its own. The SuperLink is asked once for all,
    as requests for every site that is still at work would keep it busy. It announces a reply only
    once, when the site begins to send it; `_BEGUN` keeps that until all of its parts are there.
    """
    asked = {id_of(message): message for message in messages}
    answered: list[tuple[Message, Message]] = []
    if not asked:
        return answered
    superlink = _superlink_of(grid)
    if superlink is None:
        for message in asked.values():
            answered += _pull(grid, message)
        return answered

    start = time.monotonic()
    _look_for_replies(superlink, asked)
    tell_silence(start)
    begun = [(message, _BEGUN[message]) for message in asked.values() if message in _BEGUN]
    for message, reply in begun:
        answered += _pull_begun(grid, superlink, message, reply, arrays + MOST_BESIDE_ARRAYS)
    return answered


def _look_for_replies(superlink: Any, asked: Mapping[str, Message]) -> None:
    """Ask the SuperLink which messages sites have begun to answer, and note it in `_BEGUN`.

    ``asked`` has the messages by their ids.
    """
    unanswered = [name for name, message in asked.items() if message not in _BEGUN]
    if not unanswered:
        return
    arrived = superlink.PullMessages(PullAppMessagesRequest(message_ids=unanswered))
    for reply, tree in zip(arrived.messages_list, arrived.message_object_trees, strict=True):
        message = asked.get(reply.metadata.reply_to_message_id)
        if message:
            _BEGUN[message] = _BegunReply(
                PullAppMessagesResponse(messages_list=[reply], message_object_trees=[tree])
            )


def _pull_begun(
    grid: Grid, superlink: Any, message: Message, reply: _BegunReply, most: int
) -> list[tuple[Message, Message]]:
    """Return the message with its reply of at most ``most`` bytes; [] while parts are missing.

    Flower itself puts the reply together. Two of its requests to the SuperLink are replaced: it is
    given the announcement that came before, and the parts that are here.
    """
    flower_module = sys.modules[type(grid).__module__]
    pull_objects = partial(_pull_present, reply.parts, most)
    with (
        replaced(superlink, PullMessages=lambda _: reply.announcement),
        replaced(flower_module, pull_objects=pull_objects),
    ):
        try:
            pulled = _pull(grid, message)
        except ObjectUnavailableError:
            return []
    # `_pull` gives its own errors the code 0. Flower has not confirmed such a reply, so that the
    # SuperLink would keep it
    is_unreadable = any(answer.has_error() and not answer.error.code for _, answer in pulled)
    if is_unreadable:
        about = reply.announcement.messages_list[0].metadata
        superlink.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=vars(grid)["node"], run_id=about.run_id, message_object_id=about.message_id
            )
        )
    return pulled


def _pull_present(
    parts: dict[str, bytes], most: int, object_ids: list[str], pull_object_fn: Any
) -> dict[str, bytes]:
    """Add to a reply's ``parts`` those that have come, and return them once all are there.

    It stands in for Flower's ``pull_objects``, which would wait two hours. While a part is missing
    it raises ObjectUnavailableError, as ``pull_object_fn`` does; ``parts`` keeps the others for the
    next call. It raises ValueError for more than ``most`` bytes, or for more than
    `MOST_BESIDE_ARRAYS` that are not of arrays.
    """

    def pull(name: str) -> int:
        return len(parts.setdefault(name, pull_object_fn(name)))

    # a part may be named many times, and each request counts as much as a kilobyte
    missing = [name for name in dict.fromkeys(object_ids) if name not in parts]
    size = sum(map(len, parts.values())) + 2**10 * len(missing)
    # leaving the block waits for both threads, so that the next call asks for no part twice
    with ThreadPoolExecutor(2) as threads:
        for length in threads.map(pull, missing):
            size += length
            if size > most:
                raise ValueError(f"{len(missing)} parts of a reply with more than {most} bytes")

    # the first word of a part is its kind; arrays are in chunks
    beside = sum(len(part) for part in parts.values() if not part.startswith(b"ArrayChunk "))
    # decoded they take far more: each number or list becomes an object
    if beside > MOST_BESIDE_ARRAYS:
        raise ValueError(f"{beside} bytes beside arrays")
    envelope.check_parts(parts, most)
    return parts


def _pull(grid: Grid, message: Message) -> list[tuple[Message, Message]]:
    """Return the message with its reply, or [] without one.

    An error with the code 0 takes the place of a reply that cannot be read.
    """
    try:
        replies = list(grid.pull_messages([id_of(message)]))
        records = []
        for reply in replies:
            if reply.has_content():
                records += list(reply.content.values())
        values = sum(map(len, records))
        if values > MOST_VALUES:
            raise ValueError(f"{values} values in {len(records)} records")
    except UNREADABLE as error:
        why = f"a reply that Flower cannot read: {type(error).__name__}: {error}"
        return [(message, Message(Error(0, why), reply_to=message))]
    for reply in replies:
        if reply.has_content():
            reply.content = envelope.take_out(reply.content)
    return [(message, reply) for reply in replies]


def _superlink_of(grid: Grid) -> Any:
    """Return the client by which the grid talks to a SuperLink; None in a simulation.

    Raises SettingsError if Flower's grid lacks it, as replies could not be limited then.
    """
    if is_simulated(grid) or not type(grid).__module__.startswith("flwr."):
        return None
    with needing_flowers_names():
        return grid._runtime_client  # type: ignore[attr-defined]

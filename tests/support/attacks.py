"""What a hostile or broken client may send, as changes of its honest reply.

They are for the in-process federation of `tests/support/harness.py`. `hostile.py` is a table of
such changes, each with what the server says of it.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)

from protofl_common.wire.payloads import RAW
from server_app.network.exchange import MessageExchange
from tests.support.given import Patch
from tests.support.harness import Tamper

Change = Callable[[Message, Message], Message]
"""(message, honest reply) -> what it sends instead."""


# -- who changes which replies -------------------------------------------------------------------


def by(nodes: Mapping[int, Change], kind: str = MessageType.TRAIN) -> Tamper:
    """Change every reply of this kind that comes from one of ``nodes``: node -> what it does."""

    def tamper(message: Message, reply: Message) -> Message:
        change = nodes.get(message.metadata.dst_node_id)
        if change is None or message.metadata.message_type != kind:
            return reply
        return change(message, reply)

    return tamper


def when(
    change: Any, kind: str | None = None, node: int | None = None, number: int | None = None
) -> Tamper:
    """Change the replies of this kind, of this node and in this round; None stands for any."""

    def tamper(message: Message, reply: Message) -> Any:
        is_chosen = (
            kind in (None, message.metadata.message_type)
            and node in (None, message.metadata.dst_node_id)
            and number in (None, int(message.metadata.group_id))
        )
        return change(message, reply) if is_chosen else reply

    return tamper


def both(first: Change, then: Change) -> Change:
    return lambda message, reply: then(message, first(message, reply))


def change_sent(
    monkeypatch: Patch, node: int | None, number: int, change: Callable[[Message], None]
) -> None:
    """Let a hostile server change what it sends from round ``number`` on.

    It does so to one ``node``, or to all if that is None. Lasts as long as ``monkeypatch``.
    """
    honest_push = MessageExchange._push

    def push(self: Any, messages: Any) -> None:
        for message in messages.values():
            meta = message.metadata
            if node in (None, meta.dst_node_id) and int(meta.group_id) >= number:
                change(message)
        honest_push(self, messages)

    monkeypatch.setattr(MessageExchange, "_push", push)


# -- replies that are none -----------------------------------------------------------------------


def lost(message: Message, reply: Message) -> None:
    """No reply arrives."""


def empty(message: Message, reply: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


def interrupted(*_: object) -> Any:
    """Stop whoever is asked, as Ctrl-C does."""
    raise KeyboardInterrupt


def failing(code: int, reason: str) -> Change:
    """An error takes the place of the reply."""
    return lambda message, _: Message(Error(code, reason), reply_to=message)


silent = failing(0, "gone")
"""What a run looks like without this client's replies."""


# -- changed records -----------------------------------------------------------------------------


def raw(values: np.ndarray) -> Array:
    return Array(dtype=str(values.dtype), shape=values.shape, stype=RAW, data=values.tobytes())


def values_of(array: Array) -> np.ndarray:
    return np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)


def in_place(edit: Callable[..., object]) -> Callable[..., Change]:
    """Turn ``edit(message, reply, …)``, which edits a reply in its place, into a maker of changes.

    The maker takes the arguments after the reply: ``scale(3)`` is then the change that scales by 3.
    """

    @wraps(edit)
    def make_change(*values: Any, **named: Any) -> Change:
        def change(message: Message, reply: Message) -> Message:
            edit(message, reply, *values, **named)
            return reply

        return change

    return make_change


@in_place
def card_with(message: Message, reply: Message, **values: Any) -> None:
    """Change or add entries of the introduction."""
    for key, value in values.items():
        reply.content.config_records["site"][key] = value


@in_place
def card_without(message: Message, reply: Message, entry: str) -> None:
    del reply.content.config_records["site"][entry]


@in_place
def report_with(message: Message, reply: Message, **entries: Any) -> None:
    """Change or add entries of the report; ``losses__x`` is ``losses.x``."""
    for name, value in entries.items():
        reply.content.metric_records["report"][name.replace("__", ".")] = value


@in_place
def extra(
    message: Message, reply: Message, name: str, record: ArrayRecord | MetricRecord | ConfigRecord
) -> None:
    reply.content[name] = record


@in_place
def prototypes_with(
    message: Message,
    reply: Message,
    record_name: str = "prototypes",
    **changes: Callable[[Any], Any],
) -> None:
    """Replace arrays of the prototypes by what a function makes of them: an Array, or values."""
    record = reply.content.array_records[record_name]
    for name, make in changes.items():
        honest = values_of(record[name]) if name in record else None
        made = make(honest)
        record[name] = made if isinstance(made, Array) else raw(made)


def scaled(factor: float, record_name: str = "prototypes") -> Change:
    def longer(means: np.ndarray) -> np.ndarray:
        return (means * np.float32(factor)).astype(np.float32)

    return prototypes_with(record_name, means=longer)


def flipped(num_classes: int) -> Change:
    """Send every prototype under another class's label: C − 1 − j for j, of C classes."""
    return prototypes_with(labels=lambda labels: num_classes - 1 - labels)


@in_place
def flooding(message: Message, reply: Message, rows: int) -> None:
    """Send its prototypes again and again, each 5 % different, until there are so many rows."""
    record = reply.content.array_records["prototypes"]
    means = values_of(record["means"])
    labels = values_of(record["labels"])

    row_copied = np.arange(rows) % len(labels)
    noise = np.random.default_rng(0).normal(1, 0.05, (rows, means.shape[1]))

    record["means"] = raw((means[row_copied] * noise).astype(np.float32))
    record["labels"] = raw(labels[row_copied])


@in_place
def weights_scaled(message: Message, reply: Message, factor: float, entry: str = "weights") -> None:
    """Multiply all floating-point arrays of a record by ``factor``; counters stay as they are."""
    record = reply.content.array_records[entry]
    for name, array in record.items():
        if array.dtype.startswith("float"):
            dtype = np.dtype(array.dtype)
            longer = values_of(array) * dtype.type(factor)
            record[name] = raw(longer.astype(dtype))


@in_place
def reversed_update(message: Message, reply: Message, factor: float) -> None:
    """Send weights w − factor · (w_i − w) instead of its own w_i, where w are those it received."""
    if reply.has_error():  # such weights may ruin the model, and with it this client's training
        return
    received = message.content.array_records["weights"]
    sent = reply.content.array_records["weights"]
    for name, array in sent.items():
        if array.dtype == "float32":
            start = values_of(received[name])
            update = values_of(array) - start
            sent[name] = raw((start - np.float32(factor) * update).astype(np.float32))


# -- attacks of several messages -----------------------------------------------------------------


def claims(samples: int, node: int = 1003) -> Tamper:
    """Let a node claim so many training samples, whenever it says a number of samples.

    It gives each prototype to a wrong class.
    """
    lie = prototypes_with(means=lambda means: np.roll(means, 1, axis=0).copy())

    def share(counts: np.ndarray) -> np.ndarray:
        return np.full(counts.shape, samples // len(counts))

    def tamper(message: Message, reply: Message) -> Message:
        kind = message.metadata.message_type
        if message.metadata.dst_node_id != node or kind == MessageType.EVALUATE:
            return reply
        if kind == MessageType.QUERY:
            return card_with(train_samples=samples)(message, reply)
        reply = report_with(train_samples=samples)(message, reply)
        if "counts" in reply.content.array_records.get("prototypes", {}):
            reply = prototypes_with(counts=share)(message, reply)
        return lie(message, reply)

    return tamper

"""What a hostile or broken client may send, as changes of its honest reply.

They are for the in-process federation of `tests/support/harness.py`. `hostile.py` is a table of
such changes, each with what the server says of it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
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


def everywhere(prototypes: Change, weights: Change) -> Change:
    """Make the first change in replies with prototypes, and the second in those with weights."""

    def change(message: Message, reply: Message) -> Message:
        if "prototypes" in reply.content.array_records:
            reply = prototypes(message, reply)
        if "weights" in reply.content.array_records:
            reply = weights(message, reply)
        return reply

    return change


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


@in_place
def flipped_head(message: Message, reply: Message, num_classes: int) -> None:
    """Send the model of a client that has learnt class j as C − 1 − j, of C classes.

    That is its model with the rows of the last layer in reverse order.
    """
    record = reply.content.array_records["weights"]
    for name, array in record.items():
        if name.startswith("head.") and array.shape[0] == num_classes:
            record[name] = raw(values_of(array)[::-1].copy())


# -- attacks of several messages -----------------------------------------------------------------


def claims(samples: int, nodes: Collection[int] = (1003,), lie: Change | None = None) -> Tamper:
    """Let these nodes claim so many training samples each, whenever they say a number of samples.

    The uploads are changed by ``lie``, which by default gives each prototype to a wrong class.
    """
    lie = lie or prototypes_with(means=lambda means: np.roll(means, 1, axis=0).copy())

    def share(counts: np.ndarray) -> np.ndarray:
        return np.full(counts.shape, samples // len(counts))

    def tamper(message: Message, reply: Message) -> Message:
        kind = message.metadata.message_type
        if message.metadata.dst_node_id not in nodes or kind == MessageType.EVALUATE:
            return reply
        if kind == MessageType.QUERY:
            return card_with(train_samples=samples)(message, reply)
        reply = report_with(train_samples=samples)(message, reply)
        if "counts" in reply.content.array_records.get("prototypes", {}):
            reply = prototypes_with(counts=share)(message, reply)
        return lie(message, reply)

    return tamper


class Colluding:
    """Send the mean of what a round's honest clients send, less ``z`` of its standard deviations.

    Baruch et al., "A Little Is Enough", NeurIPS 2019: each number is one that an honest client
    might have sent. The attackers must reply after the honest clients, so they need the last nodes.
    """

    def __init__(self, nodes: Collection[int], z: float = 1.5) -> None:
        self.nodes = nodes
        self.z = z
        self.heard: dict[str, list[RecordDict]] = {}
        """Round -> what the honest have sent in it."""

    def __call__(self, message: Message, reply: Message) -> Message:
        """Note what honest clients send after training; change what the attackers send."""
        if message.metadata.message_type != MessageType.TRAIN or reply.has_error():
            return reply
        heard = self.heard.setdefault(message.metadata.group_id, [])
        if message.metadata.dst_node_id not in self.nodes:
            heard.append(reply.content)
            return reply
        for name, record in reply.content.array_records.items():
            honest = [content.array_records[name] for content in heard]
            if name == "prototypes":
                self._lie_in_prototypes(record, honest)
            else:
                self._lie_in_arrays(record, honest)
        return reply

    def _below_the_mean(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Return mean − z · standard deviation of each number over the honest clients."""
        lower = np.mean(values, axis=0) - self.z * np.std(values, axis=0)
        return np.asarray(lower, np.float32)

    def _lie_in_arrays(self, record: ArrayRecord, honest: list[ArrayRecord]) -> None:
        for name, array in record.items():
            if array.dtype == "float32":
                record[name] = raw(self._below_the_mean([values_of(one[name]) for one in honest]))

    def _lie_in_prototypes(self, record: ArrayRecord, honest: list[ArrayRecord]) -> None:
        """Lie about each class that an honest client has; of several prototypes, use their mean."""
        means = values_of(record["means"]).copy()
        labels = values_of(record["labels"])
        for label in np.unique(labels):
            honest_means = []
            for one in honest:
                is_of_class = values_of(one["labels"]) == label
                if is_of_class.any():
                    honest_means.append(values_of(one["means"])[is_of_class].mean(axis=0))
            if honest_means:
                means[labels == label] = self._below_the_mean(honest_means)
        record["means"] = raw(means)

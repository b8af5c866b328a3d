"""What a hostile or broken client may send: changes of its honest reply, for the in-process federation."""

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
from tests.support.harness import Tamper

Change = Callable[[Message, Message], Message]
"""(message, honest reply) -> what it sends instead."""


def maker(work: Callable[..., object]) -> Callable[..., Change]:
    """``work`` changes a reply in place; what it takes beside the message and the reply makes a change of it."""

    @wraps(work)
    def made(*values: Any, **named: Any) -> Change:
        def change(message: Message, reply: Message) -> Message:
            work(message, reply, *values, **named)
            return reply

        return change

    return made


def by(nodes: Mapping[int, Change] | dict[int, Change], kind: str = MessageType.TRAIN) -> Tamper:
    """Every reply of this kind of these nodes, changed."""

    def tamper(message: Message, reply: Message) -> Message:
        change = nodes.get(message.metadata.dst_node_id)
        return change(message, reply) if change and message.metadata.message_type == kind else reply

    return tamper


def when(
    change: Any, kind: str | None = None, node: int | None = None, number: int | None = None
) -> Tamper:
    """The replies of this kind, node and round, changed; what is not given may be any."""

    def tamper(message: Message, reply: Message) -> Any:
        meta = message.metadata
        facts = zip(
            (kind, node, number),
            (meta.message_type, meta.dst_node_id, int(meta.group_id)),
            strict=True,
        )
        return (
            change(message, reply)
            if all(wanted in (None, found) for wanted, found in facts)
            else reply
        )

    return tamper


def lost(message: Message, reply: Message) -> None:
    """No reply."""


def empty(message: Message, reply: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


def interrupted(*_: object) -> Any:
    """Whoever is asked is stopped from outside."""
    raise KeyboardInterrupt


def from_node(message: Message, reply: Message) -> Message:
    """With the sender that Flower would write on it."""
    reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
    return reply


def silent(message: Message, reply: Message) -> Message:
    """A failure: what the run looks like without this client's replies."""
    return from_node(message, Message(Error(0, "gone"), reply_to=message))


def raw(values: np.ndarray) -> Array:
    return Array(dtype=str(values.dtype), shape=values.shape, stype=RAW, data=values.tobytes())


def values_of(array: Array) -> np.ndarray:
    return np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)


@maker
def prototypes_with(
    message: Message,
    reply: Message,
    record_name: str = "prototypes",
    **changes: Callable[[Any], Any],
) -> None:
    """Replace arrays of the prototypes by what a function makes of them: an Array, or values."""
    record = reply.content.array_records[record_name]
    for name, make in changes.items():
        made = make(values_of(record[name]) if name in record else None)
        record[name] = made if isinstance(made, Array) else raw(made)


def scaled(factor: float, record_name: str = "prototypes") -> Change:
    return prototypes_with(
        record_name, means=lambda means: (means * np.float32(factor)).astype(np.float32)
    )


def flipped(num_classes: int) -> Change:
    """Every prototype under another class's label: j -> C-1-j."""
    return prototypes_with(labels=lambda labels: num_classes - 1 - labels)


def both(first: Change, then: Change) -> Change:
    return lambda message, reply: then(message, first(message, reply))


@maker
def weights_scaled(message: Message, reply: Message, factor: float, entry: str = "weights") -> None:
    record = reply.content.array_records[entry]
    for name, array in record.items():
        if array.dtype.startswith("float"):
            kind = np.dtype(array.dtype)
            record[name] = raw((values_of(array) * kind.type(factor)).astype(kind))


@maker
def reversed_update(message: Message, reply: Message, factor: float) -> None:
    """Weights w − factor · (w_i − w) instead of w_i, where w is what the client received."""
    if reply.has_error():  # its own training may diverge from what it has done
        return
    received, sent = (
        message.content.array_records["weights"],
        reply.content.array_records["weights"],
    )
    for name, array in sent.items():
        if array.dtype == "float32":
            start, end = values_of(received[name]), values_of(array)
            sent[name] = raw((start - np.float32(factor) * (end - start)).astype(np.float32))


def claims(samples: int, nodes: Collection[int] = (1003,), lie: Change | None = None) -> Tamper:
    """These nodes say that they have so many training samples each, and give each prototype to a wrong class."""
    wrong = lie or prototypes_with(means=lambda means: np.roll(means, 1, axis=0).copy())

    def tamper(message: Message, reply: Message) -> Message:
        if (
            message.metadata.dst_node_id not in nodes
            or message.metadata.message_type == MessageType.EVALUATE
        ):
            return reply
        if message.metadata.message_type == MessageType.QUERY:
            reply.content.config_records["site"]["train_samples"] = samples
            return reply
        report_with(train_samples=samples)(message, reply)
        record = reply.content.array_records.get("prototypes", {})
        if "counts" in record:
            record["counts"] = raw(
                np.full(record["counts"].shape, samples // record["counts"].shape[0])
            )
        return wrong(message, reply)

    return tamper


def everywhere(prototypes: Change, weights: Change) -> Change:
    """Each change where there is something to change."""

    def change(message: Message, reply: Message) -> Message:
        for name, then in (("prototypes", prototypes), ("weights", weights)):
            if name in reply.content.array_records:
                reply = then(message, reply)
        return reply

    return change


@maker
def flipped_head(message: Message, reply: Message, num_classes: int) -> None:
    """The model of a client that has learnt j as C-1-j: the rows of its last layer, the other way round."""
    record = reply.content.array_records["weights"]
    for name, array in record.items():
        if name.startswith("head.") and array.shape[0] == num_classes:
            record[name] = raw(values_of(array)[::-1].copy())


@maker
def flooding(message: Message, reply: Message, rows: int) -> None:
    """Its prototypes again and again, a little different each time, until there are so many."""
    record = reply.content.array_records["prototypes"]
    means, labels = values_of(record["means"]), values_of(record["labels"])
    copies = np.arange(rows) % len(labels)
    noise = np.random.default_rng(0).normal(1, 0.05, (rows, means.shape[1]))
    record["means"] = raw((means[copies] * noise).astype(np.float32))
    record["labels"] = raw(labels[copies])


class Colluding:
    """What the honest of a round send on average, less ``z`` of their standard deviations, number by number.

    Baruch et al., "A Little Is Enough", NeurIPS 2019: each number is one that an honest client might have sent. It
    must hear the honest first.
    """

    def __init__(self, nodes: Collection[int], z: float = 1.5) -> None:
        self.nodes, self.z = nodes, z
        self.heard: dict[str, list[RecordDict]] = {}

    def __call__(self, message: Message, reply: Message) -> Message:
        if message.metadata.message_type != MessageType.TRAIN or reply.has_error():
            return reply
        heard = self.heard.setdefault(message.metadata.group_id, [])
        if message.metadata.dst_node_id not in self.nodes:
            heard.append(reply.content)
            return reply
        for name, record in reply.content.array_records.items():
            lie = self._lie_in_prototypes if name == "prototypes" else self._lie
            lie(record, [content.array_records[name] for content in heard])
        return reply

    def _within(self, values: Sequence[np.ndarray]) -> np.ndarray:
        return np.asarray(np.mean(values, axis=0) - self.z * np.std(values, axis=0), np.float32)

    def _lie(self, record: ArrayRecord, honest: list[ArrayRecord]) -> None:
        for name, array in record.items():
            if array.dtype == "float32":
                record[name] = raw(self._within([values_of(one[name]) for one in honest]))

    def _lie_in_prototypes(self, record: ArrayRecord, honest: list[ArrayRecord]) -> None:
        means, labels = values_of(record["means"]).copy(), values_of(record["labels"])
        sets = [(values_of(one["means"]), values_of(one["labels"])) for one in honest]
        for label in np.unique(labels):
            votes = [rows[held == label].mean(axis=0) for rows, held in sets if label in held]
            if votes:
                means[labels == label] = self._within(votes)
        record["means"] = raw(means)


@maker
def card_with(message: Message, reply: Message, **values: Any) -> None:
    """Change or add entries of the introduction."""
    for key, value in values.items():
        reply.content.config_records["site"][key] = value


@maker
def extra(
    message: Message, reply: Message, name: str, record: ArrayRecord | MetricRecord | ConfigRecord
) -> None:
    reply.content[name] = record


@maker
def report_with(message: Message, reply: Message, **entries: Any) -> None:
    """Change or add entries of the report; ``losses__x`` is ``losses.x``."""
    for name, value in entries.items():
        reply.content.metric_records["report"][name.replace("__", ".")] = value


def replayed() -> Change:
    """Its first reply, again and again."""
    kept: list[RecordDict] = []

    def change(message: Message, reply: Message) -> Message:
        kept.append(reply.content)
        return from_node(message, Message(kept[0], reply_to=message))

    return change

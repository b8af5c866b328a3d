"""A message's records as one: the same records come out, and nothing where they cannot be read."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from client_app.answers import answered
from protofl_common.wire.envelope import LARGEST, NAME, put_in, take_out
from server_app.network.flower_compat import push_each


def content(numbers: int = 6) -> RecordDict:
    arrays = ArrayRecord({"w": Array(np.arange(numbers, dtype=np.float32)), "b": Array(np.zeros((), np.int64))})
    config = ConfigRecord({"name": "run", "on": True, "keys": b"\0\1", "shape": [1, 2], "none": list[str]()})
    return RecordDict({"weights": arrays, "round": config, "report": MetricRecord({"loss": 0.5, "n": 3})})


def test_what_comes_out_is_what_was_put_in_and_travels_in_three_parts() -> None:
    inside = put_in(content())
    assert take_out(inside) == content()
    assert list(take_out(inside)) == list(content())
    assert put_in(inside) is inside
    assert len(get_all_nested_objects(inside)) == 2  # Beside the message itself; eight without it
    assert len(get_all_nested_objects(content())) == 8


def test_large_content_and_a_message_without_an_envelope_stay_as_they_are() -> None:
    large = content(LARGEST // 4 + 1)
    assert put_in(large) is large
    assert take_out(large) is large


def test_what_goes_to_many_sites_is_in_memory_once() -> None:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    messages = [Message(content(), node, "train", group_id="1") for node in (1, 2)]
    grid: Any = SimpleNamespace(_runtime_client="of a SuperLink", push_messages=lambda sent: [])
    push_each(grid, messages)
    one, other = (message.content.config_records[NAME]["content"] for message in messages)
    assert one is other


@pytest.mark.parametrize("text", [b"\xff\xff", b"\x0a\x03\x0a\x01x", 5, "words", None])
def test_an_envelope_that_cannot_be_read_has_nothing_inside(text: object) -> None:
    """The second is a record without a kind."""
    broken = RecordDict({NAME: ConfigRecord({} if text is None else {"content": text})})
    assert take_out(broken) == RecordDict()
    assert take_out(RecordDict({NAME: MetricRecord({"content": 1})})) == RecordDict()


def test_nothing_may_lie_beside_what_is_in_an_envelope() -> None:
    inside = put_in(content())
    assert take_out(RecordDict({**inside, "more": ConfigRecord({"bytes": bytes(9)})})) == RecordDict()
    assert take_out(RecordDict({NAME: ConfigRecord({**inside.config_records[NAME], "more": bytes(9)})})) == RecordDict()


def test_a_client_answers_in_an_envelope_what_came_in_one() -> None:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    handler = answered(lambda message, _: RecordDict({**message.content}))
    context = Context(1, 1, {}, RecordDict(), {})
    for sent in (content(), put_in(content())):
        message = Message(sent, 1, "query", group_id="1")
        message.metadata.__dict__["_message_id"] = "any"
        reply = handler(message, context)
        assert (NAME in reply.content) == (NAME in sent)
        assert take_out(reply.content) == content()

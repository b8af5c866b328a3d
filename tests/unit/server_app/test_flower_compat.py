"""What is changed of Flower's simulation, on its own in-memory state."""

import time
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from protofl_common.config.options import SettingsError
from server_app.network.flower_compat import find_messages_by_node, pull_each, push_each
from tests.support.attacks import raw
from tests.support.harness import LocalGrid

NODES = 30


def simulation() -> tuple[Any, list[int], list[int]]:
    """A grid whose nodes have a message each, the nodes, and how often messages were looked at."""
    # Imported here, as it would cost every worker a second.
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager
    from flwr.superlink.grid import InMemoryGrid

    factory = LinkStateFactory(
        FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()
    )
    state: Any = factory.state()
    looks: list[int] = []
    check = state._check_stored_messages
    state._check_stored_messages = lambda ids, *more: (looks.append(len(ids)), check(ids, *more))
    nodes = [
        state.create_node("aid", "name", bytes([number]) * 32, heartbeat_interval=1e9)
        for number in range(NODES)
    ]
    for node in nodes:
        state.acknowledge_node_heartbeat(node, 1e9)
    run_id = state.create_run(
        "id", "1.0.0", "hash", {}, NOOP_FEDERATION_ID, None, "aid", "serverapp"
    )
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, 1
    return InMemoryGrid(factory), nodes, looks


@pytest.mark.parametrize("changed", [False, True])
def test_every_node_gets_its_messages_once(changed: bool) -> None:
    grid, nodes, looks = simulation()
    if changed:
        find_messages_by_node(grid)
    sent = grid.push_messages([Message(RecordDict(), node, "train") for node in reversed(nodes)])

    assert len(list(sent)) == NODES

    for number, node in enumerate(nodes):
        (message,) = grid.state.get_message_ins(node_id=node, limit=1)
        assert (message.metadata.dst_node_id, bool(message.metadata.delivered_at)) == (node, True)
        assert message.metadata.message_id == list(sent)[NODES - 1 - number]
        assert grid.state.get_message_ins(node_id=node, limit=1) == []

    assert len(looks) == 0 if changed else len(looks) > NODES**2


def test_a_message_that_flower_does_not_take_is_not_delivered() -> None:
    """And a grid of another kind stays as it is."""
    grid, _, _ = simulation()
    find_messages_by_node(grid)

    assert list(grid.push_messages([Message(RecordDict(), 4711, "train")])) == []
    assert grid.state.get_message_ins(node_id=4711, limit=1) == []

    other = LocalGrid({}, {})
    before = dict(vars(other))
    find_messages_by_node(other)

    assert vars(other) == before


def test_a_grid_that_hides_its_superlink_is_refused(monkeypatch: Any) -> None:
    """Its replies would have no limit of bytes."""
    monkeypatch.delattr(HttpGrid, "_runtime_client")
    with pytest.raises(SettingsError, match="'HttpGrid' object has no attribute '_runtime_client'"):
        push_each(HttpGrid(token="any"), [])


class Replies:
    """A SuperLink with some replies, parts of which are ``missing``; it counts the requests."""

    def __init__(self, replies: list[Message]) -> None:
        self.waiting = {reply.metadata.reply_to_message_id: reply for reply in replies}
        self.objects, self.missing, self.pulled, self.looks = (
            dict[str, bytes](),
            set[str](),
            list[str](),
            0,
        )
        self.confirmed = set[str]()

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        self.looks += 1
        found = [self.waiting.pop(name) for name in request.message_ids if name in self.waiting]
        for reply in found:
            self.objects |= {
                name: part.deflate() for name, part in get_all_nested_objects(reply).items()
            }
            reply.metadata.__dict__["_message_id"] = reply.object_id
        protos = [message_to_proto(remove_content_from_message(reply)) for reply in found]
        return PullAppMessagesResponse(
            messages_list=protos, message_object_trees=[get_object_tree(m) for m in found]
        )

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        content = (
            self.objects[request.object_id]
            .replace(b"spoilt", b"\xff\xff\xff")
            .replace(b'{"1"', b"[" * 10**5)
        )
        content = content.replace(b"[0]", b"[%b0]" % (b"0," * 299))
        there = request.object_id not in self.missing
        time.sleep(0.1 if there else 0.02)
        self.pulled += [request.object_id] * there
        return PullObjectResponse(
            object_found=True, object_available=there, object_content=content * there
        )

    def ConfirmMessageReceived(self, request: ConfirmMessageReceivedRequest) -> None:
        self.confirmed.add(request.message_object_id)


def test_the_superlink_is_asked_once_and_a_reply_that_is_bad_or_unfinished_costs_only_itself(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr("server_app.network.flower_compat.MOST_VALUES", 5)
    monkeypatch.setattr("server_app.network.flower_compat.BESIDE", 2**17)
    grid: Any = HttpGrid(token="any")
    grid.set_run(Run.create_empty(1))
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    messages = [Message(RecordDict(), node, "train") for node in range(12)]
    for number, message in enumerate(messages):
        message.metadata.__dict__["_message_id"] = f"message-{number}"
    contents = [
        RecordDict({"said": ConfigRecord({"word": word})})
        for word in ["whole", "spoilt", "slow", "sound"]
    ]
    contents += [
        RecordDict({"said": ArrayRecord({f"{size}": raw(np.zeros(size))})}) for size in (1, 2**7)
    ]
    nested = {name: ArrayRecord({"array": raw(np.ones(1))}) for name in ("outer", "inner")}
    outer, inner = (record["array"] for record in nested.values())
    vars(outer)["_chunks"] = [(inner.object_id, inner)]
    contents += [
        RecordDict(nested),
        RecordDict(dict.fromkeys("abc", ConfigRecord({"one": 1, "two": 2}))),
    ]
    contents += [RecordDict({f"{i}": ConfigRecord({"i": i}) for i in range(128)})]
    contents += [
        RecordDict({"zeros": contents[5]["said"]}),
        RecordDict({"said": ConfigRecord({"word": "x" * 2**18})}),
    ]
    replies = [
        Message(one, reply_to=message) for one, message in zip(contents, messages, strict=False)
    ]
    grid._client = link = Replies(replies)
    link.missing = {contents[2]["said"].object_id}
    answered = pull_each(grid, messages[:9] + messages[11:])

    assert [message for message, _ in answered] == messages[:2] + messages[3:9]
    assert link.confirmed == {
        reply.metadata.message_id for reply in replies[:2] + replies[3:9]
    }  # and so deleted there
    assert [reply.content["said"]["word"] for _, reply in answered[::2][:2]] == ["whole", "sound"]

    reasons = " ".join(answered[number][1].error.reason[33:44] for number in (1, 3, 4, 5, 6, 7))
    assert reasons == "DecodeError RecursionEr ValueError: KeyError: ' ValueError: ValueError:"
    assert answered[7][1].error.reason.endswith("130 parts of a reply with more than 131072 bytes")
    assert pull_each(grid, [messages[2], messages[11]]) == pull_each(grid, []) == []

    link.missing.clear()
    ((message, reply),) = pull_each(grid, [messages[2]])

    assert (message, reply.content["said"]["word"]) == (messages[2], "slow")
    assert (link.looks, sorted(link.pulled)) == (2, sorted(set(link.pulled)))

    (_, zeros), (_, words) = pull_each(grid, messages[9:11], 2**19)
    assert (len(zeros.content["zeros"]["128"].data), words.has_error()) == (300 * 2**10, True)

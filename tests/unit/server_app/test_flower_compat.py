"""What is changed of Flower's simulation, on its own in-memory state."""

import time

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
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


def simulation():
    """Return a grid of Flower's, its nodes, and a list that grows with each look at messages.

    An entry of the list is the number of messages that were looked at.
    """
    # Imported here, as it would cost every worker a second.
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager
    from flwr.superlink.grid import InMemoryGrid

    factory = LinkStateFactory(
        FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()
    )
    state = factory.state()
    looks = []
    check = state._check_stored_messages

    def noted(ids, *more):
        looks.append(len(ids))
        return check(ids, *more)

    state._check_stored_messages = noted
    nodes = []
    for number in range(NODES):
        node = state.create_node("aid", "name", bytes([number]) * 32, heartbeat_interval=1e9)
        state.acknowledge_node_heartbeat(node, 1e9)
        nodes.append(node)
    run_id = state.create_run(
        "id", "1.0.0", "hash", {}, NOOP_FEDERATION_ID, None, "aid", "serverapp"
    )
    act_as(run_id)
    return InMemoryGrid(factory), nodes, looks


def act_as(run_id):
    """Make this process the server of a Flower run, as its SuperExec does."""
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = 1


@pytest.mark.parametrize("changed", [False, True])
def test_every_node_gets_its_messages_once(changed):
    """Flower's own grid looks at all messages for each node; the ``changed`` one at none."""
    grid, nodes, looks = simulation()
    if changed:
        find_messages_by_node(grid)

    messages = [Message(RecordDict(), node, "train") for node in reversed(nodes)]
    sent = list(grid.push_messages(messages))

    assert len(sent) == NODES
    for node, message_id in zip(nodes, reversed(sent), strict=True):
        (message,) = grid.state.get_message_ins(node_id=node, limit=1)
        assert message.metadata.dst_node_id == node
        assert message.metadata.delivered_at
        assert message.metadata.message_id == message_id
        assert grid.state.get_message_ins(node_id=node, limit=1) == []
    if changed:
        assert looks == []
    else:
        assert len(looks) > NODES**2


def test_a_message_that_flower_does_not_take_is_not_delivered():
    """A grid of another kind than Flower's stays as it is."""
    grid, _, _ = simulation()
    find_messages_by_node(grid)

    assert list(grid.push_messages([Message(RecordDict(), 4711, "train")])) == []
    assert grid.state.get_message_ins(node_id=4711, limit=1) == []

    other = LocalGrid({}, {})
    before = dict(vars(other))
    find_messages_by_node(other)

    assert vars(other) == before


def test_a_grid_that_hides_its_superlink_is_refused(monkeypatch):
    """The replies of such a grid would have no limit of bytes."""
    monkeypatch.delattr(HttpGrid, "_runtime_client")
    with pytest.raises(SettingsError, match="'HttpGrid' object has no attribute '_runtime_client'"):
        push_each(HttpGrid(token="any"), [])


class Replies:
    """A SuperLink with some replies, parts of which may be ``missing``; it counts the requests.

    It spoils some contents on their way: see `PullObject`.
    """

    def __init__(self, replies):
        self.waiting = {reply.metadata.reply_to_message_id: reply for reply in replies}
        self.objects: dict[str, bytes] = {}
        self.missing: set[str] = set()
        self.pulled: list[str] = []
        self.looks = 0
        self.confirmed: set[str] = set()

    def PullMessages(self, request):
        self.looks += 1
        found = [self.waiting.pop(name) for name in request.message_ids if name in self.waiting]
        for reply in found:
            for name, part in get_all_nested_objects(reply).items():
                self.objects[name] = part.deflate()
            reply.metadata.__dict__["_message_id"] = reply.object_id
        protos = [message_to_proto(remove_content_from_message(reply)) for reply in found]
        trees = [get_object_tree(reply) for reply in found]
        return PullAppMessagesResponse(messages_list=protos, message_object_trees=trees)

    def PullObject(self, request):
        """Return an object's bytes; what is missing is answered soon, the rest takes its time.

        The word "spoilt" becomes no UTF-8, the table of the array "1" nested too deeply, and a list
        of one chunk 300 times as long.
        """
        content = self.objects[request.object_id]
        content = content.replace(b"spoilt", b"\xff\xff\xff")
        content = content.replace(b'{"1"', b"[" * 10**5)
        content = content.replace(b"[0]", b"[%b0]" % (b"0," * 299))

        if request.object_id in self.missing:
            time.sleep(0.02)
            return PullObjectResponse(object_found=True, object_available=False)
        time.sleep(0.1)
        self.pulled.append(request.object_id)
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        self.confirmed.add(request.message_object_id)


def a_word(text):
    return RecordDict({"said": ConfigRecord({"word": text})})


def an_array(size):
    """Return an array of zeros, under its size as a name."""
    return RecordDict({"said": ArrayRecord({f"{size}": raw(np.zeros(size))})})


def an_array_inside_another():
    """Return two arrays of which the outer one names the inner one as its chunk."""
    nested = {name: ArrayRecord({"array": raw(np.ones(1))}) for name in ("outer", "inner")}
    outer = nested["outer"]["array"]
    inner = nested["inner"]["array"]
    vars(outer)["_chunks"] = [(inner.object_id, inner)]
    return RecordDict(nested)


@pytest.mark.slow
def test_the_superlink_is_asked_once_and_a_reply_that_is_bad_or_unfinished_costs_only_itself(
    monkeypatch,
):
    """Eleven sites reply to twelve messages; some replies are spoilt, too large, or not yet whole.

    A message costs nobody but its site. Replies 9 and 10 are asked for last, with a higher limit.
    """
    # so few values, and bytes beside the arrays, may a reply have here
    monkeypatch.setattr("server_app.network.flower_compat.MOST_VALUES", 5)
    monkeypatch.setattr("server_app.network.flower_compat.MOST_BESIDE_ARRAYS", 2**17)
    grid = HttpGrid(token="any")
    grid.set_run(Run.create_empty(1))
    act_as(run_id=1)
    messages = [Message(RecordDict(), node, "train") for node in range(12)]
    for number, message in enumerate(messages):
        message.metadata.__dict__["_message_id"] = f"message-{number}"

    long_array = an_array(2**7)
    contents = [
        a_word("whole"),  # 0
        a_word("spoilt"),  # 1: a word that is no UTF-8
        a_word("slow"),  # 2: its content is missing at first
        a_word("sound"),  # 3
        an_array(1),  # 4: its table is nested too deeply
        long_array,  # 5: made 300 times as long
        an_array_inside_another(),  # 6
        RecordDict(dict.fromkeys("abc", ConfigRecord({"one": 1, "two": 2}))),  # 7: too many values
        RecordDict({f"{i}": ConfigRecord({"i": i}) for i in range(128)}),  # 8: too many parts
        RecordDict({"zeros": long_array["said"]}),  # 9: as 5, with a higher limit
        a_word("x" * 2**18),  # 10: more beside arrays than may be
    ]
    replies = []
    for content, message in zip(contents, messages, strict=False):  # the last has no reply
        replies.append(Message(content, reply_to=message))
    link = Replies(replies)
    link.missing = {contents[2]["said"].object_id}
    grid._client = link

    answered = pull_each(grid, messages[:9] + messages[11:])

    # all but number 2, which is not yet whole, and the last
    assert [message for message, _ in answered] == messages[:2] + messages[3:9]
    # and so deleted at the SuperLink
    assert link.confirmed == {reply.metadata.message_id for reply in replies[:2] + replies[3:9]}
    of_message = {message.metadata.message_id: reply for message, reply in answered}
    assert of_message["message-0"].content["said"]["word"] == "whole"
    assert of_message["message-3"].content["said"]["word"] == "sound"
    reasons = {
        1: "DecodeError",
        4: "RecursionError",
        5: "ValueError",
        6: "KeyError",
        7: "ValueError",
        8: "ValueError",
    }
    for number, kind in reasons.items():
        reason = of_message[f"message-{number}"].error.reason
        assert reason.startswith(f"a reply that Flower cannot read: {kind}: ")
    too_many = "130 parts of a reply with more than 131072 bytes"
    assert of_message["message-8"].error.reason.endswith(too_many)

    assert pull_each(grid, [messages[2], messages[11]]) == []
    assert pull_each(grid, []) == []

    link.missing.clear()
    ((message, reply),) = pull_each(grid, [messages[2]])
    assert message == messages[2]
    assert reply.content["said"]["word"] == "slow"
    assert link.looks == 2
    assert sorted(link.pulled) == sorted(set(link.pulled)), "no object is pulled twice"

    (_, zeros), (_, words) = pull_each(grid, messages[9:11], 2**19)
    assert len(zeros.content["zeros"]["128"].data) == 300 * 2**10  # 128 numbers of 8 bytes
    assert words.has_error()

"""What is changed of Flower's simulation, on its own in-memory state."""

from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.task_identity import TaskIdentity

from server_app.network.flower_compat import find_messages_by_node
from tests.support.harness import LocalGrid

NODES = 30


def simulation() -> tuple[Any, list[int], list[int]]:
    """A grid on which each of the nodes has been sent a message, the nodes, and how often messages were looked at."""
    from flwr.server.superlink.linkstate import LinkStateFactory  # here: a second of imports in every worker
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager
    from flwr.superlink.grid import InMemoryGrid

    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
    state: Any = factory.state()
    looks: list[int] = []
    check = state._check_stored_messages
    state._check_stored_messages = lambda ids, *more: (looks.append(len(ids)), check(ids, *more))
    nodes = [state.create_node("aid", "name", bytes([number]) * 32, heartbeat_interval=1e9) for number in range(NODES)]
    for node in nodes:
        state.acknowledge_node_heartbeat(node, 1e9)
    run_id = state.create_run("id", "1.0.0", "hash", {}, NOOP_FEDERATION_ID, None, "aid", "serverapp")
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
        assert message.metadata.dst_node_id == node
        assert message.metadata.delivered_at
        assert message.metadata.message_id == list(sent)[NODES - 1 - number]
        assert grid.state.get_message_ins(node_id=node, limit=1) == []
    assert len(looks) == 0 if changed else len(looks) > NODES**2


def test_a_message_that_flower_does_not_take_is_not_delivered() -> None:
    grid, _, _ = simulation()
    find_messages_by_node(grid)
    assert list(grid.push_messages([Message(RecordDict(), 4711, "train")])) == []
    assert grid.state.get_message_ins(node_id=4711, limit=1) == []


def test_other_grids_stay_as_they_are() -> None:
    grid = LocalGrid({}, {})
    before = dict(vars(grid))
    find_messages_by_node(grid)
    assert vars(grid) == before

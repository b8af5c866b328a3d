"""What a SuperNode does where the process of a message is lost, or none begins."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta

import pytest
from flwr.app import Message, MessageType, RecordDict
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.date import now
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from protofl_common.flower import be_server_of, set_message_id
from protofl_common.tools.flower import TaskType, supernode_process
from protofl_common.tools.site import supernode
from protofl_common.tools.site.supernode import LOST, Waits
from tests.support.processes import output_of

pytestmark = pytest.mark.slow  # most of these tests start processes

RUN = 7


class Site:
    """Flower's SuperNode with one message, and a clock of its own that runs while it sleeps.

    ``meanwhile`` is called at every pause. ``sent`` is what has gone to the SuperLink.
    """

    def __init__(self, monkeypatch):
        self.store = ObjectStoreFactory().store()
        self.state = InMemoryNodeState(self.store)
        self.state.set_node_id(1)
        self.seconds = 0.0
        self.meanwhile: Callable[[], object] = lambda: None
        self.sent: list[Message] = []
        self.executor_ended: int | None = None
        monkeypatch.setattr("time.sleep", self.sleep)
        monkeypatch.setattr("time.monotonic", lambda: self.seconds)
        monkeypatch.setattr(
            in_memory_corestate, "now", lambda: now() + timedelta(seconds=self.seconds)
        )
        be_server_of(RUN)  # else no message can be made here
        self.message = Message(RecordDict(), 1, MessageType.TRAIN, group_id="1")
        set_message_id(self.message, "asked")
        self.state.store_message(self.message)
        task = self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=RUN)
        assert task
        self.task: int = task

    def poll(self):
        return self.executor_ended

    def sleep(self, seconds):
        self.seconds += seconds
        self.meanwhile()

    def begin(self):
        """Let a process take the task, but not yet fetch its message."""
        assert self.state.claim_task(self.task)
        assert self.state.activate_task(self.task)

    def reply(self):
        """Put the reply to the message into the SuperNode's store, from where it is sent."""
        reply = Message(RecordDict(), reply_to=self.message)
        start_client_internal._insert_message(reply, self.state, self.store)
        return reply

    def send(self, message, *_):
        self.sent.append(message)
        return set(), "session"

    def push(self):
        """Do as Flower does after it has received a message, until the reply is sent."""
        waits = Waits(self)
        with supernode_process(waits, supernode.settings_of, waits.watch):
            start_client_internal._push_messages(
                state=self.state,
                object_store=self.store,
                send=self.send,
                push_object=lambda *_: None,
            )


@pytest.fixture
def site(monkeypatch):
    """A SuperNode whose end is a ``SystemExit`` with the reason."""

    def end(why):
        raise SystemExit(why)

    monkeypatch.setattr(supernode, "end_supernode", end)
    return Site(monkeypatch)


def test_a_process_frozen_before_it_fetched_its_message_is_answered_for(site):
    """Flower gives its task up after a minute, and would wait for the reply for ever."""
    site.begin()

    site.push()

    (answer,) = site.sent
    assert answer.has_error()
    assert answer.error.reason == LOST
    assert answer.metadata.reply_to_message_id == "asked"
    assert 60 < site.seconds < 65  # soon after Flower's minute


def test_a_reply_that_comes_as_its_process_ends_is_sent(site):
    """After 20 s the process replies and finishes its task."""
    site.begin()

    def reply_once():
        # Flower hands a message out once, so it is asked for only when its time has come
        if site.seconds > 20 and site.state.get_messages_legacy(is_reply=False):
            site.reply()
            assert site.state.finish_task(site.task, "completed", "")

    site.meanwhile = reply_once
    site.push()

    (answer,) = site.sent
    assert not answer.has_error()


def test_a_message_that_no_process_takes_ends_the_supernode(site):
    """Who starts it again, such as systemd, gives it a new process from which clients are forked.

    Here a process takes the task again and again, and never begins with it.
    """

    def take_and_freeze():
        site.state.claim_task(site.task)

    site.meanwhile = take_and_freeze
    with pytest.raises(SystemExit, match="No process took a message in 300 s"):
        site.push()


def test_a_supernode_does_not_outlive_the_process_that_starts_those_of_messages(site):
    site.executor_ended = -9  # killed
    with pytest.raises(SystemExit, match="The process that starts those of messages has ended"):
        site.push()


IMPORTED = """
import sys
from protofl_common.tools.cli import parser_of, site
from protofl_common.tools.flower import require_for_site
from protofl_common.tools.site import check, supernode
parser_of("site")
require_for_site()
list(check.folders({"site-name": "north"}))
print([name for name in ("torch", "scipy", "matplotlib") if name in sys.modules])
"""


def test_a_supernode_has_no_pytorch_in_memory():
    """A SuperNode waits for months, and PyTorch would double its memory."""
    assert output_of([sys.executable, "-c", IMPORTED]) == "[]\n"


LOGGED = """
import logging
from flwr.common.logger import log
from protofl_common.tools.flower import keep_log_short
keep_log_short()
of_a_message = ("", "[RUN 7, ROUND 1]", "Receiving: train message", "Sent successfully")
for text in (*of_a_message, "SuperNode ID: 5"):
    log(logging.INFO, text)
log(logging.ERROR, "Failed to receive message")
"""


@pytest.mark.parametrize(("level", "number"), [("", 2), ("INFO", 6)])
def test_a_sites_log_has_no_blank_lines_no_colours_and_no_lines_of_flowers_on_each_message(
    level, number
):
    """``number`` of six lines stay; all do if Flower's own level is asked for."""
    env = {**os.environ, "FLWR_LOG_LEVEL": level}
    if not level:
        del env["FLWR_LOG_LEVEL"]
    command = [sys.executable, "-c", LOGGED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    lines = done.stderr.splitlines()

    assert len(lines) == number

    if not level:
        identity, failure = lines
        assert re.fullmatch(r"INFO 20\d\d-.* SuperNode ID: 5", identity)
        assert re.fullmatch(r"ERROR 20\d\d-.* Failed to receive message", failure)

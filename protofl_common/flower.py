"""Flower's private names that the apps, the wire and the simulation use.

Flower may change them in any version. Only this file and `tools/flower.py`, which has those of
commands and their processes, import any: where one is missing, this says which.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from flwr.app import Message

from protofl_common.config.options import SettingsError

TRIED_ON = ("1.41", "1.42")
"""The versions of Flower with which ProtoFL's tests have passed."""


@contextmanager
def needing_flowers_names() -> Iterator[None]:
    """Raise SettingsError instead of Python's own error if the installed Flower lacks a name.

    The name that is missing may be an import (ImportError), an attribute of a module or an object
    (AttributeError), or a command among Flower's entry points (LookupError, which `console_script`
    of `tools/flower.py` raises).
    """
    try:
        yield
    except (ImportError, AttributeError, LookupError) as error:
        raise SettingsError(
            f"Flower {version('flwr')} lacks a name that ProtoFL needs: {error}; "
            f"install one that ProtoFL was tried on, {' or '.join(TRIED_ON)}"
        ) from error


with needing_flowers_names():
    # why a SuperLink has no reply
    from flwr.common.constant import ErrorCode

    # a message as bytes, for the envelope
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
    from flwr.proto import recorddict_pb2

    # what the server asks a SuperLink itself, without Flower's Grid
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse

    # a SuperLink was restarted while a message was on its way; a part of a reply has not come yet
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, ObjectUnavailableError

    # who creates messages in this process
    from flwr.supercore.task_identity import TaskIdentity


def be_server_of(run_id: int) -> None:
    """Let this process create messages as the ServerApp of a run, without a SuperLink."""
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = 1  # as Flower numbers a SuperLink


def set_message_id(message: Message, name: str) -> None:
    """Give a message the id that a SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = name


def set_sender(reply: Message, node: int) -> None:
    """Name the node that a reply comes from, as its SuperNode would."""
    reply.metadata.__dict__["_src_node_id"] = node

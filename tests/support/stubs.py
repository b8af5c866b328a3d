"""SuperNodes without machines: many in one process, each with a connection and a key of its own.

A stub talks to the SuperLink by the code of Flower's SuperNode, over TLS, and makes the pauses of
``protofl site run``. Its replies come from our client code. By default that code answers each
question once, and all stubs send copies of the reply under their own names; where masks make every
reply different, each stub answers by itself.
"""

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode import fleet_http_connection

from protofl_common.basics.replaced import replaced
from protofl_common.experiment.settings import default_run_config
from protofl_common.flower import set_message_id, set_sender
from protofl_common.simulation.grid import answer
from protofl_common.tools.flower import client_of, superlink_at
from protofl_common.tools.site.supernode import Waits
from protofl_common.wire import envelope
from protofl_common.wire.records import AUDIT

IDLE_SECONDS = 3.0  # Flower's pause after it has asked for a message and there was none
RESTART_SECONDS = 5.0  # as the README's loop around a site


@dataclass(frozen=True)
class Crew:
    """The stubs of one process."""

    address: str  # of the SuperLink
    certificates: Path  # of the authority
    node: dict[str, Any]  # the node config that they share
    seconds: float  # that each seems to train
    copies: bool
    log: Path  # gets a line of JSON for each message

    def be(self, names: Sequence[str]) -> None:
        """Register the sites with these names, connect them, and answer until this is killed."""
        sys.stdout = sys.stderr = self.log.with_suffix(".log").open("w")
        keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}
        with client_of(superlink_at("stubs", self.address, str(self.certificates))) as client:
            for name, key in keys.items():
                public_key = public_key_to_bytes(key.public_key())
                client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name))
        threads = [threading.Thread(target=Stub(self, name, key).run) for name, key in keys.items()]
        with replaced(fleet_http_connection, flwr_exit=_give_up):  # it would end all of them
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    @cached_property
    def lock(self) -> threading.Lock:
        return threading.Lock()

    @cached_property
    def known(self) -> dict[tuple[str, str], RecordDict]:
        """Kind and round of a question -> the content of the reply to it."""
        return {}

    def reply(self, name: str, message: Message, run_config: dict[str, Any]) -> Message:
        """Answer a message as the site ``name``.

        With `copies` only the first message of a kind and round is answered by our client code;
        every later site sends a copy under its own name. Errors are not copied.
        """
        about = message.metadata
        question = (about.message_type, about.group_id)
        with self.lock:
            if not self.copies:
                return self._answer(name, message, run_config)
            if question not in self.known:
                reply = self._answer(f"pattern-{os.getpid()}", message, run_config)
                if reply.has_error():
                    return reply
                self.known[question] = envelope.take_out(reply.content)

        content = RecordDict(dict(self.known[question]))
        content[AUDIT] = ConfigRecord({"head": secrets.token_hex(32)})  # no two uploads are equal
        if "site" in content:
            content["site"] = ConfigRecord({**content.config_records["site"], "name": name})
        reply = Message(envelope.put_in(content), reply_to=message)
        set_sender(reply, about.dst_node_id)
        return reply

    def _answer(self, name: str, message: Message, run_config: dict[str, Any]) -> Message:
        return answer(
            message, message.metadata.run_id, {**self.node, "site-name": name}, run_config
        )

    def note(self, **facts: Any) -> None:
        with self.lock, self.log.open("a") as lines:
            lines.write(json.dumps(facts) + "\n")


def _give_up(_code: int, why: str) -> NoReturn:
    raise ConnectionError(why)


class Stub:
    """One SuperNode."""

    def __init__(self, crew: Crew, name: str, key: ec.EllipticCurvePrivateKey) -> None:
        self.crew = crew
        self.name = name
        self.keys = (key, key.public_key())
        self.run_configs: dict[int, dict[str, Any]] = {}

    def run(self) -> None:
        """Connect, and answer one message after another; after an error connect again."""
        executor: Any = SimpleNamespace(poll=lambda: None)  # a process that never ends
        certificates = self.crew.certificates.read_bytes()
        connect = partial(fleet_http_connection.http_request_response, self.crew.address, False)
        while True:
            with (
                suppress(ConnectionError),
                connect(certificates, authentication_keys=self.keys) as fleet,
            ):  # an error is printed, and ends the block
                waits = Waits(executor)
                while True:
                    if self._answer_next(*fleet):
                        waits = Waits(executor)
                    else:
                        waits.sleep(IDLE_SECONDS)
            time.sleep(RESTART_SECONDS)

    def _answer_next(
        self,
        _node_id: int,
        receive: Any,
        send: Any,
        get_run: Any,
        get_fab: Any,
        pull_object: Any,
        push_object: Any,
        confirm: Any,
    ) -> bool:
        """Fetch and answer a message as a SuperNode does; return whether there was one.

        The arguments are what Flower's connection to the SuperLink consists of, in its order.
        """
        received = receive()
        if received is None:
            return False
        about, tree = received
        run_id = about.metadata.run_id
        if run_id not in self.run_configs:
            run = get_run(run_id)
            get_fab(run.fab_hash, run_id)  # unused here, but a SuperNode downloads the app
            self.run_configs[run_id] = default_run_config() | run.override_config
        message = pull_and_inflate_object_from_tree(
            tree, partial(pull_object, run_id), partial(confirm, run_id), return_type=Message
        )
        set_message_id(message, tree.object_id)

        began = time.time()
        kind = message.metadata.message_type
        if kind == "train":
            time.sleep(self.crew.seconds)
        reply = self.crew.reply(self.name, message, self.run_configs[run_id])
        replied = time.time()
        set_message_id(reply, reply.object_id)
        objects = get_all_nested_objects(reply)
        missing, session = send(reply, get_object_tree(reply), replied - began)
        push_objects(objects, partial(push_object, run_id, session), object_ids_to_push=missing)
        self.crew.note(
            site=self.name,
            kind=kind,
            round=message.metadata.group_id,
            asked=began,
            replied=replied,
            sent=time.time(),
            error=reply.error.reason if reply.has_error() else "",
        )
        return True

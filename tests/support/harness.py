"""A federation in one process: the real ServerApp and ClientApp, without Ray and SuperLink."""

import json
import tempfile
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict

from client_app.site.client import open_client
from client_app.site.workshop import Workshop, open_workshop
from protofl_common.config.options import SettingsError
from protofl_common.experiment.node import is_site
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.flower import ErrorCode, set_message_id, set_sender
from protofl_common.simulation.grid import LocalGrid as ProductGrid
from protofl_common.simulation.grid import answer
from protofl_common.wire.refusal import refusal_in
from server_app.app import main as server_main
from server_app.network.membership import FederationError
from tests.support import ROOT

RUN_ID = 4711
_CACHE = tempfile.TemporaryDirectory()  # of decoded data, for all tests of a process
CACHE = {"cache-dir": _CACHE.name}
"""For node configs of sites, which do not take the run's."""
SHORT = {
    "fedtgp.server-epochs": 10,
    "fedgh.server-epochs": 10,
    "fedorgp.server-epochs": 10,
    "mpft.server-epochs": 10,
    "fedgen.server-steps": 10,
}
"""A server that trains takes this many steps or epochs, not one or two hundred as with `LONG`."""
LONG = {key: value for key, value in default_run_config().items() if key in SHORT}
Nodes = dict[int, dict[str, Any]]
"""Node -> its node config."""
Tamper = Callable[[Message, Message], Message | None]
"""(message, honest reply) -> the reply that arrives, or None for no reply."""


class LocalGrid(ProductGrid):
    """The product's grid of one process, which logs messages.

    On request it tampers with replies, and loses nodes.
    """

    def __init__(
        self,
        run_config: dict[str, Any],
        nodes: Nodes,
        tamper: Tamper | None = None,
        run_id: int = RUN_ID,
    ) -> None:
        super().__init__(run_config, nodes, run_id)
        self.run_config = run_config
        self.nodes = nodes
        self.tamper = tamper
        self.of_sites: dict[str, Any] = {**CACHE, "approve": False}  # defaults of node configs
        if Path.cwd() == ROOT:  # whose folder runs/ would be that of all sites, of all tests
            self.of_sites["state-dir"] = tempfile.mkdtemp(dir=_CACHE.name)
        self.log: list[tuple[Message, Message]] = []  # each message, and the honest reply to it
        self._sent: dict[str, Message] = {}  # by the message's id
        self._ready: dict[str, Message] = {}  # replies, by the id of the message they answer

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Answer messages at once, tamper with the replies, and keep them until they are pulled.

        A message to a node that is gone gets no reply.
        """
        ids = []
        for message in messages:
            message_id = str(uuid.uuid4())
            set_message_id(message, message_id)
            ids.append(message_id)
            self._sent[message_id] = message
            if message.metadata.dst_node_id not in self.nodes:
                continue

            node_config = self.nodes[message.metadata.dst_node_id]
            if is_site(node_config):
                node_config = self.of_sites | node_config
            reply: Message | None
            reply = answer(message, self.run_id, node_config, self.run_config)
            self.log.append((message, reply))
            if self.tamper is not None:
                reply = self.tamper(message, reply)
            if reply is not None:
                self._ready[message_id] = reply
        return ids

    def ask(self, message: Message) -> Message:
        """Send one message, and return the honest reply to it."""
        self.push_messages([message])
        return self.log[-1][1]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return replies that are ready, each once; for lost ones there is none.

        For a node that is gone it is the error that Flower's SuperLink makes.
        """
        replies = []
        for message_id in message_ids:
            if message_id in self._ready:
                replies.append(self._ready.pop(message_id))
                continue
            message = self._sent[message_id]
            if message.metadata.dst_node_id not in self.nodes:
                gone = Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable")
                reply = Message(gone, reply_to=message)
                set_sender(reply, 1)  # the SuperLink's own number
                replies.append(reply)
        return replies


class Outcome:
    """What a run left behind, and what crossed the wire."""

    def __init__(self, folder: Path, grid: LocalGrid) -> None:
        self.folder = folder
        self.grid = grid
        self.summary = json.loads((folder / "summary.json").read_text())
        self.rows = _rows(folder / "metrics.jsonl")

    @property
    def trouble(self) -> int:
        """Return how many replies failed, were refused or missing, or came late."""
        return sum(self.summary["trouble"].values())

    def per_row(self, fact: str) -> list[Any]:
        """Return what every row says of this fact."""
        return [row[fact] for row in self.rows]

    def exchanged(
        self, kind: str = MessageType.TRAIN, number: int | None = None
    ) -> list[tuple[Message, Message]]:
        """Return the messages of a kind, each with its honest reply.

        With ``number``, only those of that round.
        """
        pairs = []
        for message, reply in self.grid.log:
            if message.metadata.message_type != kind:
                continue
            if number in (None, int(message.metadata.group_id)):
                pairs.append((message, reply))
        return pairs


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """Return the settings of a small run: two rounds, and 30 training and 30 test samples a client.

    Each client has samples of one domain. ``overrides`` are settings: ``batch_size=4`` is
    ``batch-size``, and ``fedproto__lambda`` is ``fedproto.lambda``.
    """
    config = default_run_config() | {
        "rounds": 2,
        "local-epochs": 1,
        "out-dir": str(tmp_path / "runs"),
        **CACHE,
        **SHORT,
        "partition": "feature-shift",
        "train-samples": 30,
        "test-samples": 30,
        "join-timeout": 20.0,
        "report": False,
    }
    if "dataset" not in overrides:  # the default data set's images are larger
        config["image-size"] = 16
    for key, value in overrides.items():
        config[key.replace("__", ".").replace("_", "-")] = value
    return config


def settings_of(config: dict[str, Any], node: dict[str, Any] | None = None) -> Settings:
    """Return the settings of a run at a node; what ``config`` leaves out has its default."""
    return Settings.from_run_config(default_run_config() | config, node)


def refusal(config: dict[str, Any], node: dict[str, Any] | None = None) -> str:
    """Return the error of settings that are refused."""
    with pytest.raises(SettingsError) as caught:
        settings_of(config, node)
    return str(caught.value)


def instructions(number: int = 1, run_id: int = RUN_ID, **entries: Any) -> RecordDict:
    """Return what a server tells a site about a round; ``entries`` forge some of it.

    By default the run has not been resumed: its history is itself alone.
    """
    honest = {"run_name": "mine", "run_history": str(run_id), "counted": 0, "part": 1.0}
    return RecordDict({"round": ConfigRecord({"round": number, **honest, **entries})})


def reason_in(reply: Message) -> str:
    """Return why a client has refused, as the server reads it, or "" if it has not."""
    return refusal_in(reply).text if reply.has_error() else ""


def rows_without_a_reply(
    config: dict[str, Any], clients: int = 4, **options: Any
) -> list[dict[str, Any]]:
    """Make a run that fails because no client sends a valid reply; return the rows of its rounds.

    ``options`` are those of `run_federation`.
    """
    for_several = r"no client has sent one valid reply: .*; the first reason"
    for_one = r"all clients failed in round 1, for one reason"
    error = rf"({for_several}|{for_one}): (?!none)"  # the reason is there, and is not None
    with pytest.raises(FederationError, match=error):
        run_federation(config, clients, **options)
    (file,) = Path(config["out-dir"]).glob("*/metrics.jsonl")
    return _rows(file)


def failures_in(rows: list[dict[str, Any]]) -> list[str]:
    """Return why clients have failed, in all rounds; there must be some."""
    failures = [reason for row in rows for reason in row["failed"].values()]
    assert failures
    return failures


def run_federation(
    config: dict[str, Any],
    clients: int = 4,
    tamper: Tamper | None = None,
    nodes: Nodes | None = None,
    run_id: int = RUN_ID,
    on_grid: Callable[[LocalGrid], None] | None = None,
) -> Outcome:
    """Run the ServerApp in this process, on so many simulated ``clients`` or on ``nodes``.

    ``on_grid`` is called with the grid before the run. The folder of results must hold no other
    run but baselines.
    """
    if not nodes:
        nodes = {1000 + i: {"partition-id": i, "num-partitions": clients} for i in range(clients)}
    grid = LocalGrid(config, nodes, tamper, run_id)
    if on_grid is not None:
        on_grid(grid)
    server_main(grid, Context(run_id, 0, {}, RecordDict(), config))

    summaries = sorted(Path(config["out-dir"]).expanduser().glob("*/summary.json"))
    if config["baselines"]:
        summaries = summaries[:1]  # a baseline's folder begins with the run's name
    (summary,) = summaries
    return Outcome(summary.parent, grid)


def federate(
    folder: Path,
    clients: int = 4,
    tamper: Tamper | None = None,
    nodes: Nodes | None = None,
    run_id: int = RUN_ID,
    on_grid: Callable[[LocalGrid], None] | None = None,
    **settings: Any,
) -> Outcome:
    """Make a small run in a folder, with these settings: see `run_config` and `run_federation`."""
    return run_federation(run_config(folder, **settings), clients, tamper, nodes, run_id, on_grid)


def client_of(
    config: dict[str, Any], partition: int = 0, clients: int = 3, **node: Any
) -> Workshop:
    """Return a client of a run with its data and model.

    It is simulated, with this ``partition`` of the data, unless ``node`` gives a node config.
    """
    facts = node or {"partition-id": partition, "num-partitions": clients}
    return open_workshop(open_client(Context(RUN_ID, 7, facts, RecordDict(), config)))

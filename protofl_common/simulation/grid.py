"""A federation in this process: the apps that Flower starts, without SuperLink.

Each client computes with as many threads as it gets processors, as in Flower's simulation, and each
message is handled as there: all figures are the same to the last bit. Errors of one's own code keep
their traceback, and ``breakpoint()`` works where one process does all.
"""

import gc
import secrets
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from protofl_common.config.options import SettingsError, Values
from protofl_common.experiment.settings import digest_of, with_halves
from protofl_common.flower import be_server_of, set_message_id, set_sender
from protofl_common.runs.events import Failed, OnEvent
from protofl_common.simulation.machine import CPUS, engine_for
from protofl_common.simulation.pool import pool
from protofl_common.wire.records import SiteCard, pack_settings, unpack_site_card
from protofl_common.wire.refusal import refusal_in

if TYPE_CHECKING:
    from protofl_common.simulation.ray import Cluster  # Ray, a second


class Executor(Protocol):
    """Other processes, which call `answer`: the pool on this machine, or a cluster."""

    def submit(self, function: Any, /, *arguments: Any) -> Future[Message]: ...


class LocalGrid(Grid):
    """Flower's grid of messages, for clients that all are simulated.

    They are handled in this process, or by those of an ``executor``.
    """

    def __init__(
        self,
        run_config: Values,
        nodes: Mapping[int, Values],
        run_id: int,
        executor: Executor | None = None,
        threads: int = 1,
    ) -> None:
        """Become the server of a run of these ``nodes``: node id -> its node config.

        Without an ``executor`` this process answers for the clients. ``threads`` is the number of
        threads with which each client computes.
        """
        be_server_of(run_id)  # Flower takes a message's run from the process
        self.run_id = run_id
        self.run_config = dict(run_config)
        self.nodes = dict(nodes)
        self.threads = threads
        self._executor = executor
        self._replies: dict[str, Future[Message]] = {}

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run only."""

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Let clients answer, and return the messages' ids.

        Without an executor all answers are there when this call returns.
        """
        keys = []
        for message in list(messages):
            key = str(uuid.uuid4())
            set_message_id(message, key)
            node = self.nodes[message.metadata.dst_node_id]
            task = (message, self.run_id, node, self.run_config, self.threads)
            if self._executor:
                self._replies[key] = self._executor.submit(answer, *task)
            else:
                self._replies[key] = Future[Message]()
                self._replies[key].set_result(answer(*task))
            keys.append(key)
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return those replies to these messages that are there, and forget them."""
        ready = []
        for key in message_ids:
            if key in self._replies and self._replies[key].done():
                ready.append(key)
        return [_reply(self._replies.pop(key)) for key in ready]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return [_reply(self._replies.pop(key)) for key in self.push_messages(messages)]


def _reply(reply: Future[Message]) -> Message:
    """Wait for a reply, and return it.

    If a process of the pool has died, raise OSError, and forget the pool: a later run gets a new
    one.
    """
    try:
        return reply.result()
    except BrokenProcessPool as error:
        pool.cache_clear()
        raise OSError(
            "a process that simulates clients has died; most often memory has run out: let fewer "
            "clients work at once (--cpus). This round does not count; resume.toml in the run's "
            "folder lets it go on"
        ) from error


def answer(
    message: Message, run_id: int, node: Values, run_config: Values, threads: int = 1
) -> Message:
    """Let the client with the node config ``node`` answer a message in this process.

    Return its reply. It computes with so many ``threads``. Of several GPUs each process of the pool
    uses one.
    """
    from client_app.app import app

    identity = current_process()._identity  # (number,) in a process of the pool, else ()
    if identity and run_config["device"] != "cpu" and torch.cuda.device_count() > 1:
        torch.cuda.set_device(identity[0] % torch.cuda.device_count())
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        node_id = message.metadata.dst_node_id
        context = Context(run_id, node_id, dict(node), RecordDict(), dict(run_config))
        reply: Message = app(message, context)
    finally:
        torch.set_num_threads(threads_before)
    set_sender(reply, node_id)
    return reply


def introduced(run_config: Values, node: Values) -> SiteCard:
    """Let the client of a ``node`` introduce itself, as before the first round; return its card.

    It reads its data, and tries its model. SettingsError if it cannot take part.
    """
    with_halves()
    # before a message is made, which asks Flower for the run of this server; 1 is the node's id
    grid = LocalGrid(run_config, {1: node}, run_id=1)
    content = RecordDict({**pack_settings(digest_of(run_config))})
    (reply,) = grid.send_and_receive([Message(content, 1, MessageType.QUERY)])
    if reply.has_error():
        raise SettingsError(refusal_in(reply).text)
    return unpack_site_card(reply.content)


def simulate(
    run_config: Values,
    clients: int,
    on_event: OnEvent,
    workers: int = 1,
    threads: int = 1,
    cluster: "Cluster | None" = None,
) -> Path:
    """Run a federation of ``clients`` clients; return the folder of its results.

    ``run_config`` has every key of a run's settings; ``on_event`` is called with each event of the
    run. The clients are divided among the processes of a ``cluster``, else among ``workers``
    processes; 1: all are handled in this one. Each computes with so many ``threads``, on which sums
    of floats depend.
    """
    asked = run_config["num-clients"]
    if int(asked) > clients:
        raise SettingsError(f"num-clients = {asked}: this simulation has {clients} (--clients)")
    with_halves()
    from server_app.app import federate

    nodes: dict[int, Values] = {}
    for partition in range(clients):
        nodes[partition + 1] = {"partition-id": partition, "num-partitions": clients}
    run_id = secrets.randbits(63)  # clients' states name the run by it: no two have the same
    executor: Executor | None = cluster
    if workers > 1 and not cluster:
        executor = pool(workers)
    grid = LocalGrid(run_config, nodes, run_id, executor, threads)
    # frozen objects, here all of PyTorch's, are not searched for garbage, which would take a tenth
    # of a client's time beside training; garbage itself must go before, or it would stay
    gc.collect()
    gc.freeze()
    try:
        if cluster:
            cluster.begin(run_config, on_event)
        return federate(grid, run_config, run_id, on_event)
    except KeyboardInterrupt:  # the clients' processes ignore it, and would go on with their work
        if cluster:
            cluster.stop()
        for process in active_children():
            process.kill()
        pool.cache_clear()
        raise
    finally:
        gc.unfreeze()
        if cluster:
            cluster.end()


def attempt(run_config: Values, federation: Values, on_event: OnEvent) -> Path | Failed:
    """Run a federation, and return the folder of its results, or the event of its failure.

    ``federation`` has Flower's options, such as ``num-supernodes``. No error is raised: each is
    given to ``on_event`` as a `Failed`.
    """
    from server_app.app import EXPECTED

    clients = int(federation["num-supernodes"])
    threads = int(federation.get(CPUS, 1))
    try:
        workers, cluster = engine_for(federation, str(run_config["device"]))
        return simulate(run_config, clients, on_event, workers, threads, cluster)
    except Exception as error:
        failure = Failed.of(error, is_expected=isinstance(error, EXPECTED))
    on_event(failure)
    return failure

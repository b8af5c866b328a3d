"""Clients that are simulated on a Ray cluster: many machines, which need not share a disk.

The folder of the run is on this machine alone. A message takes its client's folder along, and the
reply brings back what has changed in there. So any node may answer for any client with the same
bits, and a node that is lost takes nothing with it: what it had not answered is asked elsewhere.
A node keeps a copy of the folders of its clients, and gets those again before others do.
"""

import copy
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from tempfile import gettempdir
from typing import Any

import numpy as np
import ray
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from protofl_common.basics.code_version import code_version
from protofl_common.basics.files import digest, make_private
from protofl_common.config.options import Config, SettingsError, Values
from protofl_common.data.store import open_data
from protofl_common.experiment.node import allow_named, own_code, site_name
from protofl_common.experiment.settings import Settings, with_halves
from protofl_common.runs.events import OnEvent, Said, Warned
from protofl_common.simulation.client_files import (
    IN_USE,
    ClientFiles,
    Listing,
    listed,
    remove_abandoned,
)
from protofl_common.simulation.pool import clients_on

PACKAGES = ("torch", "numpy", "flwr", "scikit-learn")
"""On whose versions figures may depend."""
START_SECONDS = 300
"""How long the first process of a node may take until it answers; it imports PyTorch."""
WAIT_SECONDS = 10
"""How long the end of a run waits for nodes to remove their copies."""
TRIES = 3
"""Processes that may die over one message before the run ends: it may be too large for each."""

Answer = Callable[[Message, int, Values, Values, int], Message]


# -- on a node
def node_facts(run_config: Values) -> dict[str, str]:
    """Return what must be the same on all nodes, lest their figures differ: facts of this machine.

    Its data are read for them. SettingsError or DataError if the settings or the data cannot be
    read. The code of callbacks is left out: they act at the server alone.
    """
    allow_named(run_config)
    settings = Settings.from_run_config(run_config)
    data = open_data(settings.data)
    content = hashlib.sha256()
    for array in (data.labels, data.domains, data.official):
        content.update(np.ascontiguousarray(array).data)
    # of the inputs, which may be large, their shape, type and statistics
    inputs = (data.inputs.shape, str(data.inputs.dtype), data.mean, data.std)
    versions = own_code(run_config, without=("callback",))
    return {
        "code": code_version(),
        "python": platform.python_version(),
        "packages": ", ".join(f"{package} {version(package)}" for package in PACKAGES),
        "modules": ", ".join(f"{name} {code}" for name, code in versions.items()) or "none",
        "data": digest(content.hexdigest(), inputs, data.classes, data.domain_names),
        "processor": _processor(settings.machine.device),
    }


class Worker:
    """A process on a node, which answers for one client at a time."""

    def __init__(self, folder: str, copies: str) -> None:
        """Prepare the process: import path, working folder, and a place for clients' folders.

        ``folder`` is where the command runs; the process works in it if this machine has it, as
        paths of settings may be relative. ``copies`` names the temporary folder for this node's
        copies of the clients' folders. A lock says that it is in use, lest another process remove
        it as abandoned.
        """
        with_halves()  # makes client_app importable
        if os.path.isdir(folder):
            os.chdir(folder)
        remove_abandoned(Path(gettempdir()))
        self.copies = Path(gettempdir(), copies)
        make_private(self.copies)
        self.in_use = (self.copies / IN_USE).open("w")
        fcntl.flock(self.in_use, fcntl.LOCK_SH)  # shared by all processes of this node

    def facts(self, run_config: Values) -> dict[str, str]:
        return node_facts(run_config)

    def answer(self, question: "_Question", *records: Any) -> tuple[Message, ClientFiles]:
        """Return a client's reply, and those of its files that the answer has changed.

        First the copy of the client's folder here is made the same as the folder on the machine of
        the command. ``records`` are the content of the message; Ray has brought their arrays.
        """
        message = question.message
        message.content = RecordDict(dict(zip(question.names, records, strict=True)))
        out_dir = self.copies / digest(question.run_config["out-dir"])
        run_config = {**question.run_config, "out-dir": str(out_dir)}
        arguments = (message, question.run_id, question.node, run_config, question.threads)
        if question.place is None:  # an introduction names no run, and so no folder of one
            return question.answer(*arguments), ClientFiles()

        folder = out_dir / question.place
        question.files.put_into(folder)
        before = listed(folder)
        reply = question.answer(*arguments)
        return reply, ClientFiles.since(folder, before)

    def forget(self) -> None:
        """Remove the copies of all clients' folders on this node."""
        for out_dir in self.copies.iterdir():
            if out_dir.is_dir():
                shutil.rmtree(out_dir)


def _processor(device: str) -> str:
    """Return the name of what clients compute on, on which the last digits of figures depend."""
    if device.startswith(("auto", "cuda")) and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"


# -- on the machine of the command
@dataclass
class _Question:
    """A message to a client, and what its answer needs beside its arrays."""

    answer: Answer
    message: Message
    names: list[str]  # of the message's records
    run_id: int
    node: Values
    run_config: Values
    threads: int
    place: Path | None  # of the client's folder below out-dir; None in an introduction
    files: ClientFiles = field(default_factory=ClientFiles)


@dataclass(eq=False)
class _Task:
    """A question that is not answered yet."""

    question: _Question
    records: list[Any]  # of the message: what several have alike is a reference, put once
    folder: Path | None  # of the client, in the folder of its run
    reply: Future[Message] = field(default_factory=Future)
    died_on: list["_Node"] = field(default_factory=list)  # of processes that died over it


@dataclass(eq=False)
class _Node:
    id: str
    name: str
    workers: dict[int, Any] = field(default_factory=dict)
    idle: int = 0  # how many of the workers wait for a task

    @property
    def first_worker(self) -> Any:
        return next(iter(self.workers.values()))


class Cluster:
    """A Ray cluster as an executor: `submit` gives a client's message to one of its processes.

    Each process is a Ray actor, and has a thread here that hands it one task after another. It gets
    ``cpus`` processors and the share ``gpus`` of a GPU; None: a whole one, on nodes that have any.
    """

    def __init__(self, address: str, cpus: int, gpus: float | None) -> None:
        """Connect with the cluster; SettingsError if that fails. `begin` starts processes."""
        _connect(address)
        self.address = address
        self.cpus = cpus
        self.gpus = gpus
        self._secret = token_hex(8)  # nobody on a node can have made its folder before
        self.nodes: dict[str, _Node] = {}
        self._tasks: list[_Task] = []
        self._changed = threading.Condition()
        # folder of a client -> the node that has a copy of it, and what is in the copy
        self._copy_of_folder: dict[Path, tuple[_Node, Listing]] = {}
        # id of arrays in this round's messages -> the arrays, and Ray's reference to them
        self._references: dict[int, tuple[ArrayRecord, Any]] = {}
        self._round = ""  # as Flower's messages name it

    # -- before a run, and after it
    def begin(self, run_config: Values, on_event: OnEvent) -> None:
        """Start processes on the nodes that have none yet, and compare all nodes with this machine.

        SettingsError with a line for each node that has other code, packages or data.
        """
        if run_config["state-dir"]:
            raise SettingsError(
                f"state-dir = {run_config['state-dir']!r}: with --cluster the state of clients is "
                "in out-dir, on this machine; leave it out"
            )
        self._start_workers()
        if not self.nodes:
            raise SettingsError(
                f"--cluster {self.address}: no node has the CPUs (--cpus {self.cpus}) and the "
                "share of a GPU (--gpus) that a client shall get; `ray status` says what nodes have"
            )
        workers = sum(len(node.workers) for node in self.nodes.values())
        on_event(Said(f"nodes: {len(self.nodes)} · clients at a time: {workers}"))
        here = node_facts(run_config)
        problems = []
        for node, facts in self._facts_of_nodes(run_config).items():
            if isinstance(facts, str):  # why there are none
                problems.append(f"node {node.name}: {facts}")
                continue
            for fact, mine in here.items():
                there = facts[fact]
                text = f"node {node.name}: {fact} is {there}, and {mine} on this machine"
                if there != mine and fact == "processor":
                    on_event(Warned(f"{text}: figures may differ in their last digits"))
                elif there != mine:
                    problems.append(text)
        if problems:
            lines = "\n".join(problems)
            raise SettingsError(f"--cluster {self.address}: all nodes must be alike\n{lines}")

    def end(self) -> None:
        """Remove the copies of clients' folders from all nodes.

        A node that does not do so within `WAIT_SECONDS` is not waited for. It removes them later,
        or the next process that begins there does (`remove_abandoned`).
        """
        with self._changed:
            self._copy_of_folder.clear()
            self._references.clear()
            nodes = list(self.nodes.values())
        removals = [node.first_worker.forget.remote() for node in nodes]
        if removals:
            ray.wait(removals, num_returns=len(removals), timeout=WAIT_SECONDS)

    def stop(self) -> None:
        """End all processes at once, whatever they do, and leave the cluster.

        `cluster_at` then connects anew.
        """
        with self._changed:
            nodes = list(self.nodes.values())
            self.nodes = {}  # by this the threads of the processes see that it is over (`_next`)
            self._changed.notify_all()
        for node in nodes:
            for worker in node.workers.values():
                ray.kill(worker)
        ray.shutdown()
        _clusters.clear()

    def _start_workers(self) -> None:
        """Start as many processes on each node as it has room for, less those that it has already.

        Each gets a thread of this process, which hands it tasks. A node may have joined, or lost
        processes, since the last run.
        """
        on_cluster = ray.remote(Worker)
        for facts in ray.nodes():  # type: ignore[no-untyped-call]
            if not facts["Alive"]:
                continue
            clients, gpus = self._room_on(facts["Resources"])
            new = _Node(facts["NodeID"], facts["NodeName"])
            node = self.nodes.get(new.id, new)
            for index in range(clients):
                if index in node.workers:
                    continue
                actor = on_cluster.options(
                    num_cpus=self.cpus,
                    num_gpus=gpus,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                )
                folder_for_copies = f"protofl-{self._secret}-{node.id}"
                node.workers[index] = actor.remote(os.getcwd(), folder_for_copies)
                self.nodes[node.id] = node  # a node without a process is not known
                threading.Thread(target=self._work, args=(node, index), daemon=True).start()

    def _room_on(self, resources: Config) -> tuple[int, float]:
        """Return how many clients a node has room for, and which share of a GPU each gets.

        By default that is one GPU, if the node has any.
        """
        gpus_there = float(resources.get("GPU", 0))
        share = min(1.0, gpus_there) if self.gpus is None else self.gpus
        clients = int(float(resources.get("CPU", 0)) / self.cpus)
        if share:
            clients = min(clients, clients_on(gpus_there, share))
        return clients, share

    def _facts_of_nodes(self, run_config: Values) -> dict[_Node, dict[str, str] | str]:
        """Return the facts of each node, or a text that says why it does not answer."""
        asked = {}
        for node in list(self.nodes.values()):
            asked[node.first_worker.facts.remote(dict(run_config))] = node
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=START_SECONDS)
        results: dict[_Node, dict[str, str] | str] = {}
        for reference, node in asked.items():
            if reference not in answered:
                likely_cause = "other work may have its CPUs (`ray status`)"
                results[node] = f"no answer within {START_SECONDS} s; {likely_cause}"
                continue
            try:
                results[node] = ray.get(reference)
            except RayTaskError as error:  # `facts` has raised the cause
                results[node] = str(error.cause)
            except RayError as error:
                results[node] = f"its process has died: {' '.join(str(error).split())}"
        return results

    # -- messages
    def submit(
        self,
        answer: Answer,
        message: Message,
        run_id: int,
        node: Values,
        run_config: Values,
        threads: int,
    ) -> Future[Message]:
        """Let a node ``answer`` a client's message.

        Once the reply is there, the client's folder on this machine is as the answer has left it.
        """
        place = _place_of(message, node)
        folder = None
        if place is not None:
            folder = Path(str(run_config["out-dir"])).expanduser() / place
        without_content = copy.copy(message)  # Ray brings the content by itself
        without_content.content = RecordDict()
        names = list(message.content)
        question = _Question(
            answer, without_content, names, run_id, node, run_config, threads, place
        )
        with self._changed:
            if message.metadata.group_id != self._round:  # tasks have references of their own
                self._round = message.metadata.group_id
                self._references.clear()
            records = [self._put(record) for record in message.content.values()]
            task = _Task(question, records, folder)
            self._tasks.append(task)
            self._changed.notify_all()
        return task.reply

    def _put(self, record: Any) -> Any:
        """Return Ray's reference to a record of arrays, and any other record as it is.

        Several messages may have the same record, as all clients get the global model: Ray then
        brings it to each node once.
        """
        if not isinstance(record, ArrayRecord):
            return record
        if id(record) not in self._references:
            self._references[id(record)] = (record, ray.put(record))
        return self._references[id(record)][1]

    def _work(self, node: _Node, index: int) -> None:
        """Hand one task after another to a process, until it dies or is ended."""
        worker = node.workers[index]
        while True:
            task = self._next(node)
            if task is None:
                return
            try:
                reply = self._answered(task, node, worker)
            except RayActorError as error:
                self._lose(node, index, task, error)
                return
            except RayTaskError as error:
                error.cause.__cause__ = error  # Ray's, whose text has the traceback on the node
                task.reply.set_exception(error.cause)
            except Exception as error:
                task.reply.set_exception(error)
            else:
                task.reply.set_result(reply)

    def _answered(self, task: _Task, node: _Node, worker: Any) -> Message:
        """Let a process answer a task; send it the client's files, and store those it changes."""
        question = task.question
        known: Listing = {}  # files that the node has as they are here
        if task.folder is not None:
            with self._changed:
                # taken out: a copy that the process is changing is no copy until it has answered
                home, in_copy = self._copy_of_folder.pop(task.folder, (None, {}))
            if home is node:
                known = in_copy
            question.files = ClientFiles.since(task.folder, known)
        asked = worker.answer.remote(question, *task.records)
        reply: Message
        files: ClientFiles
        reply, files = ray.get(asked)
        if task.folder is not None:
            files.put_into(task.folder)
            with self._changed:
                self._copy_of_folder[task.folder] = (node, listed(task.folder))
        return reply

    def _next(self, node: _Node) -> _Task | None:
        """Wait for a task that a process of this node may take; None once the cluster is stopped.

        Tasks of clients whose folders the node has copies of come first. A task whose client's
        folder another node has is taken only while all processes of that node are at work.
        """
        with self._changed:
            node.idle += 1  # until the process has a task
            try:
                while self.nodes.get(node.id) is node:
                    task = self._best_task(node)
                    if task:
                        self._tasks.remove(task)
                        return task
                    self._changed.wait()
                return None
            finally:
                node.idle -= 1
                self._changed.notify_all()  # if it was the last idle one, others may take more

    def _best_task(self, node: _Node) -> _Task | None:
        """Return the task that a process of this node shall take; None where it shall wait.

        A task of a client whose folder has a copy on this node comes first. Else it is the oldest
        task of a client whose folder has no copy, or one on a node that is busy.
        """
        oldest_of_others = None
        for task in self._tasks:
            untried = [each for each in self.nodes.values() if each not in task.died_on]
            if node in task.died_on and untried:  # the whole node may be lost: others try first
                continue
            home = self._home_of(task)
            if home is node:
                return task
            home_takes_it = home is not None and home.idle
            if oldest_of_others is None and not home_takes_it:
                oldest_of_others = task
        return oldest_of_others

    def _home_of(self, task: _Task) -> _Node | None:
        """Return the node that has a copy of the folder of the task's client, if any has."""
        if task.folder is None or task.folder not in self._copy_of_folder:
            return None
        home, _ = self._copy_of_folder[task.folder]
        return home

    def _lose(self, node: _Node, index: int, task: _Task, error: RayActorError) -> None:
        """Give up a process that has died, or whose node is lost, and give its task to others.

        A task fails once `TRIES` processes have died over it; all fail if no process is left. A
        task that fails ends with an OSError, which whoever waits for its reply gets.
        """
        failed: list[_Task] = []
        with self._changed:
            was_stopped = self.nodes.get(node.id) is not node  # `stop` kills processes on purpose
            if was_stopped:
                return
            worker = node.workers.pop(index)
            if not node.workers:
                del self.nodes[node.id]
            task.died_on.append(node)
            self._tasks.insert(0, task)  # the next process shall take it before all others
            if not self.nodes:
                failed = self._tasks
                self._tasks = []
            elif len(task.died_on) == TRIES:
                self._tasks.remove(task)
                failed = [task]
            self._changed.notify_all()
            left = [f"{len(each.workers)} on {each.name}" for each in self.nodes.values()]
        ray.kill(worker)  # it may live, out of reach, and would go on with the task
        emit = import_module("server_app.run.log").emit  # the run's log and its ``on_event``
        died = f"node {node.name}: a process that simulates clients has died"
        cause = "the node is lost, or its memory has run out"
        text = (
            f"{died} ({type(error).__name__}: {cause}); processes left: {', '.join(left) or 'none'}"
        )
        emit(Warned(text))
        for each in failed:
            each.reply.set_exception(
                OSError(
                    f"{text}. Let fewer clients work at once (--cpus) where memory was short. This "
                    "round does not count; resume.toml in the run's folder lets it go on, on any "
                    "nodes or on this machine alone"
                )
            )


_clusters: dict[tuple[str, int, float | None], Cluster] = {}
"""The cluster that this process uses, by the arguments of `cluster_at`: one at most."""


def cluster_at(address: str, cpus: int, gpus: float | None) -> Cluster:
    """Return the cluster of Ray's head at ``address``; SettingsError if it cannot be reached.

    Each client gets ``cpus`` processors and the share ``gpus`` of a GPU; None: it is not set. The
    first call with these arguments connects, later ones return the same cluster. A process uses one
    at a time: a cluster that was asked for with other arguments is stopped.
    """
    asked = (address, cpus, gpus)
    if asked not in _clusters:
        for other in list(_clusters.values()):
            other.stop()  # this empties _clusters
        _clusters[asked] = Cluster(*asked)
    return _clusters[asked]


def _connect(address: str) -> None:
    """Make this process a driver of the Ray cluster; SettingsError if that fails."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address, logging_level=logging.WARNING, ignore_reinit_error=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise SettingsError(
            f"--cluster {address}: {error}; this machine must be one of its nodes, with the same "
            "Python and Ray"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own in the place


def _place_of(message: Message, node: Values) -> Path | None:
    """Return the path of a client's folder below ``out-dir``; None if the message names no run."""
    about = message.content.config_records.get("round")
    if about is None:
        return None
    return Path(str(about["run_name"]), "clients", site_name(node))

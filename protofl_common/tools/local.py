"""A federation in this process: the same ServerApp and ClientApp as Flower starts, without a SuperLink and without Ray.

Each client computes with as many threads as it gets processors, as in Flower's simulation, and each message is handled
as there: all figures are the same to the last bit. Clients share the GPUs of this machine, as many as fit. Errors of
one's own code keep their traceback, and ``breakpoint()`` works where one process does all.
"""

import ctypes
import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from functools import cache
from inspect import getattr_static
from io import TextIOBase
from multiprocessing import active_children, current_process, get_context
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from protofl_common.config.options import SettingsError, Values
from protofl_common.experiment.settings import with_halves

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent has died
CPUS, GPUS = "client-resources-num-cpus", "client-resources-num-gpus"  # Flower's names
MEGABYTES = 3000  # of a GPU's free memory for each client: 500 of CUDA, and a ResNet on small images
RELOADED: set[str] = set()  # modules that were reloaded after workers had begun: those of later runs import them anew
AT_MOST = 8  # clients at a time on one GPU: it has enough to do then


class LocalGrid(Grid):
    """Flower's grid of messages where every client is handled on this machine: here, or by ``workers`` processes."""

    def __init__(
        self, run_config: Values, nodes: Mapping[int, Values], run_id: int, workers: int = 1, threads: int = 1
    ) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, 1
        self.run_id, self.run_config, self.nodes, self.threads = run_id, dict(run_config), dict(nodes), threads
        self._pool = pool(workers) if workers > 1 else None
        imports = {name: getattr_static(module, "__spec__", None) for name, module in list(sys.modules.items())}
        forked = vars(self._pool).setdefault("imports", imports) if self._pool else imports  # their modules
        if old := [name for name in imports if forked.setdefault(name, imports[name]) is not imports[name]]:
            RELOADED.update(old)
            pool.cache_clear()
            self._pool = pool(workers)
            vars(self._pool)["imports"] = imports
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
        messages = list(messages)
        for message in messages:
            message.metadata.__dict__["_message_id"] = key = str(uuid.uuid4())
            task = message, self.run_id, self.nodes[message.metadata.dst_node_id], self.run_config, self.threads
            self._replies[key] = reply = self._pool.submit(answer, *task) if self._pool else Future[Message]()
            if not self._pool:
                reply.set_result(answer(*task))
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ready = [key for key in message_ids if key in self._replies and self._replies[key].done()]
        return [_reply(self._replies.pop(key)) for key in ready]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [_reply(self._replies.pop(key)) for key in self.push_messages(messages)]


def _reply(reply: Future[Message]) -> Message:
    try:
        return reply.result()
    except BrokenProcessPool as error:
        pool.cache_clear()
        raise OSError(
            "a process that simulates clients has died; most often memory has run out: let fewer clients work at once "
            "(--cpus). This round does not count; resume.toml in the run's folder lets it go on"
        ) from error


def answer(message: Message, run_id: int, node: Values, run_config: Values, threads: int = 1) -> Message:
    """Return a client's reply, computed with so many threads, on the GPU of this process where there are several."""
    from client_app.app import app

    number = current_process()._identity  # () in the process that started the others
    if number and run_config["device"] != "cpu" and torch.cuda.device_count() > 1:
        torch.cuda.set_device(number[0] % torch.cuda.device_count())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        context = Context(run_id, message.metadata.dst_node_id, dict(node), RecordDict(), dict(run_config))
        reply: Message = app(message, context)
    finally:
        torch.set_num_threads(before)
    reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
    return reply


@cache
def pool(workers: int) -> ProcessPoolExecutor:
    """Return the processes that simulate clients, forked once for all runs of this process.

    A fork has PyTorch imported already. It must come before this process computes with several threads, or has one
    that draws on the screen: no fork survives their locks. CUDA in use does not survive it either.
    """
    import client_app.app  # noqa: F401  (forks have it then)

    method = get_context("spawn" if RELOADED or torch.cuda.is_initialized() else "fork")
    processes = ProcessPoolExecutor(workers, mp_context=method, initializer=_begin)
    processes.submit(os.getpid).result()  # they start now, all of them
    return processes


def _begin() -> None:
    """Leave Ctrl-C to the parent, and die with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_DFL)
    torch.set_num_threads(1)
    gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class _Lines(TextIOBase):
    """A stream that hands on whole lines; what `on_line` prints itself goes where output went before."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.on_line, self._before, self._rest = on_line, sys.stdout, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        with redirect_stdout(self._before):
            for line in lines:
                self.on_line(line)
        return len(text)


def simulate(
    run_config: Values, clients: int, on_line: Callable[[str], None], workers: int = 1, threads: int = 1
) -> Path:
    """Run a federation of ``clients`` clients; return the folder of its results.

    ``run_config`` has every key of a run's settings; ``on_line`` is called with each line that the ServerApp prints.
    The clients are divided among ``workers`` processes; 1: all are handled in this one. Each computes with so many
    ``threads``, on which sums of floats depend.
    """
    if int(run_config["num-clients"]) > clients:
        raise SettingsError(f"num-clients = {run_config['num-clients']}: this simulation has {clients} (--clients)")
    with_halves()
    from server_app.app import federate

    nodes: dict[int, Values] = {i + 1: {"partition-id": i, "num-partitions": clients} for i in range(clients)}
    run_id = secrets.randbits(63)
    grid = LocalGrid(run_config, nodes, run_id, workers, threads)
    gc.collect()  # what is frozen as garbage would stay for ever, where a table makes run after run
    gc.freeze()  # a search for garbage then passes over PyTorch's own objects: a tenth of a visit beside training
    try:
        with redirect_stdout(_Lines(on_line)):
            return federate(grid, Context(run_id, 0, {}, RecordDict(), dict(run_config)))
    except KeyboardInterrupt:
        for process in active_children():
            process.kill()
        pool.cache_clear()
        raise
    finally:
        gc.unfreeze()


def attempt(run_config: Values, federation: Values, on_line: Callable[[str], None]) -> tuple[Path | None, str]:
    """Run a federation of Flower's config; the folder of its results, or None and why it failed."""
    from server_app.app import EXPECTED

    clients, workers = int(federation["num-supernodes"]), workers_for(federation, str(run_config["device"]))
    try:
        return simulate(run_config, clients, on_line, workers, int(federation.get(CPUS, 1))), ""
    except EXPECTED as error:
        return None, str(error).split("\n")[0]
    except Exception as error:  # no setting mends it: of one's own code, perhaps
        for line in "".join(traceback.format_exception(error)).splitlines():
            on_line(line)
        return None, f"failed: {type(error).__name__}: {error}"


def workers_for(federation: Values, device: str) -> int:
    """Start the processes that simulate clients, and return how many: as many as processors and GPUs have room for."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1  # of a job or container, not the machine's
    workers, part = cores // int(federation.get(CPUS, 1)), federation.get(GPUS)
    if part == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif gpus := visible_gpus(device):
        places = max(1, min(AT_MOST, min(free for _, free in gpus) // MEGABYTES)) * len(gpus)
        workers = min(workers, int(len(gpus) / float(part) + 1e-6) if part else places)
        names = f"{len(gpus)} GPUs" if len(gpus) > 1 else "a GPU"
        _say(f"this machine has {names} ({gpus[0][0]}), {max(1, workers)} clients at a time; --gpus 0: none uses it")
    if workers > 1:
        pool(workers)
    return max(1, workers)


@cache
def _say(text: str) -> None:
    print(text, file=sys.stderr)


@cache
def visible_gpus(device: str) -> list[tuple[str, int]]:
    """Name and free megabytes of the NVIDIA GPUs that clients may use by the setting ``device``; asks no CUDA."""
    program, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not device.startswith(("auto", "cuda")) or not program or visible == "" or torch.version.cuda is None:
        return []
    which = [f"--id={visible}"] if visible else []
    command = [program, "--query-gpu=name,memory.free", "--format=csv,noheader,nounits", *which]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        lines = [line.rpartition(",") for line in answer.stdout.splitlines() if line.strip()]
        gpus = [(name.strip(), int(free)) for name, _, free in lines]
        return [gpus[int(device.partition(":")[2])]] if ":" in device else gpus
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []

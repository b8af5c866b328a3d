"""How many clients this machine simulates at a time, by its processors and its GPUs' memory."""

import os
import shutil
import socket
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import torch

from protofl_common.config.options import Scalar, SettingsError, Values
from protofl_common.simulation.pool import clients_on, pool

if TYPE_CHECKING:
    from protofl_common.simulation.ray import Cluster  # Ray, a second

CPUS = "client-resources-num-cpus"  # Flower's names
GPUS = "client-resources-num-gpus"
CLUSTER = "cluster"  # the address of Ray's head
CONNECT_SECONDS = 5
CLIENT_MEGABYTES = 3000  # of a GPU's free memory: 500 of CUDA, and a ResNet on small images
MOST_CLIENTS_ON_A_GPU = 8  # at a time: it has enough to do then


def engine_for(federation: Values, device: str) -> "tuple[int, Cluster | None]":
    """Start what simulates clients: processes of this machine, or those of a Ray cluster.

    Return how many processes of this machine play clients, and the cluster, None without one; with
    a cluster this machine has one process, which only hands out messages. What was started before
    is used again. ``federation`` has Flower's options, and ours for a cluster;
    ``device`` is the setting.
    """
    address = str(federation.get(CLUSTER, ""))
    if not address:
        return workers_for(federation, device), None
    _check_reachable(address)
    from protofl_common.simulation.ray import cluster_at

    share = federation.get(GPUS)
    gpus = None if share is None else float(share)
    # of this machine only this process, which hands out the messages
    return 1, cluster_at(address, int(federation.get(CPUS, 1)), gpus)


def _check_reachable(address: str) -> None:
    """Raise SettingsError where nobody listens at a HOST:PORT.

    Ray would try for minutes, and then end this process.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise SettingsError(
            f"--cluster {address!r}: must be HOST:PORT, as `ray start --head` prints it"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise SettingsError(
            f"--cluster {address}: {error}; `ray start --head` must run there (docs/machines.md)"
        ) from error


def workers_for(federation: Values, device: str) -> int:
    """Start as many processes as processors and GPUs have room for, and return how many.

    If there is room for one only, none is started: this process simulates the clients. If each
    client shall have 0 of a GPU, all GPUs are hidden from this process and those that it starts.
    """
    cores = 1  # where it was not tried, this process does all
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))  # a job or container may not use all of the machine's
    workers = cores // int(federation.get(CPUS, 1))

    share = federation.get(GPUS)  # of a GPU, for each client
    if share == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        gpus = visible_gpus(device)
        if gpus:
            workers = min(workers, _clients_on(gpus, share))
            found = f"GPUs of this machine: {len(gpus)} ({gpus[0][0]})"
            _say(f"{found}, clients at a time: {max(1, workers)}; --gpus 0: none uses a GPU")

    if workers > 1:
        pool(workers)
    return max(1, workers)


def _clients_on(gpus: list[tuple[str, int]], share: Scalar | None) -> int:
    """Return how many clients may work at once, by their ``share`` of a GPU or by free memory.

    ``gpus`` has the name and the free megabytes of each GPU. If ``share`` is None, each GPU gets as
    many clients as the one with the least free memory has room for.
    """
    if share:
        return clients_on(len(gpus), float(share))
    least_free = min(free_megabytes for _, free_megabytes in gpus)
    clients = min(MOST_CLIENTS_ON_A_GPU, least_free // CLIENT_MEGABYTES)
    return max(1, clients) * len(gpus)


@cache
def _say(text: str) -> None:
    """Print a text to stderr, once in this process."""
    print(text, file=sys.stderr)


@cache
def visible_gpus(device: str) -> list[tuple[str, int]]:
    """Return name and free megabytes of each NVIDIA GPU that the setting ``device`` allows.

    The program nvidia-smi is asked, not CUDA: forks of a process that has asked CUDA cannot use it.
    [] if there is no such program, or its answer cannot be read.
    """
    program = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not device.startswith(("auto", "cuda")):
        return []
    if not program or visible == "" or torch.version.cuda is None:
        return []

    command = [program, "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    if visible:
        command.append(f"--id={visible}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        gpus = []
        for line in answer.stdout.splitlines():
            if line.strip():
                name, _, free_megabytes = line.rpartition(",")
                gpus.append((name.strip(), int(free_megabytes)))
        _, colon, number = device.partition(":")  # "cuda:1" is the second of the visible ones
        if colon:
            return [gpus[int(number)]]
        return gpus
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []

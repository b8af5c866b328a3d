"""Check this machine for simulations, and say what to do; exits with 1 where something is wrong.

  protofl doctor
  protofl doctor dataset=image-folder data-dir=photos device=cuda --clients 20      # as for protofl run
  protofl doctor --recipe mine.toml                                                 # is every setting right?
  protofl doctor --port 8000 --port 9094                                            # ports that shall be free

It looks at versions, PyTorch, memory, cores, ports, folders, data, the clock and processes that are left. It starts
nothing, and writes nothing but an empty file, for a moment, into folders that runs write to. protofl site check is for
machines with data of their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from protofl_common.config.options import SettingsError
from protofl_common.data import DataError, check_data_settings
from protofl_common.data.store import cache_root
from protofl_common.experiment.settings import Settings, app_folder, baselines_of, default_run_config
from protofl_common.tools.cli.as_json import add_json
from protofl_common.tools.cli.assignments import add_allow_python, read_assignments
from protofl_common.tools.cli.recipes import DEFAULT_FEDERATION, read_recipe
from protofl_common.tools.cli.run import check_data_are_here
from protofl_common.tools.findings import FACT, WARNING, WRONG, Finding, existing, show

OF_A_CLIENT, FEW_BYTES, FEW_SHARED = 700e6, 2e9, 500e6
"""Memory that a simulated client at work takes, with PyTorch; space, and shared memory, of which less is too little."""
PROC, BIN = Path("/proc"), Path(sys.executable).parent
RAY_NOTE = Path("/tmp/ray/ray_current_cluster")
CLIENTS = DEFAULT_FEDERATION["num-supernodes"]


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run that shall work")
    parser.add_argument("--recipe", metavar="NAME", help="a TOML file, or one of configs/recipes, below these")
    parser.add_argument("--clients", type=int, default=CLIENTS, metavar="N", help="its clients")
    parser.add_argument("--port", type=int, action="append", default=[], metavar="N", help="a port that shall be free")
    add_allow_python(parser, "the recipe")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    """Print the findings, worst first."""
    if odd := [port for port in arguments.port if not 0 < port < 2**16]:
        raise SettingsError(f"--port {odd[0]}: must be from 1 to 65535")
    if arguments.clients < 1:
        raise SettingsError(f"--clients {arguments.clients}: must be at least 1")
    arguments.settings = read_recipe(arguments.recipe).settings | read_assignments(arguments.settings)
    return show("doctor", (one for check in CHECKS for one in _safely(check, arguments)), arguments.json)


def _safely(check: Callable[[argparse.Namespace], Iterator[Finding]], asked: argparse.Namespace) -> list[Finding]:
    try:
        return list(check(asked))
    except Exception as error:  # one odd thing must not hide the others
        return [Finding(FACT, check.__name__.strip("_"), f"cannot be told here ({error!r})")]


def _versions(asked: argparse.Namespace) -> Iterator[Finding]:
    bounds = [Requirement(line) for line in requires("protofl") or () if "extra ==" not in line]
    for bound in bounds:
        cure = f"{sys.executable} -m pip install '{bound}'"
        try:
            if not bound.specifier.contains(found := version(bound.name), prereleases=True):
                yield Finding(WRONG, "versions", f"{bound.name} {found} is not {bound.specifier}", cure)
        except PackageNotFoundError:
            yield Finding(WRONG, "versions", f"{bound.name} is not installed", cure)
    if not (BIN / "flower-superlink").exists():
        cure = f"{sys.executable} -m pip install --force-reinstall flwr"
        yield Finding(WRONG, "versions", f"flower-superlink is not in {BIN}, beside this Python", cure)
    found = f"Python {sys.version.split()[0]}, flwr {version('flwr')}, {len(bounds)} packages looked at"
    yield Finding(FACT, "versions", f"{found}; the app is in {app_folder()}")


def _torch(asked: argparse.Namespace) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        cure = f"{sys.executable} -m pip install --force-reinstall torch torchvision"
        yield Finding(WRONG, "torch", f"PyTorch cannot be loaded ({error})", cure)
        return
    cuda, wanted = torch.cuda.is_available(), str(asked.settings.get("device", ""))
    if wanted.startswith("cuda") and not cuda:
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        cure = "nvidia-smi must list a GPU; take device=cpu, or the PyTorch of https://pytorch.org for its driver"
        yield Finding(WRONG, "torch", f"device = {wanted!r}: PyTorch {torch.__version__} {built} and sees no GPU", cure)
    gpus = f"{torch.cuda.device_count()} GPUs, which protofl run uses" if cuda else "no GPU"
    yield Finding(FACT, "torch", f"PyTorch {torch.__version__}, {gpus}")


def _memory(asked: argparse.Namespace) -> Iterator[Finding]:
    facts = dict(line.split(":") for line in (PROC / "meminfo").read_text().splitlines())
    free, cores = int(facts["MemAvailable"].split()[0]) * 1024, os.cpu_count() or 1
    at_once = min(asked.clients, cores)  # one per core, as `protofl run` has it
    needed = at_once * OF_A_CLIENT
    text = f"{free / 1e9:.1f} GB free; {at_once} clients at work at once take {needed / 1e9:.1f} GB"
    cpus = -(-cores // max(1, int(free / OF_A_CLIENT)))
    cure = f"end other programs, or have fewer clients at work at once: --cpus {max(2, cpus)}"
    yield Finding(WRONG, "memory", text, cure) if free < needed else Finding(FACT, "memory", text)
    if Path("/dev/shm").exists() and (shared := shutil.disk_usage("/dev/shm").total) < FEW_SHARED:
        text = f"{shared / 1e6:.0f} MB of shared memory (/dev/shm), through which `flwr run` passes models"
        yield Finding(WARNING, "memory", text, "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm")


def _cores(asked: argparse.Namespace) -> Iterator[Finding]:
    cores, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if not threads.isdigit() or int(threads) > cores:
        yield Finding(WARNING, "cores", f"OMP_NUM_THREADS = {threads!r} on {cores} cores", "unset OMP_NUM_THREADS")
    if usable < cores:
        text = f"this process may use {usable} of {cores} cores; protofl run starts a client on each"
        yield Finding(WARNING, "cores", text, f"protofl run --cpus {-(-cores // usable)}")
    yield Finding(FACT, "cores", f"{usable} cores")


def _ports(asked: argparse.Namespace) -> Iterator[Finding]:
    for port in asked.port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                cure = f"another port, or end what `ss -ltnp 'sport = :{port}'` shows"
                yield Finding(WRONG, "ports", f"{port}: {error.strerror}", cure)
            else:
                yield Finding(FACT, "ports", f"{port}: free")


def _folders(asked: argparse.Namespace) -> Iterator[Finding]:
    settings = default_run_config() | asked.settings
    cache = cache_root(Settings.from_run_config(default_run_config() | {"cache-dir": settings["cache-dir"]}).data)
    places = {"out-dir": Path(str(settings["out-dir"])), "cache-dir": cache, "TMPDIR": Path(tempfile.gettempdir())}
    for name, path in places.items():
        there = existing(path)
        free = shutil.disk_usage(there).free
        text, other = f"{name} {path}", f"{name}=FOLDER" if "-" in name else "export TMPDIR=FOLDER"
        try:
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            yield Finding(WRONG, "folders", f"{text}: cannot be written ({error.strerror})", f"chown it, or {other}")
            continue
        if free < FEW_BYTES:
            cure = f"remove what is not needed, or {other} on another disk"
            yield Finding(WARNING, "folders", f"{text}: {free / 1e6:.0f} MB free", cure)
        else:
            yield Finding(FACT, "folders", f"{text}: {free / 1e9:.0f} GB free")


def _data(asked: argparse.Namespace) -> Iterator[Finding]:
    try:
        config = default_run_config() | asked.settings
        settings = Settings.from_run_config(config)
        baselines_of(settings, config)
        check_data_settings(settings.data)
        check_data_are_here(settings.data)
    except (SettingsError, DataError) as error:
        topic = "data" if isinstance(error, DataError) else "settings"
        text = str(error).replace("\n", f"\n{'':22}")
        yield Finding(WRONG, topic, text, "correct that setting; protofl list shows choices")
    else:
        yield Finding(FACT, "data", f"{settings.data.dataset}: found")


def _clock(asked: argparse.Namespace) -> Iterator[Finding]:
    newest = max(file.stat().st_mtime for file in app_folder().glob("*/*.py"))
    if time.time() < newest - 86400:
        text = f"{time.ctime()}, but this code is of {time.ctime(newest)}: certificates will seem not yet valid"
        yield Finding(WRONG, "clock", text, "timedatectl set-ntp true")
    else:
        yield Finding(FACT, "clock", time.ctime())


def _processes(asked: argparse.Namespace) -> Iterator[Finding]:
    """List processes whose parent has ended. A SuperLink that simulates nothing may be a service."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        pid, parent, command = line.split(None, 2)
        for name in ("flower-superlink", "raylet", "gcs_server"):
            service = name == "flower-superlink" and "--simulation" not in command
            if parent == "1" and not service and any(word.endswith(name) for word in command.split()[:2]):
                yield Finding(WARNING, "processes", f"{name} ({pid}) is left of an earlier run", f"kill {pid}")
    if "RAY_ADDRESS" in os.environ:
        text = f"RAY_ADDRESS = {os.environ['RAY_ADDRESS']!r}: `flwr run` uses that cluster, and waits where it is gone"
        yield Finding(WARNING, "processes", text, "unset RAY_ADDRESS")
    if RAY_NOTE.exists():
        text = f"{RAY_NOTE}: plain `flwr run` waits for the Ray that it names, even when that is gone"
        yield Finding(WARNING, "processes", text, f"protofl run does not; else ray stop, or rm {RAY_NOTE}")
    yield Finding(FACT, "processes", f"{len(listed.splitlines())} looked at")


CHECKS = (_versions, _torch, _memory, _cores, _ports, _folders, _data, _clock, _processes)

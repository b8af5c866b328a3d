"""Check this machine for simulations, and say what to do; exits with 1 where something is wrong.

  protofl doctor
  protofl doctor dataset=image-folder data-dir=photos device=cuda --clients 20      # as for protofl run
  protofl doctor --recipe mine.toml                                                 # is every setting right?

It looks at versions, PyTorch, memory, folders, data and processes that are left. Data of your own are
read, and stay in the cache for the run. It starts nothing, and writes nothing else but an empty file, for a moment,
into folders that runs write to. protofl site check is for machines with data of their own.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement

from protofl_common.basics.files import cache_folder
from protofl_common.config.datasets import is_own
from protofl_common.config.options import SettingsError
from protofl_common.data.division import placed, shares_of
from protofl_common.data.partitions import DOMAIN_PARTITIONS
from protofl_common.data.raw import DataError, described
from protofl_common.data.store import open_data
from protofl_common.experiment.settings import app_folder, default_run_config
from protofl_common.tools.cli.arguments import add_allow_python, add_json, read_assignments, read_recipe
from protofl_common.tools.cli.run import checked
from protofl_common.tools.findings import FACT, WARNING, WRONG, Finding, existing, show, worst_first

OF_A_CLIENT = 700e6  # bytes of memory of a simulated client at work
FEW_BYTES, FEW_SHARED = 2e9, 500e6  # less space, or less shared memory, is too little
PROC, BIN = Path("/proc"), Path(sys.executable).parent
RAY_NOTE = Path("/tmp/ray/ray_current_cluster")
MOST_NAMES = 20  # of clients, which may be patients


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run that shall work")
    parser.add_argument("--recipe", metavar="NAME", help="a TOML file, or one of configs/recipes, below these")
    parser.add_argument("--clients", type=int, metavar="N", help="its clients")
    add_allow_python(parser, "the recipe")
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    recipe, arguments.counts = read_recipe(arguments.recipe), arguments.clients is None and not arguments.recipe
    arguments.clients = recipe.federation["num-supernodes"] if arguments.clients is None else arguments.clients
    if arguments.clients < 1:
        raise SettingsError(f"--clients {arguments.clients}: must be at least 1")
    arguments.chosen = read_assignments(arguments.settings)
    arguments.settings = recipe.settings | arguments.chosen
    findings = worst_first(finding for check in CHECKS for finding in _safely(check, arguments))
    return show("doctor", findings, arguments.json)


Found = Iterator[tuple[str, str, str]]  # level, text, and the cure, which a fact does not have


def _safely(check: Callable[[argparse.Namespace], Found], asked: argparse.Namespace) -> list[Finding]:
    topic = check.__name__.strip("_")
    try:
        return [Finding(level, topic, text, cure if level else "") for level, text, cure in check(asked)]
    except Exception as error:  # one odd thing must not hide the others
        return [Finding(FACT, topic, f"cannot be told here ({error!r})")]


def _versions(asked: argparse.Namespace) -> Found:
    bounds = [Requirement(line) for line in requires("protofl") or () if "extra ==" not in line]
    pip = f"{sys.executable} -m pip install"
    for bound in bounds:
        try:
            if not bound.specifier.contains(installed := version(bound.name), prereleases=True):
                yield WRONG, f"{bound.name} {installed} is not {bound.specifier}", f"{pip} '{bound}'"
        except PackageNotFoundError:
            yield WRONG, f"{bound.name} is not installed", f"{pip} '{bound}'"
    if not (BIN / "flower-superlink").exists():
        yield WRONG, f"flower-superlink is not in {BIN}, beside this Python", f"{pip} --force-reinstall flwr"
    packages = f"Python {sys.version.split()[0]}, flwr {version('flwr')}, {len(bounds)} packages looked at"
    yield FACT, f"{packages}; the app is in {app_folder()}", ""


def _torch(asked: argparse.Namespace) -> Found:
    try:
        import torch
    except (ImportError, OSError) as error:
        cure = f"{sys.executable} -m pip install --force-reinstall torch torchvision"
        yield WRONG, f"PyTorch cannot be loaded ({error})", cure
        return
    cuda, wanted = torch.cuda.is_available(), str(asked.settings.get("device", ""))
    if wanted.startswith("cuda") and not cuda:
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        cure = "nvidia-smi must list a GPU; take device=cpu, or the PyTorch of https://pytorch.org for its driver"
        yield WRONG, f"device = {wanted!r}: PyTorch {torch.__version__} {built} and sees no GPU", cure
    gpus = f"{torch.cuda.device_count()} GPUs, which protofl run uses" if cuda else "no GPU"
    yield FACT, f"PyTorch {torch.__version__}, {gpus}", ""


def _memory(asked: argparse.Namespace) -> Found:
    facts = dict(line.split(":") for line in (PROC / "meminfo").read_text().splitlines())
    free, cores = int(facts["MemAvailable"].split()[0]) * 1024, len(os.sched_getaffinity(0))
    at_once = min(asked.clients, cores)  # one per core, as `protofl run` has it
    needed = at_once * OF_A_CLIENT
    text = f"{cores} cores, {free / 1e9:.1f} GB free; {at_once} clients at work at once take {needed / 1e9:.1f} GB"
    cpus = max(2, -(-cores // max(1, int(free / OF_A_CLIENT))))
    cure = f"end other programs, or have fewer clients at work at once: --cpus {cpus}"
    yield WRONG if free < needed else FACT, text, cure
    if Path("/dev/shm").exists() and (shared := shutil.disk_usage("/dev/shm").total) < FEW_SHARED:
        text = f"{shared / 1e6:.0f} MB of shared memory (/dev/shm), through which `flwr run` passes models"
        yield WARNING, text, "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"


def _folders(asked: argparse.Namespace) -> Found:
    settings = default_run_config() | asked.settings
    out, cache = Path(str(settings["out-dir"])).expanduser(), cache_folder(str(settings["cache-dir"]))
    places = {"out-dir": out, "cache-dir": cache, "TMPDIR": Path(tempfile.gettempdir())}
    for name, path in places.items():
        there, other = existing(path), f"{name}=FOLDER" if "-" in name else "export TMPDIR=FOLDER"
        free = shutil.disk_usage(there).free
        try:
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            yield WRONG, f"{name} {path}: cannot be written ({error.strerror})", f"chown it, or {other}"
            continue
        level, size = (WARNING, f"{free / 1e6:.0f} MB") if free < FEW_BYTES else (FACT, f"{free / 1e9:.0f} GB")
        yield level, f"{name} {path}: {size} free", f"remove what is not needed, or {other} on another disk"


def _settings(asked: argparse.Namespace) -> Found:
    try:
        settings = checked(default_run_config() | asked.settings, asked.chosen)
        data = open_data(settings.data) if is_own(settings.data.dataset) else None
        yield FACT, f"right; the data set {settings.data.dataset} is here", ""
        if data:
            names, natural = data.domain_names, settings.data.partition == "natural"
            listed = f"{'clients' if data.by_client else 'domains'}: {', '.join(names[:MOST_NAMES])}"
            clients = f"; {len(names)} {listed}{', …' if names[MOST_NAMES:] else ''}" if names else ""
            samples = f"{len(data.labels)} samples, {described(data.inputs)}"
            yield FACT, f"{samples}, of {len(data.classes)} classes: {', '.join(data.classes)}{clients}", ""
            number = placed(settings.data, 0, len(names) if natural and asked.counts else asked.clients)[1]
            shares = zip(*shares_of(data, settings.data, settings.run.seed, number), strict=True)
            train, test, _ = (np.unique(np.concatenate(rows)) for rows in shares)
            yield FACT, f"clients train on {len(train)} of them, and test on {len(test)}", ""
            both = {*data.domains[train]} & {*data.domains[test]} if data.by_client else ()
            if both and settings.data.partition not in DOMAIN_PARTITIONS:
                yield WARNING, f"{len(both)} values of `client` are both trained on and tested", "mend `split`"
    except (SettingsError, DataError) as error:
        yield WRONG, str(error).replace("\n", f"\n{'':22}"), "correct that setting; protofl list shows choices"


def _processes(asked: argparse.Namespace) -> Found:
    """List processes whose parent has ended. A SuperLink that simulates nothing may be a service."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        pid, parent, command = line.split(None, 2)
        for name in ("flower-superlink", "raylet", "gcs_server"):
            service = name == "flower-superlink" and "--simulation" not in command
            if parent == "1" and not service and any(word.endswith(name) for word in command.split()[:2]):
                yield WARNING, f"{name} ({pid}) is left of an earlier run", f"kill {pid}"
    if RAY_NOTE.exists():
        text = f"{RAY_NOTE}: plain `flwr run` waits for the Ray that it names, even when that is gone"
        yield WARNING, text, f"protofl run does not; else ray stop, or rm {RAY_NOTE}"
    yield FACT, f"{len(listed.splitlines())} looked at", ""


CHECKS = (_versions, _torch, _memory, _folders, _settings, _processes)

"""Check this machine for simulations, and say what to do; exits with 1 where something is wrong.

  protofl doctor
  protofl doctor dataset=image-folder data-dir=photos device=cuda --clients 20  # as for protofl run
  protofl doctor --recipe mine.toml                                        # is every setting right?

It looks at versions, PyTorch, memory, folders, data and processes that earlier runs have left. It
reads data of your own, which stay in the cache for the run. With data or networks of your own, it
tries each of the clients' networks on two samples. What it cannot find out counts as wrong. It
starts nothing. Into folders that runs write to, it writes an empty file for a moment, and nothing
else. For a site with data of its own use protofl site check.
"""

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from packaging.requirements import Requirement

from protofl_common.basics.faults import fault_of
from protofl_common.basics.files import cache_folder
from protofl_common.basics.text import first_of, printable
from protofl_common.config.architectures import ARCHITECTURES, members_of
from protofl_common.config.datasets import PARTITIONS, is_own
from protofl_common.config.options import Config, Scalar, SettingsError
from protofl_common.config.python_names import allowed_modules
from protofl_common.data.division import number_in_division, shares_of
from protofl_common.data.raw import DataError, described
from protofl_common.data.store import StoredData, open_data
from protofl_common.experiment.catalog import with_hparams
from protofl_common.experiment.settings import Settings, app_folder, default_run_config
from protofl_common.flower import TRIED_ON
from protofl_common.tools.arguments import (
    add_allow_python,
    add_json,
    add_run_settings,
    check_settings,
    read_assignments,
    read_recipe,
)
from protofl_common.tools.findings import (
    FACT,
    WARNING,
    WRONG,
    Finding,
    nearest_existing,
    show,
    worst_first,
)

CLIENT_BYTES = 700e6  # of memory, for a simulated client at work
FEW_BYTES = 2e9  # less free on a disk is a warning
FEW_SHARED_BYTES = 500e6  # less shared memory in all is a warning
PROC = Path("/proc")
BIN = Path(sys.executable).parent
RAY_NOTE = Path("/tmp/ray/ray_current_cluster")  # where Ray notes the address of a cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_settings(parser)
    add_allow_python(parser, "the recipe")
    add_json(parser)


class Planned(NamedTuple):
    """The run that the user has in mind."""

    settings: Config  # of the recipe and of the command line
    chosen: Config  # those of the command line
    clients: int
    clients_by_data: bool  # neither the command line nor a recipe says how many clients


def act(arguments: argparse.Namespace) -> int:
    """Print the findings of all checks, and return 1 if something is wrong, else 0."""
    recipe = read_recipe(arguments.recipe)
    clients_by_data = arguments.clients is None and not arguments.recipe
    clients = arguments.clients
    if clients is None:
        clients = recipe.federation["num-supernodes"]
    if clients < 1:
        raise SettingsError(f"--clients {clients}: must be at least 1")
    chosen = read_assignments(arguments.settings)
    settings = with_hparams(recipe.settings | chosen)
    planned = Planned(settings, chosen, clients, clients_by_data)

    findings: list[Finding] = []
    for check in CHECKS:
        findings += _findings_of(check, planned)
    return show("doctor", worst_first(findings), arguments.json)


Results = Iterator[tuple[str, str, str]]  # level, text, and the cure: "" for a fact


def _findings_of(check: Callable[[Planned], Results], planned: Planned) -> list[Finding]:
    """Run a check, and return its findings, with its name as their topic.

    If the check itself raises an error, that is its only finding, so that other checks go on.
    """
    topic = check.__name__.strip("_")
    try:
        findings = []
        for level, text, cure in check(planned):
            findings.append(Finding(level, topic, text, cure))
        return findings
    except OSError as error:
        untold = f"cannot be told here ({printable(repr(error))})"
        return [Finding(WRONG, topic, untold, "ask as the user, on the machine, of the run")]
    except Exception as error:
        return [Finding(WRONG, topic, fault_of(error, allowed_modules()))]


def _versions(planned: Planned) -> Results:
    """Say which packages are missing or of a version that ProtoFL does not take."""
    bounds = []
    for line in requires("protofl") or ():
        is_optional = "extra ==" in line  # as the packages of protofl[onnx] are
        if not is_optional:
            bounds.append(Requirement(line))
    pip = f"{sys.executable} -m pip install"
    for bound in bounds:
        try:
            installed = version(bound.name)
        except PackageNotFoundError:
            yield WRONG, f"{bound.name} is not installed", f"{pip} '{bound}'"
            continue
        if not bound.specifier.contains(installed, prereleases=True):
            wrong = f"{bound.name} {installed} is not {bound.specifier}"
            yield WRONG, wrong, f"{pip} '{bound}'"

    if not (BIN / "flower-superlink").exists():
        missing = f"flower-superlink is not in {BIN}, beside this Python"
        yield WRONG, missing, f"{pip} --force-reinstall flwr"
    python = sys.version.split()[0]
    packages = f"Python {python}, flwr {version('flwr')}, {len(bounds)} packages looked at"
    yield FACT, f"{packages}; the app is in {app_folder()}", ""


def _flower(planned: Planned) -> Results:
    """Say whether the installed Flower has all that ProtoFL uses of its private parts."""
    try:
        from protofl_common.tools.flower import require_all  # two seconds

        require_all()
    except SettingsError as error:
        yield WRONG, str(error), f"{sys.executable} -m pip install flwr==VERSION"
        return
    tried_on = f"tests have passed with {' and '.join(TRIED_ON)}"
    yield FACT, f"{version('flwr')} has all private names that ProtoFL uses; {tried_on}", ""


def _torch(planned: Planned) -> Results:
    """Say whether PyTorch can be loaded, and sees a GPU if the run's ``device`` is one."""
    try:
        import torch
    except (ImportError, OSError) as error:
        cure = f"{sys.executable} -m pip install --force-reinstall torch torchvision"
        yield WRONG, f"PyTorch cannot be loaded ({error})", cure
        return
    installed = f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}"
    device = str(planned.settings.get("device", ""))
    if device.startswith("cuda") and not torch.cuda.is_available():
        what = f"device = {device!r}: {installed}, sees no GPU"
        cure = (
            "nvidia-smi must list a GPU; take device=cpu, or the PyTorch of "
            "https://pytorch.org for its driver"
        )
        yield WRONG, what, cure
    yield FACT, f"{installed}, sees {torch.cuda.device_count()} GPUs", ""


def _memory(planned: Planned) -> Results:
    """Say whether the memory is enough for the clients that work at once.

    Warn of little shared memory, too.
    """
    lines = (PROC / "meminfo").read_text().splitlines()
    sizes = dict(line.split(":") for line in lines)
    free = int(sizes["MemAvailable"].split()[0]) * 1024  # "12345 kB"
    cores = len(os.sched_getaffinity(0))
    at_once = min(planned.clients, cores)  # one per core, as `protofl run` has it
    needed = at_once * CLIENT_BYTES
    text = (
        f"{cores} cores, {free / 1e9:.1f} GB free; "
        f"{at_once} clients at work at once take {needed / 1e9:.1f} GB"
    )
    if free < needed:
        most_clients = max(1, int(free / CLIENT_BYTES))
        # at least 2: with 1, the default, the clients at once need more memory than is free
        cpus = max(2, math.ceil(cores / most_clients))
        cure = f"end other programs, or have fewer clients at work at once: --cpus {cpus}"
        yield WRONG, text, cure
    else:
        yield FACT, text, ""

    if Path("/dev/shm").exists():
        shared = shutil.disk_usage("/dev/shm").total
        if shared < FEW_SHARED_BYTES:
            passes = "of shared memory (/dev/shm), through which `flwr run` passes models"
            cure = "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
            yield WARNING, f"{shared / 1e6:.0f} MB {passes}", cure


def _folders(planned: Planned) -> Results:
    """Check the folders to which the run would write."""
    settings = default_run_config() | planned.settings
    out_dir = Path(str(settings["out-dir"])).expanduser()
    yield from _folder("out-dir", out_dir, "out-dir=FOLDER")
    cache_dir = cache_folder(str(settings["cache-dir"]))
    yield from _folder("cache-dir", cache_dir, "cache-dir=FOLDER")
    yield from _folder("TMPDIR", Path(tempfile.gettempdir()), "export TMPDIR=FOLDER")


def _folder(name: str, path: Path, other: str) -> Results:
    """Say whether a run can write to the folder, and how much space there is.

    ``name`` is what is set to ``path``, and ``other`` what the user types to choose another.
    """
    nearest = nearest_existing(path)
    free = shutil.disk_usage(nearest).free
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        what = f"{name} {path}: cannot be written ({error.strerror})"
        yield WRONG, what, f"chown it, or {other}"
        return
    if free < FEW_BYTES:
        cure = f"remove what is not needed, or {other} on another disk"
        yield WARNING, f"{name} {path}: {free / 1e6:.0f} MB free", cure
    else:
        yield FACT, f"{name} {path}: {free / 1e9:.0f} GB free", ""


def _settings(planned: Planned) -> Results:
    """Check the settings; read data of the user's own, and try networks of their own."""
    try:
        settings = check_settings(default_run_config() | planned.settings, planned.chosen)
        data = None
        if is_own(settings.data.dataset):
            data = open_data(settings.data)
        clients = planned.clients
        if data:
            if settings.data.partition == "natural" and planned.clients_by_data:
                clients = len(data.domain_names)
            yield from _own_data(data, settings, clients)
        networks = set(members_of(settings.model.models))
        has_own_networks = not networks <= ARCHITECTURES.keys()
        if data or has_own_networks:
            yield from _models(settings, clients, len(networks))
        yield FACT, f"right; the data set {settings.data.dataset} is here", ""
    except (SettingsError, DataError) as error:
        text = str(error).replace("\n", f"\n{'':22}")  # 22: where the text of a finding begins
        yield WRONG, text, "correct that setting; protofl list shows choices"


def _models(settings: Settings, clients: int, networks: int) -> Results:
    """Let one client for each network introduce itself, and say what it tried.

    There are ``networks`` different ones, dealt out in turn, so that the first clients have one
    each. To introduce itself a client builds its model, and tries it and the model's file.
    SettingsError or DataError where it cannot.
    """
    from protofl_common.simulation.grid import introduced

    for number in range(min(clients, networks)):
        node: dict[str, Scalar] = {"partition-id": number, "num-partitions": clients}
        card = introduced(settings.given, node)
        tried = f"{card.parameters} parameters, tried on two samples, on {card.device}"
        yield FACT, f"{card.name}: {card.arch}, {tried}", ""


def _own_data(data: StoredData, settings: Settings, clients: int) -> Results:
    """Say what is in the user's data, and how many samples the simulated clients would use.

    Warn where a value of the column ``client`` is both trained on and tested.
    """
    names = data.domain_names
    samples = f"{len(data.labels)} samples, {described(data.inputs)}"
    classes = f"{data.task.describe()}: {first_of(data.classes)}"
    domains = ""
    if names:
        what = "clients" if data.by_client else "domains"
        domains = f"; {len(names)} {what}: {first_of(names)}"
    for note in data.notes:
        yield FACT, note, ""
    yield FACT, f"{samples}, of {classes}{domains}", ""
    if data.columns:
        yield FACT, f"inputs: the columns {first_of(data.columns)}", ""

    # the number of shares is the same for all clients, so that it can be asked for client 0
    _, num_shares = number_in_division(settings.data, 0, clients)
    shares = shares_of(data, settings.data, settings.run.seed, num_shares)
    train = np.unique(np.concatenate([share.train for share in shares]))
    test = np.unique(np.concatenate([share.test for share in shares]))
    yield FACT, f"clients train on {len(train)} of them, and test on {len(test)}", ""

    if data.by_client and not PARTITIONS[settings.data.partition].needs_domains:
        # here `domains` are the values of that column
        both = {*data.domains[train]} & {*data.domains[test]}
        if both:
            wrong = f"{len(both)} values of `client` are both trained on and tested"
            yield WARNING, wrong, "mend `split`"


def _processes(planned: Planned) -> Results:
    """Warn of Flower's and Ray's processes that an earlier run has left.

    Those are processes of this FLWR_HOME whose parent has ended (then it is process 1). A SuperLink
    that does not simulate is passed over, as it may be a service.
    """
    number = 0
    for folder in PROC.glob("[0-9]*"):
        number += 1
        try:
            # ID (NAME) STATE PARENT …; a name may have blanks and brackets
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            words = (folder / "cmdline").read_text().split("\0")
            variables = (folder / "environ").read_text(errors="replace").split("\0")
        except OSError:  # another user's, or gone
            continue
        environment = {}
        for variable in variables:
            name, _, value = variable.partition("=")
            environment[name] = value
        if parent != "1" or _flwr_home(environment) != _flwr_home(os.environ):
            continue
        for name in ("flower-superlink", "raylet", "gcs_server"):
            is_service = name == "flower-superlink" and "--simulation" not in words
            # the second word is the program if the first is the Python that runs it
            is_named = any(word.endswith(name) for word in words[:2])
            if is_named and not is_service:
                left = f"{name} ({folder.name}) is left of an earlier run"
                yield WARNING, left, f"kill {folder.name}"

    if RAY_NOTE.exists():
        text = (
            f"{RAY_NOTE}: plain `flwr run` waits for the Ray that it names, even when that is gone"
        )
        yield WARNING, text, f"protofl run does not; else ray stop, or rm {RAY_NOTE}"
    yield FACT, f"{number} looked at, for those of {_flwr_home(os.environ)}", ""


def _flwr_home(environment: Mapping[str, str]) -> str:
    """Return the folder that a process with these environment variables has as FLWR_HOME."""
    home = environment.get("HOME", "")
    return os.path.realpath(environment.get("FLWR_HOME") or f"{home}/.flwr")


CHECKS = (_versions, _flower, _torch, _memory, _folders, _settings, _processes)

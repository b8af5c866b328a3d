"""The version of the code, and the machine that it runs on."""

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_RELEASE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){2}")
ROOT = Path(__file__).resolve().parents[2]
PACKAGES_AT_A_SITE = ("client_app", "protofl_common")
NOT_AT_A_SITE = (
    "maths/aggregation.py",
    "report",
    "runs/events.py",
    "runs/figures.py",
    "runs/over_clients.py",
    "simulation",
)
"""What of protofl_common no client process imports."""


@cache
def code_version() -> str:
    """Return 8 hexadecimal digits that stand for the code that this machine runs in a federation.

    It is the code of the three packages without `tools`, which take no part in a run.
    """
    return _digest(_files_in(*PACKAGES_AT_A_SITE, "server_app"))


@cache
def code_version_at_site() -> str:
    """Return 8 hexadecimal digits that stand for the code that runs at a site.

    An operator is asked again when they change, so what only the server runs is not in them.
    """
    common = ROOT / "protofl_common"
    left_out = [common / name for name in NOT_AT_A_SITE]
    files = []
    for file in _files_in(*PACKAGES_AT_A_SITE):
        if not any(file.is_relative_to(path) for path in left_out):
            files.append(file)
    return _digest(files)


def _files_in(*packages: str) -> list[Path]:
    files: list[Path] = []
    for package in packages:
        files += (ROOT / package).rglob("*.py")
    return [file for file in files if "tools" not in file.relative_to(ROOT).parts]


def is_later_patch(before: str, after: str) -> bool:
    """Return whether release ``after`` is a later patch of ``before``: ``0.2.3`` of ``0.2.1``.

    False where one of them is not three numbers, such as ``0.2.0rc1``.
    """
    if not (_RELEASE.fullmatch(before) and _RELEASE.fullmatch(after)):
        return False
    *minor, patch = [int(number) for number in before.split(".")]
    *later_minor, later_patch = [int(number) for number in after.split(".")]
    return minor == later_minor and later_patch > patch


def version_of(module: str) -> str:
    """Return 8 hexadecimal digits that stand for the code of ``module`` (`files_of`).

    "" if it has no files. The digits of an imported module are kept beside it: its files may be
    edited later, but this process goes on with what it imported.
    """
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if spec is None:
        return _digest(files_of(module))
    if not hasattr(spec, "protofl_version"):
        spec.protofl_version = _digest(files_of(module))
    return str(spec.protofl_version)


def import_as_named(module: str) -> ModuleType:
    """Import a module; from then on `version_of` it is that of the files that were imported.

    ImportError if one of its package was edited meanwhile: then nobody knows which code would run.
    """
    if module in sys.modules:
        return sys.modules[module]
    before = version_of(module)
    imported = import_module(module)
    if version_of(module) != before:
        package = module.partition(".")[0]
        for name in list(sys.modules):
            if name == package or name.startswith(f"{package}."):
                del sys.modules[name]
        raise ImportError(f"a file of {package} was edited during its import; start again")
    return imported


def files_of(module: str) -> list[Path]:
    """Find the Python files of the package of ``module``, or the one file of a single module.

    There are none for a module that Python does not find, or that has no file, as in a notebook.
    """
    package = module.partition(".")[0]
    try:
        spec = find_spec(package)
    except ValueError:  # ``__main__`` has no spec
        return []
    if spec is None:
        return []

    files: list[Path] = []
    for folder in spec.submodule_search_locations or ():
        files += Path(folder).rglob("*.py")
    if not files and spec.has_location:
        files = [Path(spec.origin or "")]
    # an editor's lock is a dangling link, and a path into a zip file is no file: none can be read
    return [file for file in files if file.is_file()]


def _digest(files: Iterable[Path]) -> str:
    contents = [file.read_bytes() for file in sorted(files)]
    if not contents:
        return ""
    return hashlib.sha256(b"".join(contents)).hexdigest()[:8]


@cache
def commit() -> str:
    """Return the code's Git commit, with ``-dirty`` where files differ from it.

    "none" outside a repository, as in the copy that Flower runs, and where Git does not answer.
    """
    if not (ROOT / ".git").exists():  # Git would describe a repository that this folder lies in
        return "none"
    # without tags, which would be described in place of the commit
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        described = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return described.stdout.strip()
    return "none"


def machine() -> str:
    """Describe this machine: ``"Linux x86_64, 2 CPUs, 24 GB"``, and the GPUs that PyTorch sees."""
    import torch

    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    system = f"{platform.system()} {platform.machine()}"
    return ", ".join([system, f"{os.cpu_count()} CPUs", f"{gigabytes:.0f} GB", *gpus])

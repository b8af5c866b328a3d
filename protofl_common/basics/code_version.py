"""The version of the code, and the machine that it runs on."""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import FunctionType

ROOT = Path(__file__).resolve().parents[2]


@cache
def code_version() -> str:
    """The first 8 digits of a SHA-256 over the code that an app's bundle carries, as it stands on this machine."""
    files = chain(*((ROOT / package).rglob("*.py") for package in ("client_app", "protofl_common", "server_app")))
    return _digest(file for file in files if "tools" not in file.relative_to(ROOT).parts)


def version_of(module: str, on_disk: str = "") -> str:
    """The first 8 digits for the package of ``module``, or its one file; "" if Python finds none.

    Of an imported one as at the first look, until it is reloaded: this process runs that.
    """
    version, imported = on_disk or _digest(files_of(module)), getattr(sys.modules.get(module), "__spec__", None)
    return version if imported is None else str(vars(imported).setdefault("protofl_version", version))


def edited(module: str, *used: type) -> str:
    """Say which modules of its package, or classes of it in use, are older here than in its files; "" for none."""
    package, on_disk = module.partition(".")[0], _digest(files_of(module))
    here = {name: vars(each) for name, each in [*sys.modules.items()] if name.partition(".")[0] == package}

    def inside(value: object) -> object:  # its decorators
        is_wrapper = type(value) is FunctionType and "__wrapped__" in vars(value)
        return inside(vars(value)["__wrapped__"]) if is_wrapper else value

    now = {name: {id(inside(value)) for value in own.values()} for name, own in here.items()}

    def is_old(value: object) -> bool:  # a function or class of a module that has been reloaded since
        home = here.get(value.__module__, {}) if on_disk and issubclass(type(value), FunctionType | type) else {}
        return bool(home) and value.__qualname__ in home and id(inside(value)) not in now[value.__module__]  # type: ignore

    old = [name for name, own in here.items() if version_of(name, on_disk) != on_disk or any(map(is_old, own.values()))]
    old += [f"{value.__qualname__}, as you imported it" for value in used if is_old(value)]
    how = f"{package} was edited after the import; reload in this order, or start Python (the kernel) again"
    return f"{', '.join(old)}: {how}" if old else ""


def files_of(module: str) -> list[Path]:
    """The files of its package, or its one file; none where Python finds no file, as of a notebook's ``__main__``."""
    with suppress(ValueError):
        if spec := find_spec(module.partition(".")[0]):
            folders, origin = spec.submodule_search_locations or (), [spec.origin or ""] * spec.has_location
            every = [file for folder in folders for file in Path(folder).rglob("*.py")] or map(Path, origin)
            return [file for file in every if file.is_file()]  # neither an editor's lock, nor inside a zip file
    return []


def _digest(files: Iterable[Path]) -> str:
    content = [file.read_bytes() for file in sorted(files)]
    return hashlib.sha256(b"".join(content)).hexdigest()[:8] if content else ""


@cache
def commit() -> str:
    """Git's name, ``-dirty`` where files differ; "none" outside a repository, as in the copy that Flower runs."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        described = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return described.stdout.strip() if (ROOT / ".git").exists() else "none"
    return "none"


def machine() -> str:
    """``"Linux x86_64, 2 CPUs, 24 GB"`` and the GPU, where PyTorch sees one."""
    import torch

    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    system = f"{platform.system()} {platform.machine()}"
    return ", ".join([system, f"{os.cpu_count()} CPUs", f"{gigabytes:.0f} GB", *gpus])

"""The version of the code, and the machine that it runs on."""

import os
import platform
import re
from functools import cache
from pathlib import Path

from protofl_common.config.python_code import digest_of_files

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
    return digest_of_files(_files_in(*PACKAGES_AT_A_SITE, "server_app"))


@cache
def code_version_at_site() -> str:
    """Return 8 hexadecimal digits that stand for the code that runs at a site.

    A site's operator is asked for consent again when they change, so they leave out what only the
    server runs.
    """
    common = ROOT / "protofl_common"
    left_out = [common / name for name in NOT_AT_A_SITE]
    files = []
    for file in _files_in(*PACKAGES_AT_A_SITE):
        if not any(file.is_relative_to(path) for path in left_out):
            files.append(file)
    return digest_of_files(files)


def _files_in(*packages: str) -> list[Path]:
    files: list[Path] = []
    for package in packages:
        files += (ROOT / package).rglob("*.py")
    return [file for file in files if "tools" not in file.relative_to(ROOT).parts]


def is_later_patch(before: str, after: str) -> bool:
    """Return whether release ``after`` is a later patch of ``before``, as ``0.2.3`` of ``0.2.1``.

    False if one of them is not three numbers, such as ``0.2.0rc1``.
    """
    if not (_RELEASE.fullmatch(before) and _RELEASE.fullmatch(after)):
        return False
    *minor, patch = [int(number) for number in before.split(".")]
    *later_minor, later_patch = [int(number) for number in after.split(".")]
    return minor == later_minor and later_patch > patch


def machine() -> str:
    """Describe this machine: ``"Linux x86_64, 2 CPUs, 24 GB"``, and the GPUs that PyTorch sees."""
    import torch

    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    system = f"{platform.system()} {platform.machine()}"
    return ", ".join([system, f"{os.cpu_count()} CPUs", f"{gigabytes:.0f} GB", *gpus])

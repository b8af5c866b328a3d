"""Choose the share of a GPU for each simulated client: as many share one as fit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import version

from protofl_common.config.options import Scalar

MEGABYTES = 3000
"""Of a GPU's free memory for each client at work: 500 are CUDA's own, the rest do for a ResNet on small images."""
AT_MOST = 8
"""Clients at a time on one GPU: it has enough to do then."""
KEY = "client-resources-num-gpus"


def with_gpu(federation: dict[str, Scalar], device: str) -> dict[str, Scalar]:
    """``federation`` with a part of a GPU for each client, where it names none; says so on standard error, once.

    ``device``: the setting.
    """
    if KEY in federation:
        return federation
    part, said = gpu_part(device, int(federation.get("client-resources-num-cpus", 1)))
    if part:
        _say(said)
    return federation | ({KEY: part} if part else {})


@cache
def _say(text: str) -> None:
    print(text, file=sys.stderr)


@cache
def gpu_part(device: str, cpus: int) -> tuple[float, str]:
    """The part, and a sentence about it; 0 and "" where there is no NVIDIA GPU, or the setting ``device`` wants none.

    ``cpus``: of each client at work.
    """
    if not device.startswith(("auto", "cuda")) or not (gpus := _gpus()):
        return 0.0, ""
    fit = min(free for _, free in gpus) // MEGABYTES
    together = max(1, min(fit, AT_MOST, (os.cpu_count() or 1) // cpus // len(gpus)))
    names = f"{len(gpus)} GPUs" if len(gpus) > 1 else "a GPU"
    said = f"this machine has {names} ({gpus[0][0]}): {together} clients at a time share one; --gpus 0: none does"
    return round(1 / together, 3), said


def _gpus() -> list[tuple[str, int]]:
    """Name and free megabytes of those that processes of this one will see; PyTorch would take a second to tell."""
    program, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible == "" or version("torch").endswith("+cpu"):
        return []
    which = [f"--id={visible}"] if visible else []
    command = [program, "--query-gpu=name,memory.free", "--format=csv,noheader,nounits", *which]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        lines = [line.rpartition(",") for line in answer.stdout.splitlines() if line.strip()]
        return [(name.strip(), int(free)) for name, _, free in lines]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []

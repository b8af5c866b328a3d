"""The device that something computes on, so prepared that a seed gives the same numbers again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from protofl_common.config.options import SettingsError


def open_device(name: str, precision: str) -> torch.device:
    """Return the device that the setting ``device`` calls ``name``, ready for use.

    SettingsError if it is not usable here. ``auto`` is CUDA where PyTorch sees it, else the CPU.

    A CUDA device also changes PyTorch's settings for the whole process. Operations then use kernels
    whose results repeat exactly; where PyTorch has none for an operation, it warns and uses
    another. Numbers are rounded to TF32 (19 bits) only with ``precision = "tf32"``.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda":
            _make_cuda_repeatable(allow_tf32=precision == "tf32")
        torch.empty(0, device=device)  # raises if there is no such device
        return device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(
            f"device = {name!r}: not usable here ({reason}); "
            "leave it out, or take cpu; a simulated client sees a GPU only if"
            " it asks for a part of one: client-resources-num-gpus=0.25"
        ) from error


def _make_cuda_repeatable(*, allow_tf32: bool) -> None:
    """Set PyTorch so that CUDA's operations give the same numbers again, in this whole process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it begins
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # takes time, and is for finding errors
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    torch.backends.cudnn.allow_tf32 = allow_tf32


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's generator of the CPU inside the ``with``; afterwards it is as it was before.

    The GPUs' generators are not touched.
    """
    with torch.random.fork_rng(devices=[]):
        # unlike torch.manual_seed, this leaves the GPUs' generators alone
        torch.default_generator.manual_seed(seed)
        yield


def seed_torch(seed: int) -> None:
    """Seed PyTorch's generators of all devices, as `torch.manual_seed` does.

    Without a GPU only that of the CPU: `torch.manual_seed` would spend a millisecond on tracebacks.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)

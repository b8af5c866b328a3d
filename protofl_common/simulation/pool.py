"""The processes that simulate clients."""

import ctypes
import gc
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

import torch

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent has died


@cache
def pool(workers: int) -> ProcessPoolExecutor:
    """Start the processes that simulate clients, once for all runs of this process.

    They are forked, so that PyTorch is imported already. That must happen before this process
    computes with several threads, or has one that draws on the screen: a fork would wait forever
    for their locks. Once this process uses CUDA its forks cannot, so new processes are spawned.
    """
    import torch._dynamo  # optimizers import it: 155 MB, which forks share

    import client_app.app  # noqa: F401  (forks have it then)

    start_method = "spawn" if torch.cuda.is_initialized() else "fork"
    context = get_context(start_method)
    processes = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin)
    # The first task starts all processes that are forked; spawned ones start when needed
    processes.submit(os.getpid).result()
    return processes


def _begin() -> None:
    """Prepare a process of the pool: it leaves Ctrl-C to its parent, and ends when that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for kind in (signal.SIGTERM, signal.SIGHUP):  # a fork has inherited the command's handlers
        signal.signal(kind, signal.SIG_DFL)
    torch.set_num_threads(1)
    gc.freeze()  # no search for garbage in what is imported (`grid.simulate`)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def clients_on(gpus: float, share: float) -> int:
    """Return how many clients GPUs have room for, if each gets this ``share`` of one."""
    return int(gpus / share + 1e-6)  # rounding of the share must not lose one

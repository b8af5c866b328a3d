"""The process of a task at a site or a worker: it reads what to do, and is Flower's command for it.

The arguments of Flower's command come by standard input, a line of JSON for each task, so that no
command line shows the token.
"""

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable

from protofl_common.tools.flower import TASK_START_SECONDS

Handle = Callable[[list[str]], None]
"""Does a task, of which it gets the arguments of Flower's command."""


def handle_tasks(method: str, prepare: Callable[[], None], handle: Handle) -> None:
    """Handle a task, or with the ``method`` "fork" each in a copy of this process.

    It then has done ``prepare`` before: to import what every task needs takes seconds, on a cold
    machine more than Flower allows a task for its first call.
    """
    if method != "fork":
        handle(read_task(sys.stdin.readline()))
        return
    prepare()
    _fork_for_each_task(handle)


def written_task(arguments: list[str]) -> str:
    """Return the line of a task that is launched now."""
    return json.dumps({"launched": time.time(), "arguments": arguments})


def read_task(line: str) -> list[str]:
    """Return the arguments of a task; end this process if Flower has taken the task back."""
    task = json.loads(line)
    seconds = time.time() - task["launched"]
    if seconds > TASK_START_SECONDS:
        print(
            f"protofl: this machine needed {seconds:.0f} s to start a process for a task, and "
            f"Flower allows {TASK_START_SECONDS}: it gives the task out again. If that does not "
            "end, the machine has too little memory, or too much else to do",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    arguments: list[str] = task["arguments"]
    return arguments


def _fork_for_each_task(handle: Handle) -> None:
    """Until standard input ends, which it does when the executor does.

    This process itself sees no task. It must have one thread only and never use CUDA: no fork
    survives these.
    """
    gc.freeze()  # or collecting in a child would copy all pages
    # Nobody waits for a child, and none is left as a zombie
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                handle(read_task(line))
            except BaseException as end:  # Flower's own is a SystemExit
                if not isinstance(end, SystemExit):
                    sys.excepthook(type(end), end, end.__traceback__)
            sys.stdout.flush()
            # all is sent; to end as Python does, module by module, takes longer than most messages
            os._exit(0)

"""The process of a task at a site or a worker: it reads what to do, and is Flower's command for it.

The arguments of Flower's command come by standard input, a line of JSON for each task, so that no
command line shows the token.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module

from protofl_common.experiment.catalog import half
from protofl_common.tools.flower import TASK_START_SECONDS

Handle = Callable[[list[str]], None]
"""Does a task, of which it gets the arguments of Flower's command."""


def handle_tasks(method: str, prepare: Callable[[], None], handle: Handle) -> None:
    """Read tasks from standard input, and call ``handle`` with each one's arguments.

    With the ``method`` "spawn" there is one task, which is handled in this process. With "fork"
    there are many, and each is handled in a copy of this process. Before the first one this process
    calls ``prepare``: to import what every task needs takes seconds, on a cold machine more than
    Flower allows until a task's first call.
    """
    if method != "fork":
        handle(read_task(sys.stdin.readline()))
        return
    prepare()
    _fork_for_each_task(handle)


def import_ahead(modules: Iterable[str], load: Callable[[], object], halves: Iterable[str]) -> None:
    """Import what every task needs: these modules, what ``load`` imports, the algorithms' halves.

    If something cannot be imported, this stops without an error, and a task will name it.
    """
    with suppress(Exception):  # the task will meet the same error, and end with it
        for name in modules:
            import_module(name)
        load()
        for path in halves:
            half(path, object)


def written_task(arguments: list[str]) -> str:
    """Return the line that tells a process of a task with these arguments, launched now."""
    return json.dumps({"launched": time.time(), "arguments": arguments})


def read_task(line: str) -> list[str]:
    """Return the arguments in a line of `written_task`.

    If the task was launched longer ago than Flower waits for its first call, Flower has given it
    out again: then say so, and end this process.
    """
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


def end_with_parent() -> None:
    """Let Linux kill this process when the one that forked it ends.

    A message whose site has ended has nobody to answer to, but Flower's client would try to reach
    the site for ever. Elsewhere this does nothing.
    """
    if sys.platform == "linux":
        set_signal_of_parents_death = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGKILL)


def _fork_for_each_task(handle: Handle) -> None:
    """Fork for each line of standard input, and handle its task in the child.

    This ends when standard input does, which is when the executor ends. This process itself handles
    no task. It must have one thread only and never use CUDA: no fork survives these.
    """
    gc.freeze()  # else a child that collects garbage would copy all memory pages
    # nobody waits for a child: if this signal is ignored, none is left as a zombie
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C does not end it: its input does
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the input is for the parent alone
            try:
                handle(read_task(line))
            except SystemExit:  # how Flower's command ends
                pass
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            sys.stdout.flush()
            # all is sent; an ordinary end, module by module, would take longer than most messages
            os._exit(0)

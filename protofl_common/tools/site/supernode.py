"""The SuperNode of ``protofl site run``, and its executor, which starts a process for each message.

    python -m protofl_common.tools.site.supernode ADDRESS fork|spawn SUPERNODE-PID

That is the executor (`tools/executor.py`), with the secret on its standard input. The SuperNode is
Flower's, in the process of the command: it starts nothing.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from protofl_common.basics.files import make_private
from protofl_common.config.options import Config
from protofl_common.experiment.settings import app_folder, default_run_config
from protofl_common.tools.executor import Executor, environment_of_own_code
from protofl_common.tools.flower import (
    Run,
    SuperNodeTasks,
    TaskType,
    ask_for_tasks,
    console_script,
    end_supernode,
    get_flwr_home,
    handing_tasks_to,
    keep_log_short,
    require_for_site,
    supernode_process,
)

PAUSE_FRACTION = 0.1  # a pause is this part of Flower's, or of the time waited so far
REPLY_PAUSE_SECONDS = 0.5  # Flower's own pause while it waits for a reply
LONGEST_START_SECONDS = 300.0  # within which a process must take a message
LOST = "its process was stopped for longer than Flower waits for a sign of life"
CLIENT_PROCESS = Path(__file__).with_name("client_process.py")


def start(words: list[str], address: str, start_method: str) -> None:
    """Start the executor as a process, and be the SuperNode until it ends; this never returns.

    ``words`` are arguments of ``flower-supernode``, which listens for the executor at ``address``.
    ``start_method`` is "fork" or "spawn", for the processes of messages.
    """
    require_for_site()  # here, so that it fails now and not at the first message
    keep_log_short()
    make_private(get_flwr_home())  # as `protofl site check` says; Flower lets everybody look in
    secret = os.urandom(32)  # by which the SuperNode knows its executor
    module = "protofl_common.tools.site.supernode"
    command = [sys.executable, "-P", "-m", module, address, start_method, str(os.getpid())]
    executor = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment_of_own_code())
    assert executor.stdin is not None
    executor.stdin.write(secret)
    executor.stdin.close()

    # a pipe in the place of the file that Flower reads: the secret is never on the disk
    reading, writing = os.pipe()
    os.write(writing, secret)
    os.close(writing)
    secret_file = f"/dev/fd/{reading}"
    sys.argv = ["flower-supernode", *words, "--isolation", "process"]
    sys.argv += ["--superexec-auth-secret-file", secret_file]

    waits = Waits(executor)
    with supernode_process(waits, settings_of, waits.watch):
        console_script("flower-supernode")()
    # It returns when the SuperLink refuses a request for good; a thread that it leaves would keep
    # the process alive, and idle.
    end_supernode("The connection to the SuperLink broke; the error above says why.")


def settings_of(bundle: bytes, run: Run) -> Config:
    """Return a run's settings: the installed code's defaults, changed by those submitted.

    This takes the place of Flower's function, which reads the defaults in the run's ``bundle``: it
    would unpack what a stranger has packed, in the process that all runs share, and end that
    process when it cannot. Unknown keys are left for the ClientApp to refuse.
    """
    return default_run_config() | run.override_config


class Waits:
    """Takes the place of the module `time` in Flower's SuperNode: its pauses are shorter.

    Flower asks for work every 3 seconds and looks for a reply every 0.5, for which each round
    waits; here the first pause is a tenth of that, and later ones a tenth of the time waited so
    far.
    Flower would also wait for ever for the reply of a process that was frozen before it had fetched
    its message, or midway through its reply: here such a message is answered by an error.
    """

    def __init__(self, executor: "subprocess.Popen[bytes]") -> None:
        self.executor = executor
        self.flower_pause = 0.0  # seconds of Flower's last pause, which tell what it waits for
        self.began = 0.0  # when Flower began to wait for that
        self.tasks: SuperNodeTasks | None = None  # None before the first message
        self.seems_lost = False  # at the last look no reply could come any more
        self.idle_seconds = 0.0  # how long no process has worked on the message

    def watch(self, tasks: SuperNodeTasks) -> None:
        """Look after these tasks from now on, as Flower begins to wait for a message's reply."""
        self.tasks = tasks
        self.seems_lost = False
        self.idle_seconds = 0.0

    def sleep(self, flower_pause: float) -> None:
        """Sleep at most as many seconds as Flower asks for, and then look whether all is well.

        End the SuperNode if its executor has ended. While Flower waits for a reply, `_look_after`
        may answer the message, or end the SuperNode.
        """
        now = time.monotonic()
        if flower_pause != self.flower_pause:  # Flower waits for something else than before
            self.flower_pause = flower_pause
            self.began = now
        waited = now - self.began
        # the longer it has waited already, the less a longer pause adds
        pause = min(flower_pause, PAUSE_FRACTION * max(flower_pause, waited))
        time.sleep(pause)

        if self.executor.poll() is not None:
            end_supernode("The process that starts those of messages has ended.")
        if self.tasks and flower_pause == REPLY_PAUSE_SECONDS:
            self._look_after(self.tasks, pause)

    def _look_after(self, tasks: SuperNodeTasks, pause: float) -> None:
        """Answer a message whose process is lost; end the SuperNode if no process takes one.

        ``pause`` are the seconds since the last look. RuntimeError if the lost process had begun to
        answer: Flower logs it and goes on with the next message.
        """
        if tasks.are_open():  # a reply may still come
            self.seems_lost = False
            self.idle_seconds += pause
            if tasks.are_running():
                self.idle_seconds = 0.0
            if self.idle_seconds > LONGEST_START_SECONDS:
                end_supernode(f"No process took a message in {LONGEST_START_SECONDS:g} s.")
            return
        if not self.seems_lost:  # the reply may have come just now: Flower looks once more for it
            self.seems_lost = True
            return
        self.seems_lost = False
        if not tasks.answer(LOST):
            raise RuntimeError(f"{LOST}, and lacks parts")


if __name__ == "__main__":
    _, link, method, supernode = sys.argv
    keep_log_short()
    shared_secret = sys.stdin.buffer.read()
    script = [str(CLIENT_PROCESS), str(app_folder()), method]
    with handing_tasks_to(Executor(TaskType.CLIENT_APP, script, method)):
        ask_for_tasks(link, shared_secret, int(supernode))

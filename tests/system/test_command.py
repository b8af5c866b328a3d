"""``protofl run``, stopped or killed: its exit status says so, and nothing is left running."""

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from protofl_common.tools.cli.run import program
from tests.support.processes import start_in_terminal, wait_until

pytestmark = pytest.mark.system
TINY = ("algo=local", "dataset=digits", "partition=iid", "local-epochs=1", "--clients", "2")


def ended(number):
    """True if there is no process with this number any more, or only its exit status is left."""
    try:
        _name, _, state_and_more = Path(f"/proc/{number}/stat").read_text().rpartition(") ")
    except OSError:
        return True
    return state_and_more.startswith("Z")  # a zombie


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_or_killed_leaves_no_process(kind, tmp_path):
    """Stopped in its second round it ends at once, with the usual status and how to go on.

    The processes that simulate its clients end as well, even if it is killed.
    """
    process = start_in_terminal("protofl", "run", *TINY, "rounds=100000", f"out-dir={tmp_path}")
    said = ""
    while not re.search(r"round +2/", said):
        line = process.stdout.readline()
        assert line, said
        said += line
    # these simulate the run's clients
    children = [child.pid for child in psutil.Process(process.pid).children()]

    start_of_end = time.monotonic()
    process.send_signal(kind)
    rest, _ = process.communicate(timeout=120)

    assert process.returncode == (-kind if kind == signal.SIGKILL else 130), said + rest
    if kind != signal.SIGKILL:
        # seconds; one on a machine with nothing else to do
        assert time.monotonic() - start_of_end < 5
        (file,) = tmp_path.glob("*/resume.toml")
        resume = re.search(r"to go on: (.*)", rest)
        assert resume[1] == f"{program()} run --recipe {file}"
    wait_until(lambda: all(map(ended, children)), timeout=50)

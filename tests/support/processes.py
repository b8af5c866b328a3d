"""Real Flower processes for whole-system tests: private homes and ports, stopped by their id."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.commands import in_one_line

BIN = Path(sys.executable).parent
FLOWER = ("flower-supernode",)


def free_port() -> int:
    """Return a port nobody listens on, from 10,000 to 29,999.

    It is below those that the system hands out to connections (on Linux from 32768): the system's
    own choice can be taken by any connection before a process binds it.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a Flower process, and make the folder of its home.

    It has a private Flower home, no telemetry, and this virtual environment's commands.
    """
    home.mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
    }


def output_of(words: Sequence[str], env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Run a command, which must succeed in 15 minutes, and return what it prints.

    Without ``env`` it has this process's environment.
    """
    ended = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, f"{words}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def without_colours(printed: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", printed)


def wait_until(
    condition: Callable[[], Any],
    logs: Callable[[], str] = str,
    timeout: float = 240,
    pause: float = 0.2,
    started: subprocess.Popen[Any] | None = None,
) -> Any:
    """Wait for a condition, and return its value once that is true.

    AssertionError, with the logs, if it takes too long or the process ``started`` ends.
    """
    deadline = time.monotonic() + timeout
    while True:
        assert started is None or started.poll() is None, logs()
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, logs()
        time.sleep(pause)


@contextmanager
def repeated(action: Callable[[], object], seconds: float) -> Iterator[None]:
    """Do something again and again in a thread while the block runs, at first after a pause.

    The pause has so many seconds.
    """
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            action()

    repeating = threading.Thread(target=repeat)
    repeating.start()
    try:
        yield
    finally:
        over.set()
        repeating.join()


@contextmanager
def approving(folders: Mapping[str, Path], approve: Callable[[str, str], object]) -> Iterator[None]:
    """Let the operators of sites approve what waits for them, while the block lasts.

    ``folders``: site -> its state folder. ``approve(site, study's id)`` does what an operator does.
    """

    def approve_what_waits() -> None:
        for site, folder in folders.items():
            for file in (folder / "studies").glob("*.json"):
                if not json.loads(file.read_text())["decision"]:
                    approve(site, file.stem)

    with repeated(approve_what_waits, seconds=0.5):
        yield


def listens(port: int) -> bool:
    """True if a process accepts connections on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(port: int, started: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the process ``started`` listens on a port, for two minutes at most."""
    wait_until(lambda: listens(port), log.read_text, timeout=120, started=started)


@contextmanager
def process(
    command: list[str], env: dict[str, str], log: Path, cwd: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in the background during the block, in a group of its own.

    At the end it is asked to stop, with its children, and after 15 seconds it is killed.
    """
    with log.open("wb") as out:
        places = {"cwd": cwd, "env": env, "stdout": out, "stderr": out}
        started = subprocess.Popen(command, start_new_session=True, **places)
    try:
        yield started
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(started.pid, kind)
                started.wait(timeout=15)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def name_superlink(home: Path, port: int) -> None:
    """Let `flwr` with this home find the SuperLink on a port under the name ``here``."""
    (home / "config.toml").write_text(f"""[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:{port}"
insecure = true
""")


@contextmanager
def superlink(
    folder: Path, *options: str, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> Iterator[Connection]:
    """Run a SuperLink on loopback during the block, and yield how to reach it.

    ``options`` are further words of its command.
    """
    port = free_port()
    env = env or environment(folder / "home")
    name_superlink(Path(env["FLWR_HOME"]), port)
    command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--control-api-address", f"127.0.0.1:{free_port()}"]
    command += ["--disable-runtime-dependency-installation"]
    log = folder / "superlink.log"
    with process([*command, *options], env, log, cwd) as started:
        wait_for(port, started, log)
        yield Connection(port, env)


def supernode_command(program: Sequence[str], superlink_port: int, node_config: str) -> list[str]:
    command = [*program, "--insecure", "--superlink", f"127.0.0.1:{superlink_port}"]
    command += ["--host", "127.0.0.1", "--port", str(free_port())]
    return [*command, "--node-config", node_config]


@contextmanager
def supernode(
    connection: Connection,
    folder: Path,
    node_config: str,
    program: Sequence[str] = FLOWER,
    cwd: Path = ROOT,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a site's SuperNode during the block, with a Flower home and its log in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    command = supernode_command(program, connection.port, node_config)
    with process(command, environment(folder / "home"), folder / "supernode.log", cwd) as started:
        yield started


class Connection:
    """How to reach a SuperLink with ``flwr``."""

    def __init__(self, port: int, env: dict[str, str]) -> None:
        self.port = port
        self.env = env

    def _flwr(self, words: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Run ``flwr`` with these words to its end."""
        context = {"cwd": ROOT, "env": self.env, "timeout": timeout}
        return subprocess.run(["flwr", *words], capture_output=True, text=True, **context)

    def run(self, *options: str, timeout: float = 300, app: Path = ROOT) -> tuple[str, str]:
        """Do ``flwr run APP here --stream``; return its output, and the status of the last run.

        The status is ``refused`` if the SuperLink has no run.
        """
        done = self._flwr(["run", str(app), "here", "--stream", *options], timeout)
        output = without_colours(done.stdout + done.stderr)
        listed = self._flwr(["ls", "here", "--format", "json"], timeout=60)
        assert listed.returncode == 0, output + listed.stdout + listed.stderr
        runs = json.loads(listed.stdout)["runs"]
        return output, runs[0]["status"] if runs else "refused"

    def simulate(self, clients: int, config: Mapping[str, object], timeout: float = 600) -> str:
        """Run the app with so many simulated clients to its end, and return what it prints.

        The run must succeed.
        """
        federation = f"num-supernodes={clients} client-resources-num-cpus=1"
        options = ["--federation-config", federation, "--run-config", in_one_line(config)]
        output, status = self.run(*options, timeout=timeout)
        assert status == "finished:completed", output
        return output


def hear_ctrl_c() -> None:
    """Let Ctrl-C interrupt this process, as it does in a terminal.

    A shell lets its background jobs ignore SIGINT, and tests may run in one.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start_in_terminal(
    program: str, *words: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a program of this environment, as from a terminal; its output and errors are one."""
    return subprocess.Popen(
        [sys.executable, str(BIN / program), *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear_ctrl_c,
    )

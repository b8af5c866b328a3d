"""A federation of separate processes on this machine, whose parts can be killed one by one.

A SuperLink with a database, its worker (`flower-superexec`), and SuperNodes: the layout of
docker/README.md, without encryption. Every part is a process group of its own.
"""

import json
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from protofl_common.runs.folder import RunFolder
from server_app.run.checkpoint import Checkpoint
from tests.support import ROOT, processes
from tests.support.commands import in_one_line


class Standing:
    """The parts ``superlink``, ``worker`` and any sites, started and killed by name."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder = folder
        self.running = running
        self.port = processes.free_port()
        self.groups: dict[str, subprocess.Popen[bytes]] = {}
        self.env = processes.environment(folder / "home")
        processes.name_superlink(folder / "home", self.port)

    def start(self, part: str, command: list[str]) -> None:
        """Start a part in a process group of its own; its log is ``<part>-<number>.log``."""
        number = len(list(self.folder.glob(f"{part}-*.log")))
        env = processes.environment(self.folder / f"home-{part}") | {"OMP_NUM_THREADS": "1"}
        log = self.folder / f"{part}-{number}.log"
        self.groups[part] = self.running.enter_context(processes.process(command, env, log))

    def start_superlink(self) -> None:
        command = ["flower-superlink", "--insecure", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--isolation", "process"]
        command += ["--database", str(self.folder / "superlink.db")]
        self.start("superlink", command)
        self.wait(lambda: processes.listens(self.port), timeout=60)

    def start_worker(self, program: str = "flower-superexec") -> None:
        """Start the worker, which runs the server's half of each run."""
        address = f"127.0.0.1:{self.port}"
        command = [*program.split(), "--insecure", "--runtime-api-address", address]
        self.start("worker", command)

    def start_site(
        self,
        site: str,
        partition: int,
        partitions: int,
        state: Path | None = None,
        program: str = "flower-supernode",
        port: int = 0,
    ) -> None:
        """Start the SuperNode of a site that has partition ``partition`` of ``partitions``.

        Its state is kept in ``state``, or under the federation's folder. ``port`` is where it
        finds the SuperLink: a relay's, or 0 for the SuperLink's own.
        """
        state = state or self.folder / "state"
        facts = f'site-name="{site}" partition-id={partition} num-partitions={partitions}'
        facts += f' state-dir="{state}" cache-dir="{self.folder / "cache"}"'
        command = processes.supernode_command(program.split(), port or self.port, facts)
        self.start(site, command)

    def kill(self, part: str) -> None:
        """Send SIGKILL to all processes of a part, and wait until they are gone."""
        family = self.family(part)
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=20)
        self.groups.pop(part).wait(timeout=20)

    def family(self, part: str, named: str = "") -> list[psutil.Process]:
        """Return the processes of a part, descendants first.

        With ``named``, only those whose command line holds it. A part that has ended has none.
        """
        try:
            head = psutil.Process(self.groups[part].pid)
            family = [*head.children(recursive=True), head]
        except psutil.NoSuchProcess:
            return []
        return [member for member in family if named in _command_line(member)]

    def flwr(self, *arguments: str) -> str:
        """Run ``flwr``, and return what it prints without colours, whether it succeeds or not."""
        context = {"cwd": ROOT, "env": self.env, "timeout": 120}
        done = subprocess.run(["flwr", *arguments], capture_output=True, text=True, **context)
        return processes.without_colours(done.stdout + done.stderr)

    def submit(self, config: dict[str, Any]) -> None:
        """Start a small run, with its results under ``runs``, and come back at once."""
        settings = {
            "dataset": "digits",
            "partition": "iid",
            "models": "cnn4",
            "train-samples": 30,
            "test-samples": 30,
            "out-dir": str(self.folder / "runs"),
            "cache-dir": str(self.folder / "cache"),
            "local-epochs": 1,
            "threads": 1,
            **config,
        }
        output = self.flwr("run", ".", "here", "--run-config", in_one_line(settings))
        assert "Successfully started run" in output, output + self.logs()

    def runs(self) -> list[dict[str, Any]]:
        return list(json.loads(self.flwr("ls", "here", "--format", "json"))["runs"])

    def status(self) -> str:
        newest, *_ = self.runs()
        return str(newest["status"])

    def rows(self, run: str) -> list[dict[str, Any]]:
        """Return the rows of a run's metrics so far; a line that is being written is left out."""
        return RunFolder(self.folder / "runs" / run).rows()

    def wait(self, condition: Callable[[], Any], timeout: float = 240, pause: float = 0.1) -> Any:
        return processes.wait_until(condition, self.logs, timeout, pause)

    def wait_for_rounds(self, run: str, number: int, timeout: float = 240) -> None:
        """Wait until that many rounds of a run are in its checkpoint, not only among its rows."""
        self.wait(lambda: self.acknowledged(run) >= number, timeout, pause=0.05)

    def acknowledged(self, run: str) -> int:
        """Return how many rounds a run's newest checkpoint holds, 0 without one."""
        newest_first = RunFolder(self.folder / "runs" / run).checkpoints()
        return Checkpoint.read(newest_first[0]).round if newest_first else 0

    def wait_for_client(self, site: str) -> psutil.Process:
        """Wait for the client process that a site starts next, and return it."""
        before = set(self.clients(site))

        def started() -> set[psutil.Process]:
            return set(self.clients(site)) - before

        new: set[psutil.Process] = self.wait(started, pause=0.05)
        return new.pop()

    def wait_for_upload(self, run: str, site: str, number: int) -> None:
        """Wait until a site has trained in round ``number``, and is about to send its reply.

        A site writes its audit log before it replies.
        """
        log = self.folder / "state" / "sites" / site / "audit.jsonl"
        self.wait_for_rounds(run, number - 1)

        def is_in_log() -> bool:
            *whole_lines, _unfinished = log.read_text().split("\n")
            entries = [json.loads(line) for line in whole_lines]
            return any(
                entry.get("round") == number and entry.get("kind") == "train" for entry in entries
            )

        self.wait(is_in_log, pause=0.005)

    def clients(self, site: str) -> list[psutil.Process]:
        """Return a site's processes of client code.

        They are Flower's, or those that a process of `protofl site run` has forked from itself.
        """
        flowers = self.family(site, "flwr-clientapp")
        parents_and_forks = self.family(site, "client_process.py")
        forks = [member for member in parents_and_forks if _parent(member) in parents_and_forks]
        return flowers + forks

    def wait_for_end(self, timeout: float = 300) -> str:
        """Wait until the last run is over, and return its status."""
        self.wait(lambda: self.status().startswith("finished"), timeout, pause=1)
        return self.status()

    def printed(self) -> str:
        """Return what the server's half has printed in all runs, the oldest first."""
        oldest_first = reversed(self.runs())
        return "".join(self.flwr("log", run["run-id"], "here", "--show") for run in oldest_first)

    def logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-2500:]}" for log in logs)


def _command_line(member: psutil.Process) -> str:
    try:
        return " ".join(member.cmdline())
    except psutil.Error:
        return ""


def _parent(member: psutil.Process) -> psutil.Process | None:
    try:
        return member.parent()
    except psutil.NoSuchProcess:
        return None

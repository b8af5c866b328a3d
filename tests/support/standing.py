"""A federation that stands, as separate processes on this machine, and whose parts can be killed one by one.

A SuperLink with a database, its worker (`flower-superexec`), and SuperNodes: the layout of docker/README.md, without
encryption. Every part is a process group of its own.
"""

import json
import re
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from server_app.checkpoint import Checkpoint, checkpoints
from tests.support import ROOT, processes


class Standing:
    """The parts ``superlink``, ``worker`` and any sites, started and killed by name."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder, self.running = folder, running
        self.port = processes.free_port()
        self.groups: dict[str, subprocess.Popen[bytes]] = {}
        self.env = processes.environment(folder / "home")
        processes.name_superlink(folder / "home", self.port)

    def start(self, part: str, command: list[str]) -> None:
        """A part; its log is ``<part>-<number>.log``."""
        number = len(list(self.folder.glob(f"{part}-*.log")))
        env = processes.environment(self.folder / f"home-{part}") | {"OMP_NUM_THREADS": "1"}
        log = self.folder / f"{part}-{number}.log"
        self.groups[part] = self.running.enter_context(processes.process(command, env, log))

    def start_superlink(self) -> None:
        command = [
            "flower-superlink",
            "--insecure",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        command += ["--isolation", "process", "--database", str(self.folder / "superlink.db")]
        self.start("superlink", command)
        self.wait(lambda: processes.listens(self.port), timeout=60)

    def start_worker(self) -> None:
        """What runs the server's half of each run."""
        self.start(
            "worker",
            ["flower-superexec", "--insecure", "--runtime-api-address", f"127.0.0.1:{self.port}"],
        )

    def start_site(
        self,
        site: str,
        partition: int,
        partitions: int,
        state: Path | None = None,
        program: str = "flower-supernode",
    ) -> None:
        """A SuperNode; its state is kept in ``state``, or under the federation's folder."""
        facts = f'site-name="{site}" partition-id={partition} num-partitions={partitions}'
        facts += (
            f' state-dir="{state or self.folder / "state"}" cache-dir="{self.folder / "cache"}"'
        )
        self.start(site, processes.supernode_command(program.split(), self.port, facts))

    def kill(self, part: str) -> None:
        """SIGKILL for all processes of a part."""
        family = self.family(part)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, timeout=20)
        self.groups.pop(part).wait(timeout=20)

    def family(self, part: str, named: str = "") -> list[psutil.Process]:
        """The processes of a part, descendants first, whose command line holds ``named``."""
        try:
            head = psutil.Process(self.groups[part].pid)
            everybody = [*head.children(recursive=True), head]
        except psutil.NoSuchProcess:
            return []
        return [one for one in everybody if named in _command_line(one)]

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            ["flwr", *arguments],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)

    def submit(self, config: dict[str, Any]) -> None:
        """Start a run and come back at once; its settings are few and small, and its results under ``runs``."""
        small = {
            "dataset": "digits",
            "partition": "iid",
            "models": "cnn4",
            "train-samples": 30,
            "test-samples": 30,
        }
        places = {"out-dir": str(self.folder / "runs"), "cache-dir": str(self.folder / "cache")}
        values = {**small, **places, "local-epochs": 1, "threads": 1, **config}
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        output = self.flwr("run", ".", "here", "--run-config", text)
        assert "uccessfully started run" in output, output + self.logs()

    def runs(self) -> list[dict[str, Any]]:
        return list(json.loads(self.flwr("ls", "here", "--format", "json"))["runs"])

    def status(self) -> str:
        return str(self.runs()[0]["status"])

    def rows(self, run: str) -> list[dict[str, Any]]:
        """The run's metrics so far; a line that is being written is left out."""
        metrics = self.folder / "runs" / run / "metrics.jsonl"
        text = metrics.read_text() if metrics.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self, condition: Callable[[], Any], timeout: float = 240, pause: float = 0.1) -> Any:
        return processes.wait_until(condition, self.logs, timeout, pause)

    def wait_for_rounds(self, run: str, number: int) -> None:
        """Until a run has acknowledged that many rounds: they are in its checkpoint, not only among its rows."""
        self.wait(lambda: self.acknowledged(run) >= number, pause=0.05)

    def acknowledged(self, run: str) -> int:
        """How many rounds a run's newest checkpoint holds."""
        found = checkpoints(self.folder / "runs" / run)
        return Checkpoint.read(found[0]).round if found else 0

    def wait_for_client(self, site: str) -> psutil.Process:
        """The client process that a site starts next."""
        before = set(self.family(site, "flwr-clientapp"))
        new: set[psutil.Process] = self.wait(
            lambda: {*self.family(site, "flwr-clientapp")} - before, pause=0.05
        )
        return new.pop()

    def finished(self, timeout: float = 300) -> str:
        """The status of the last run once it is over."""
        self.wait(lambda: self.status().startswith("finished"), timeout, pause=1)
        return self.status()

    def printed(self) -> str:
        """What the server's half of all runs has printed."""
        return "".join(
            self.flwr("log", run["run-id"], "here", "--show") for run in reversed(self.runs())
        )

    def logs(self) -> str:
        return "\n".join(
            f"== {log.name}\n{log.read_text()[-2500:]}" for log in sorted(self.folder.glob("*.log"))
        )


def _command_line(one: psutil.Process) -> str:
    try:
        return " ".join(one.cmdline())
    except psutil.Error:
        return ""

"""A simulation on two Ray nodes of one machine, started from different folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protofl_common.tools.cli import main
from tests.system.processes import BIN, ROOT, free_port, process, wait_for

pytestmark = [pytest.mark.system, pytest.mark.long]
RUN = ("algo=fedtgp", "dataset=digits", "partition=iid", "models=cnn4", "train-samples=40", "test-samples=40")
ROUNDS, STOP = 12, 3


class Cluster:
    """A head with one processor and, until it is killed, a second node with another."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder, self.running, self.port = folder, running, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        self.env |= {"RAY_raylet_start_wait_time_s": "300", "PYTHONUNBUFFERED": "1"}
        head = ("--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={folder}/ray")
        started = self.start("head", *head, f"--ray-client-server-port={free_port()}")
        wait_for(self.port, started, folder / "head.log")
        self.wait_for("head")
        self.second = self.start("second", f"--address={self.address}")
        self.wait_for("second")

    def wait_for(self, name: str) -> None:
        """Until a node says that it has started."""
        deadline = time.monotonic() + 300
        while "Ray runtime started" not in (said := (self.folder / f"{name}.log").read_text()):
            assert time.monotonic() < deadline, said
            time.sleep(0.5)

    def start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """A node, in a folder of its own."""
        (self.folder / name).mkdir()
        command = [str(BIN / "ray"), "start", "--block", "--num-cpus=1", "--object-store-memory=100000000"]
        options = (*options, f"--dashboard-agent-listen-port={free_port()}", "--disable-usage-stats")
        log = self.folder / f"{name}.log"
        return self.running.enter_context(process([*command, *options], self.env, log, cwd=self.folder / name))

    def run(self, name: str, *options: str) -> subprocess.Popen[str]:
        """``protofl run`` with four clients."""
        command = [sys.executable, str(BIN / "protofl"), "run", *RUN, f"rounds={ROUNDS}", "--clients", "4", *options]
        folders = [f"out-dir={self.folder}/runs", f"cache-dir={self.folder}/cache", f"run-name={name}"]
        pipe, out = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen([*command, *folders], cwd=ROOT, env=self.env, stdout=pipe, stderr=out, text=True)

    def rows(self, name: str) -> list[dict[str, object]]:
        """The rounds' figures, without times and names of nodes."""
        text = (self.folder / "runs" / name / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        for row in rows:
            row.pop("seconds", None)
            for client in row.get("clients", {}).values():
                client.pop("seconds", None)
        return rows

    def prototypes(self, name: str) -> torch.Tensor:
        """Those that the clients sent last."""
        return load_file(self.folder / "runs" / name / "client-prototypes.safetensors")["means"]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """With a short path: Ray's sockets lie below it, and theirs may have 107 characters."""
    with ExitStack() as running:
        folder = tempfile.TemporaryDirectory(prefix="c-", dir="/tmp", ignore_cleanup_errors=True)
        yield Cluster(Path(running.enter_context(folder)), running)


def test_two_nodes_equal_one_and_one_that_is_lost_costs_nothing_after_resuming(cluster: Cluster) -> None:
    for name, options in (("two", ("--cluster", cluster.address)), ("alone", ())):
        started = cluster.run(name, *options)
        output, _ = started.communicate(timeout=900)
        assert started.returncode == 0, output
    assert cluster.rows("two") == cluster.rows("alone")

    lost = cluster.run("lost", "--cluster", cluster.address)
    checkpoints = cluster.folder / "runs" / "lost" / "checkpoints"
    while not (checkpoints / f"{STOP:06d}.safetensors").exists():
        assert lost.poll() is None, lost.communicate()[0]
        time.sleep(0.05)
    os.killpg(cluster.second.pid, signal.SIGKILL)
    output, _ = lost.communicate(timeout=900)
    assert lost.returncode == 1
    assert "a process that simulates clients has died" in output
    assert not (cluster.folder / "runs" / "lost" / "summary.json").exists()
    resumed = cluster.run("lost", "--cluster", cluster.address, "resume=true")
    output, _ = resumed.communicate(timeout=900)
    assert resumed.returncode == 0, output
    assert torch.equal(cluster.prototypes("lost"), cluster.prototypes("two"))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "somewhere"])
def test_a_cluster_that_is_not_there(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *RUN, "--cluster", address, f"out-dir={tmp_path}"]) == 1
    assert f"--cluster {address}: no Ray at this HOST:PORT" in capsys.readouterr().err

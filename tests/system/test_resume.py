"""kill -9 in the middle: for all of a simulated run, for the server of a deployed one; then ``resume=true``."""

import json
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.support import ROOT
from tests.support.processes import Connection, superlink
from tests.support.standing import Standing

pytestmark = pytest.mark.system
FOUR = ("--federation-config", "num-supernodes=4 client-resources-num-cpus=1")
ROUNDS, STOP = 10, 5


def settings(out: Path, name: str, more: str = "") -> tuple[str, ...]:
    data = 'dataset="digits" partition="iid" train-samples=40 test-samples=40 local-epochs=10 algo="fedtgp"'
    return *FOUR, "--run-config", f'{data} rounds={ROUNDS} out-dir="{out}" run-name="{name}" {more}'


def rounds_of(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def words(process: psutil.Process) -> list[str]:
    """Its command line; none where it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a zombie is one, to psutil
        return []


def kill_all(port: int) -> None:
    """SIGKILL for the SuperLink of a port and for all that it has started, Ray's processes too."""
    (head,) = (one for one in psutil.Process().children() if str(port) in words(one))
    family = [*head.children(recursive=True), head]
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family, timeout=30)


def start(connection: Connection, *options: str) -> subprocess.Popen[bytes]:
    """``flwr run``, not waited for: the run may be over before it returns."""
    quiet = subprocess.DEVNULL
    command = ["flwr", "run", ".", "here", *options]
    return subprocess.Popen(command, cwd=ROOT, env=connection.env, stdout=quiet, stderr=quiet)


@pytest.mark.long
def test_a_killed_simulation_resumed_equals_an_undisturbed_one(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    with superlink(tmp_path / "first", "--simulation") as connection:
        output, status = connection.run(*settings(tmp_path, "whole"))
        assert status == "finished:completed", output
        submission = start(connection, *settings(tmp_path, "stopped"))
        deadline = time.monotonic() + 240
        while rounds_of(stopped) < STOP:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        kill_all(connection.port)
        submission.wait(timeout=120)
    assert STOP <= rounds_of(stopped) < ROUNDS
    with superlink(tmp_path / "second", "--simulation") as connection:
        output, status = connection.run(*settings(tmp_path, "stopped", "resume=true lr=0.5"))
        assert status == "finished:failed"
        assert "lr = 0.5: the run has lr = 0.05" in output
        output, status = connection.run(*settings(tmp_path, "stopped", "resume=true"))
        assert status == "finished:completed", output
    (after,) = json.loads((stopped / "summary.json").read_text())["resumed-after-rounds"]
    assert f"resuming stopped after round {after} of {ROUNDS}" in output
    assert STOP - 1 <= after < ROUNDS
    found, wanted = (load_file(tmp_path / name / "prototypes.safetensors") for name in ("stopped", "whole"))
    assert torch.equal(found["means"], wanted["means"])
    assert torch.equal(found["labels"], wanted["labels"])


def test_a_deployed_run_outlives_its_superlink_and_is_resumed_after_its_server(tmp_path: Path) -> None:
    with ExitStack() as running:
        standing = Standing(tmp_path, running)
        standing.start_superlink()
        standing.start_worker()
        for index, site in enumerate(("north", "south")):
            standing.start_site(site, index, 2)
        config = {"rounds": 4, "run-name": "stopped", "num-clients": 2}
        standing.submit(config)
        standing.wait_for_rounds("stopped", 1)
        standing.kill("superlink")
        standing.start_superlink()
        standing.wait_for_rounds("stopped", 2)
        standing.kill("worker")
        standing.start_worker()
        standing.submit(config | {"resume": True})
        assert standing.finished() == "finished:completed", standing.logs()
        summary = json.loads((tmp_path / "runs" / "stopped" / "summary.json").read_text())
        assert summary["resumed-after-rounds"] in ([2], [3])
        assert sum(summary["trouble"].values()) == 0, standing.printed()

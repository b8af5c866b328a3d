"""``protofl run --cluster``: two Ray nodes with folders of their own, and one of them is killed."""

import json
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from protofl_common.experiment.settings import default_run_config
from protofl_common.simulation.grid import simulate
from tests.support import ROOT
from tests.support.harness import CACHE
from tests.support.processes import BIN, environment, free_port, process, wait_until
from tests.support.results import left_by

pytestmark = pytest.mark.system
CLIENTS = 4


@contextmanager
def ray_node(folder, *options):
    """Run a Ray node for one client at a time during the block; all its files are in ``folder``."""
    copies = folder / "copies"
    copies.mkdir(parents=True)
    env = environment(folder / "home") | {"TMPDIR": str(copies), "RAY_USAGE_STATS_ENABLED": "0"}
    log = folder / "log"
    command = [str(BIN / "ray"), "start", "--block", "--num-cpus=1", *options]
    command += ["--object-store-memory=100000000"]
    # else workers have ports of a range, in which the head's own may lie, and Ray refuses that
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    with process(command, env, log) as started:
        wait_until(lambda: "Ray runtime started" in log.read_text(), log.read_text, started=started)
        yield started


def kill_at_once(started):
    """Kill a node as a power cut would: all of its processes, without a signal to end."""
    parent = psutil.Process(started.pid)
    for one in [*parent.children(recursive=True), parent]:
        one.kill()


def test_a_killed_node_changes_no_bit_of_what_one_machine_computes(short, tmp_path):
    """One of two nodes is killed after round 1, and the run leaves what one process leaves."""
    settings = {"algo": "fedproto", "models": "mlp-1", "rounds": 3, "run-name": "mine"}
    settings |= {"dataset": "digits", "partition": "iid", "report": False, **CACHE}
    config = default_run_config() | settings
    one = simulate(config | {"out-dir": str(tmp_path / "one")}, CLIENTS, lambda event: None)

    port = free_port()
    address = f"127.0.0.1:{port}"
    settings["out-dir"] = str(tmp_path / "two")
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, str(BIN / "protofl"), "run", *words, "--cluster", address, "--json"]
    command += ["--clients", str(CLIENTS)]
    head = ("--head", f"--port={port}", f"--temp-dir={short}/ray", "--include-dashboard=false")
    with (
        ray_node(tmp_path / "first", *head),
        ray_node(tmp_path / "second", f"--address={address}") as second,
    ):
        run = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        events = []
        for line in run.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] == "RoundDone" and events[-1]["row"]["round"] == 1:
                kill_at_once(second)
        errors = run.stderr.read()
        assert run.wait() == 0, errors
        # a node keeps no copies of the clients' folders
        assert list((tmp_path / "first" / "copies").glob("protofl-*/*/*")) == []

    said = "\n".join(event.get("text", "") for event in events)
    assert "nodes: 2 · clients at a time: 2" in said
    assert "processes left: 1 on" in said
    assert left_by(tmp_path / "two" / "mine") == left_by(one)

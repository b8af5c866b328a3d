"""Several processes on one table, killed and started again, leave what one undisturbed leaves."""

import signal
import subprocess
import sys
import time

import pytest

from tests.support import ROOT
from tests.support.processes import BIN, wait_until
from tests.support.results import digests

pytestmark = pytest.mark.system
TABLE = """
title: Shards
seeds: [1, 2]
settings:
  {dataset: digits, partition: iid, total-samples: 100, rounds: 5, models: cnn4, report: false}
columns: {two clients: {clients: 2}}
rows: {FedProto: {settings: {algo: fedproto}}, Local: {settings: {algo: local}}}
against: Local
"""


def start_table(folder, *words):
    """Start `protofl table` on `TABLE`, with results in ``folder``; its clients die with it."""
    file = folder / "mine.yaml"
    file.write_text(TABLE, encoding="utf-8")
    command = [sys.executable, str(BIN / "protofl"), "table", str(file), "--out", str(folder)]
    command += words
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_within_a_run(process, folder):
    """Kill the process once it has stored a checkpoint of a run that is not finished."""
    start = time.time()

    def is_within():
        for file in folder.glob("runs/*/checkpoints/00000[1-9].safetensors"):
            is_finished = (file.parents[1] / "summary.json").exists()
            if file.stat().st_mtime >= start and not is_finished:
                return True
        return False

    wait_until(is_within, timeout=600, pause=0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it had ended"
    cut = [run for run in folder.glob("runs/*") if not (run / "summary.json").exists()]
    assert cut, "no run was cut"


def files_of(folder):
    """Return the table's files by name, without costs: seconds differ from run to run."""
    files = {file.name: file.read_bytes() for file in folder.glob("mine.*")}
    assert b"\\bottomrule" in files.pop("mine.costs.tex")
    files["mine.md"], costs, _ = files["mine.md"].partition(b"## What it costs")  # it comes last
    assert costs
    return files


def test_a_sharded_table_that_is_killed_twice_equals_an_undisturbed_one(tmp_path):
    """Two processes make one half of the runs each; the first is killed twice before.

    A last process finds all runs made, and writes the same files.
    """
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    undisturbed = start_table(whole)
    for _ in range(2):
        kill_within_a_run(start_table(parts, "--shard", "1/2"), parts)
    jobs = [start_table(parts, "--shard", shard) for shard in ("1/2", "2/2")]
    for process in (undisturbed, *jobs):
        assert process.wait(600) == 0
    assert len(list((parts / "runs").glob("*/summary.json"))) == 4  # two rows with two seeds
    kinds = ("yaml", "md", "tex", "against.tex", "csv", "json")
    assert set(files_of(whole)) == {f"mine.{kind}" for kind in kinds}
    assert files_of(parts) == files_of(whole), "the last one that ends knows all runs"
    for run in whole.glob("runs/*"):
        assert digests(parts / "runs" / run.name) == digests(run)
    assert start_table(parts).wait(600) == 0
    assert files_of(parts) == files_of(whole)

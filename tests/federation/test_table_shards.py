"""Several processes on one table: killed and started again, they leave what one undisturbed process leaves."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from protofl_common.tools.cli import main
from protofl_common.tools.cli.arguments import ROOT

TABLE = """
title: Shards
seeds: [1, 2]
settings: {dataset: digits, partition: iid, total-samples: 100, rounds: 5, models: cnn4, report: false}
columns: {two clients: {clients: 2}}
rows: {Local: {settings: {algo: local}}, FedProto: {settings: {algo: fedproto}}}
against: Local
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")


def table(folder: Path, *words: str) -> BaseProcess:
    """`protofl table` in a forked process, which has PyTorch imported. Its clients die with it."""
    (folder / "mine.yaml").write_text(TABLE, encoding="utf-8")
    arguments = ["table", str(folder / "mine.yaml"), "--out", str(folder), *words]
    process = get_context("fork").Process(target=lambda: os._exit(main(arguments)))
    process.start()
    return process


def kill_within_a_run(process: BaseProcess, folder: Path) -> None:
    """Kill it once it has added a checkpoint to a run that is not finished."""
    start, deadline = time.time(), time.monotonic() + 600
    while time.monotonic() < deadline:
        new = [file for file in folder.glob("runs/*/checkpoints/*") if file.stat().st_mtime >= start]
        if any(not (file.parents[1] / "summary.json").exists() for file in new):
            break
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it had ended"
    assert any(not (run / "summary.json").exists() for run in folder.glob("runs/*")), "no run was cut"


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("mine.*")}


@linux
def test_a_sharded_table_that_is_killed_twice_equals_an_undisturbed_one(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    undisturbed = table(whole)
    for _ in range(2):
        kill_within_a_run(table(parts, "--shard", "1/2"), parts)
    jobs = [table(parts, "--shard", shard) for shard in ("1/2", "2/2")]
    for process in (undisturbed, *jobs):
        process.join(600)
        assert process.exitcode == 0
    assert len(list((parts / "runs").glob("*/summary.json"))) == 4
    assert set(files_of(whole)) == {f"mine.{kind}" for kind in ("yaml", "md", "tex", "csv", "long.csv", "json")}
    assert files_of(parts) == files_of(whole), "the last one that ends knows all runs"
    last = table(parts)
    last.join(600)
    assert (last.exitcode, files_of(parts)) == (0, files_of(whole))


@pytest.mark.parametrize("shard", ["0/4", "5/4", "2", "a/b", "1/2/3"])
def test_a_wrong_shard_is_named(shard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(TABLE, encoding="utf-8")
    assert main(["table", str(tmp_path / "mine.yaml"), "--shard", shard]) == 1
    assert f"--shard {shard!r}: must be I/N with I from 1 to N" in capsys.readouterr().err


def test_a_job_of_slurms_array_has_its_shard(tmp_path: Path) -> None:
    (tmp_path / "protofl").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "protofl").chmod(0o755)
    slurm = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "16"}
    script = ["bash", str(ROOT / "configs" / "slurm-table.sh"), "my table.yaml", "--out", "/shared"]
    started = subprocess.run(script, env=slurm, capture_output=True, text=True, check=True)
    assert started.stdout == "table my table.yaml --out /shared --shard 3/16\n"

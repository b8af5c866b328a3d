"""Which runs of a table a job makes: ``--shard``, and a job of Slurm's array."""

import subprocess
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
"""


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

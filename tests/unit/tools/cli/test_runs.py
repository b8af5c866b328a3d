"""``protofl runs``: what it lists."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from protofl_common.tools.cli import main
from tests.support.commands import told
from tests.support.fakes import write_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs: of today, running; of yesterday, stopped; of 10 and of 20 days ago, finished."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, days in (("running", 0), ("stopped", 1), ("newer", 10), ("older", 20)):
        folder = tmp_path / "runs" / name
        settings = {"algo": "local", "dataset": "digits", "partition": "iid", "seed": days}
        write_run(folder, settings, [{"0": {"head": 0.25 + days / 100}}] * 3)
        (folder / "settings.toml").write_text(f'algo = "local"\ndataset = "digits"\nseed = {days}\nrounds = 2\n')
        for part in ("clients/site-0", "checkpoints"):
            (folder / part).mkdir(parents=True)
            (folder / part / "1.bin").write_bytes(bytes(1000))
        if name in ("running", "stopped"):
            (folder / "summary.json").unlink()
        then = time.time() - days * 86400
        os.utime(folder / "metrics.jsonl", (then, then))
    return tmp_path / "runs"


@pytest.fixture
def at_work(runs: Path) -> Iterator[None]:
    with FileLock(runs / ".running.lock"):
        yield


def test_the_list(runs: Path, at_work: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = {run["name"]: run for run in told(capsys, "runs")["runs"]}
    assert list(found) == ["running", "stopped", "newer", "older"]
    assert [run["state"] for run in found.values()] == ["running", "stopped", "finished", "finished"]
    older = found["older"]
    wanted = {"algorithm": "local", "dataset": "digits", "seed": 20, "rounds": 2, "wanted": 2, "final": "head 45.00"}
    assert wanted.items() <= older.items()
    assert older["best"] == "head 45.00 @1 (chosen on test data)"
    assert older["bytes"] == sum(file.stat().st_size for file in (runs / "older").rglob("*") if file.is_file())
    assert round(older["days"]) == 20
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert "head 45.00 @1*" in out
    assert "local · digits · seed 20" in out
    assert "* chosen on test data, and so too good." in out


def test_a_folder_that_is_not_there_is_said(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "nowhere"]) == 1
    assert "nowhere: no such folder; runs are in runs unless out-dir says otherwise" in capsys.readouterr().err

"""``protofl runs``: what it lists, what it removes and what it never does."""

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


def heavy(runs: Path) -> dict[str, list[str]]:
    """What each run has left of what is large."""
    names = ("clients", "checkpoints")
    return {folder.name: [name for name in names if (folder / name).exists()] for folder in sorted(runs.glob("[!.]*"))}


BOTH = ["clients", "checkpoints"]


def test_the_list(runs: Path, at_work: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = {run["name"]: run for run in told(capsys, "runs")["runs"]}
    assert list(found) == ["running", "stopped", "newer", "older"]
    assert [run["state"] for run in found.values()] == ["running", "stopped", "finished", "finished"]
    older = found["older"]
    assert (older["algorithm"], older["dataset"], older["seed"], older["rounds"], older["wanted"]) == (
        *("local", "digits", 20, 2, 2),
    )
    assert older["final"] == "head 45.00"
    assert older["best"] == "head 45.00 @1 (chosen on test data)"
    assert older["bytes"] == sum(file.stat().st_size for file in (runs / "older").rglob("*") if file.is_file())
    assert round(older["days"]) == 20
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert "head 45.00 @1*" in out
    assert "local · digits · seed 20" in out
    assert "* chosen on test data, and so too good." in out


@pytest.mark.parametrize(
    ("rule", "pruned"),
    [
        (["--keep-last", "0"], {"newer", "older"}),
        (["--keep-last", "3"], {"older"}),
        (["--older-than", "15"], {"older"}),
        (["--older-than", "15", "--keep-last", "4"], set()),
    ],
)
def test_pruning_leaves_the_figures_and_every_run_that_may_go_on(
    rule: list[str], pruned: set[str], runs: Path, at_work: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "runs", "--prune", "--yes", *rule)["freed"] == 2000 * len(pruned)
    assert heavy(runs) == {name: [] if name in pruned else BOTH for name in ("newer", "older", "running", "stopped")}
    assert (runs / "older" / "summary.json").exists()


def test_whole_runs_go_only_where_that_is_said(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--prune", "--keep-last", "3", "--whole", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "older: the whole run, " in out
    assert "1 of 4 runs, " in out
    assert set(heavy(runs)) == {"newer", "running", "stopped"}


def test_a_finished_run_that_somebody_is_at_work_on_stays(runs: Path) -> None:
    with FileLock(runs / ".older.lock"):
        assert main(["runs", "--prune", "--older-than", "15", "--whole", "--yes"]) == 0
    assert heavy(runs)["older"] == BOTH


def test_nothing_is_removed_through_a_link(runs: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (runs / "older").rename(elsewhere)
    (runs / "older").symlink_to(elsewhere)
    (tmp_path / "models").mkdir()
    (runs / "newer" / "clients").rename(tmp_path / "models" / "clients")
    (runs / "newer" / "clients").symlink_to(tmp_path / "models" / "clients")
    for whole in ([], ["--whole"]):
        assert main(["runs", "--prune", "--keep-last", "0", "--yes", *whole]) == 0
        assert (elsewhere / "clients" / "site-0" / "1.bin").exists()
        assert (tmp_path / "models" / "clients" / "site-0" / "1.bin").exists()
    assert not (runs / "newer").exists()


@pytest.mark.parametrize(("answer", "left"), [("n\n", BOTH), ("", BOTH), ("y\n", [])])
def test_it_asks(
    answer: str, left: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return answer

    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["runs", "--prune", "--older-than", "15"]) == 0
    assert (
        capsys.readouterr().out.splitlines()
        == ["older: clients/ and checkpoints/, 2.0 kB", "1 of 4 runs, 2.0 kB to free", "Remove this? [y/N] "]
        or not answer.strip()
    )
    assert heavy(runs)["older"] == left


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prune"], "--prune: which runs? Give --keep-last N, --older-than DAYS, or both"),
        (["--keep-last", "2"], "say how to prune: give --prune, too"),
        (["--prune", "--keep-last", "-1"], "must be at least 0"),
        (["nowhere"], "nowhere: no such folder; runs are in runs unless out-dir says otherwise"),
        (["--prune", "--keep-last", "0"], "--prune: nobody can be asked here; --yes agrees"),
    ],
)
def test_what_cannot_work_is_said(words: list[str], said: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", *words]) == 1
    assert said in capsys.readouterr().err
    assert heavy(runs)["older"] == BOTH

"""The engine in this process: the same figures however many processes work, clear ends, nothing left running."""

from __future__ import annotations

import json
import os
import signal
import sys
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from client_app.app import Visit
from protofl_common.tools import local
from protofl_common.tools.cli.flower import here, is_local
from tests.bench.golden import tensors_of
from tests.harness import run_config
from tests.test_federation import without_times

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Any:
    yield
    for process in active_children():
        process.kill()
    local.pool.cache_clear()


def results(folder: Path, workers: int, **changes: Any) -> Any:
    """The rows of a run, without times, and a digest of each tensor that it leaves."""
    config = run_config(folder, **{"dataset": "digits", "partition": "iid", "run_name": "mine"} | changes)
    assert local.simulate(config, 3, lambda line: None, workers) == folder / "runs/mine"
    rows = [json.loads(line) for line in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    return without_times(rows), tensors_of(folder / "runs/mine")


@linux
@pytest.mark.parametrize("algo", ["fedproto", "fedtgp", "fedavg"])
def test_figures_do_not_depend_on_the_number_of_processes(algo: str, tmp_path: Path) -> None:
    alone, divided = (results(tmp_path / str(n), n, algo=algo, models="cnn4") for n in (1, 2))
    assert len(alone[0]) == 3
    assert alone[1]
    assert alone == divided


@linux
def test_a_process_that_dies_ends_the_run_and_it_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = Visit.fit

    def dying(visit: Visit) -> dict[str, float]:
        if visit.client.node.partition == 1 and visit.message.metadata.group_id == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        return fit(visit)

    whole = results(tmp_path / "whole", 2, algo="fedproto", models="cnn4")
    for process in active_children():
        process.kill()
    local.pool.cache_clear()
    changes: dict[str, Any] = {"algo": "fedproto", "models": "cnn4", "dataset": "digits", "partition": "iid"}
    config = run_config(tmp_path / "cut", run_name="mine", **changes)
    monkeypatch.setattr(Visit, "fit", dying)
    with pytest.raises(OSError, match="a process that simulates clients has died"):
        local.simulate(config, 3, lambda line: None, 2)
    monkeypatch.undo()
    assert results(tmp_path / "cut", 2, **changes, resume=True) == whole


@linux
def test_the_processes_are_there_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forked while this process has no thread that draws on the screen."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert local.workers_for(2) == 2
    assert len(active_children()) == 2
    assert local.workers_for(8) == 1


def test_an_error_of_ones_own_code_shows_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("mine")

    lines: list[str] = []
    monkeypatch.setattr("server_app.strategies.fedproto.FedProto.merge", broken)
    ended = here(run_config(tmp_path, dataset="digits", partition="iid"), {"num-supernodes": 1}, lines.append)
    assert (ended.well, ended.reason) == (False, "failed: ZeroDivisionError: mine")
    assert any("in broken" in line for line in lines)


def test_a_wrong_setting_is_the_reason(tmp_path: Path) -> None:
    ended = here(run_config(tmp_path, rounds=0), {"num-supernodes": 1}, lambda line: None)
    assert ended.reason == "rounds = 0: must be a number at least 1"


def test_who_shares_a_gpu_is_simulated_by_flower() -> None:
    assert is_local("auto", {"num-supernodes": 2})
    assert not is_local("auto", {"num-supernodes": 2, "client-resources-num-gpus": 0.5})
    assert is_local("local", {"num-supernodes": 2, "client-resources-num-gpus": 0.5})
    assert not is_local("flower", {"num-supernodes": 2})

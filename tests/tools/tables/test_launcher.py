"""One SuperLink for all runs of a table: kept, replaced when it has died, stopped at the end; a log per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.tools.cli.flower import Ended
from protofl_common.tools.tables import execute
from protofl_common.tools.tables.plan import Run


class FakeSuperLink:
    made: list[FakeSuperLink]

    def __init__(self) -> None:
        self.alive, self.stopped = True, False
        self.made.append(self)

    def __enter__(self) -> FakeSuperLink:
        return self

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    seen: list[list[str]] = []

    def follow(command: list[str], superlink: FakeSuperLink, on_line: Callable[[str], None]) -> Ended:
        assert superlink.alive
        seen.append(command)
        on_line("round  7/20  loss 1.0")
        failed = "seed=3" in command[-1]
        return Ended("finished:failed" if failed else "finished:completed", ("protofl: this run cannot go on", "why"))

    FakeSuperLink.made = []
    monkeypatch.setattr(execute, "SuperLink", FakeSuperLink)
    monkeypatch.setattr(execute, "follow", follow)
    return seen


def a_run(seed: int) -> Run:
    config = {"seed": seed}
    return Run(f"run-{seed}", config, {"num-supernodes": 2}, Settings.from_run_config(default_run_config() | config))


def test_one_superlink_serves_all_runs(tmp_path: Path, commands: list[list[str]]) -> None:
    rounds: list[int] = []
    resources = {"client-resources-num-cpus": 2}
    with execute.launcher(lambda federation: federation | resources, "flower") as launch:
        assert FakeSuperLink.made == []
        assert launch(a_run(1), tmp_path / "runs", False, rounds.append) == ""
        assert launch(a_run(2), tmp_path / "runs", True, rounds.append) == ""
        assert len(FakeSuperLink.made) == 1
        FakeSuperLink.made[0].alive = False
        assert launch(a_run(3), tmp_path / "runs", False, rounds.append) == "why"
        assert len(FakeSuperLink.made) == 2
    assert all(superlink.stopped for superlink in FakeSuperLink.made)
    assert rounds == [7, 7, 7]
    assert commands[0][-3:] == [
        "num-supernodes=2 client-resources-num-cpus=2",
        "--run-config",
        f'seed=1 out-dir="{tmp_path}/runs" run-name="run-1"',
    ]
    assert commands[1][-1].endswith('run-name="run-2" resume=true')
    log = (tmp_path / "logs" / "run-1.log").read_text(encoding="utf-8").splitlines()
    assert log[0].startswith("$ flwr run ")
    assert log[1] == "round  7/20  loss 1.0"


def test_the_superlink_stops_when_a_run_is_interrupted(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Ended:
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "follow", interrupted)
    with pytest.raises(KeyboardInterrupt), execute.launcher(dict, "flower") as launch:
        launch(a_run(1), tmp_path / "runs", False, print)
    assert [superlink.stopped for superlink in FakeSuperLink.made] == [True]

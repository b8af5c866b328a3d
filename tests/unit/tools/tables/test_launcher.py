"""How a table makes a run: its settings, its rounds as they end, a log."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.tools import local
from protofl_common.tools.tables import execute
from protofl_common.tools.tables.plan import Run


def a_run(seed: int) -> Run:
    config = {"seed": seed}
    return Run(f"run-{seed}", config, {"num-supernodes": 2}, Settings.from_run_config(default_run_config() | config))


def test_each_run_has_its_settings_and_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def attempt(config: Any, federation: Any, on_line: Callable[[str], None]) -> tuple[Path | None, str]:
        seen.append((config, federation))
        on_line("round  7/20  loss 1.0")
        return (None, "why") if config["seed"] == 3 else (tmp_path, "")

    monkeypatch.setattr(local, "attempt", attempt)
    rounds: list[int] = []
    launch = execute.launcher(lambda federation: federation | {"client-resources-num-cpus": 2})
    assert launch(a_run(1), tmp_path / "runs", False, rounds.append) == ""
    assert launch(a_run(2), tmp_path / "runs", True, rounds.append) == ""
    assert launch(a_run(3), tmp_path / "runs", False, rounds.append) == "why"
    assert rounds == [7, 7, 7]
    first = default_run_config() | {"seed": 1, "out-dir": f"{tmp_path}/runs", "run-name": "run-1"}
    assert seen[0] == (first, {"num-supernodes": 2, "client-resources-num-cpus": 2})
    assert seen[1][0]["resume"] is True
    assert (tmp_path / "logs" / "run-1.log").read_text(encoding="utf-8") == "round  7/20  loss 1.0\n"

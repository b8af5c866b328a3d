"""A validation part in whole runs: its figures beside those of test data, and who chooses by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protofl_common.metrics import over_clients
from protofl_common.report.page import page
from protofl_common.report.reading import read_run
from tests.harness import run_config, run_federation

SMALL: dict[str, Any] = {"models": "mnist-cnn", "train_samples": 20, "test_samples": 20}


@pytest.mark.parametrize("algo", ["fedproto", "fedrep"])
def test_validation_figures_stand_beside_those_of_test_data(
    algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"algo": algo, "validation_fraction": 0.3, "metrics": "auc", "tensorboard": True}
    outcome = run_federation(run_config(tmp_path, **SMALL, **more), clients=3)
    assert not any(outcome.summary["trouble"].values())
    for row in outcome.rows:
        assert set(row["validation"]) == {*row["accuracy"], *row["metrics"]}
        for name, figures in row["validation"].items():
            values = [client["validation"][name] for client in row["clients"].values()]
            assert figures == pytest.approx(over_clients(values, [6, 6, 6]))
        assert {(one["train-samples"], one["validation-samples"]) for one in row["clients"].values()} == {(14, 6)}
    assert outcome.summary["validation"] == outcome.rows[-1]["validation"]
    assert {best["chosen-on"] for best in outcome.summary["best-accuracy"].values()} == {"validation"}
    said = capsys.readouterr().out
    assert "2,500 found · 42 for training (train-samples = 20 a client) · 18 for validation · 60 for testing" in said
    for text in ("chosen on validation data", "head, validation", "validation head "):
        assert text in said
    shown = page(read_run(outcome.folder))
    assert "chosen on validation data" in shown
    assert "mean on validation data" in shown
    assert "<td>head, validation</td>" in shown


def test_without_a_validation_part_everything_best_says_that_it_was_chosen_on_test_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_federation(run_config(tmp_path, **SMALL), clients=2)
    assert {best["chosen-on"] for best in outcome.summary["best-accuracy"].values()} == {"test"}
    assert not any("validation" in row for row in outcome.rows)
    for shown in (capsys.readouterr().out, page(read_run(outcome.folder))):
        assert "chosen on test data" in shown


def test_clients_too_small_for_validation_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Others have a part of their own; figures on validation data are over those."""
    rows = ["label,split,x", *(f"{i % 2},train,{i}" for i in range(8)), "0,test,1", "1,test,2"]
    for site in ("north", "south"):
        more = ["1,validation,3", "0,validation,4"] if site == "north" else []
        (tmp_path / f"{site}.csv").write_text("\n".join([*rows, *more]))
    nodes = {
        number: {"site-name": site, "data-dir": str(tmp_path / f"{site}.csv")}
        for number, site in enumerate(("north", "south"))
    }
    own = {"dataset": "arrays", "partition": "own", "test_from": "official-own", "models": "table3", "num_clients": 2}
    outcome = run_federation(run_config(tmp_path, **own, classes="0,1", rounds=1), nodes=nodes)
    said = capsys.readouterr().out
    assert "22 found · 16 for training (train-samples = 30 a client) · 2 for validation · 4 for testing · none" in said
    assert "or without any marked, so that all stay for training: south" in said
    final = outcome.rows[-1]
    assert "validation" not in final["clients"]["south"]
    assert final["validation"]["head"]["mean"] == final["clients"]["north"]["validation"]["head"]
    assert outcome.summary["best-accuracy"]["head"]["chosen-on"] == "validation"

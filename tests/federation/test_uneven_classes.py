"""Balanced accuracy stands beside accuracy by itself where simulated clients divide uneven classes, and only there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofl_common.report import charts
from protofl_common.report.page import page
from protofl_common.report.reading import RecordedRun
from tests.support.given import Patch, Printed
from tests.support.harness import Outcome, run_config, run_federation

UNASKED = {"prototype/balanced-accuracy", "head/balanced-accuracy"}


def run(folder: Path, counts: tuple[int, int], nodes: dict[int, dict[str, Any]] | None = None, **more: Any) -> Outcome:
    labels, file = np.repeat([0, 1], counts), folder / "data.npz"
    np.savez(file, inputs=np.random.default_rng(0).normal(size=(len(labels), 4)), labels=labels)
    data = {"dataset": "arrays", "data_dir": str(file), "classes": "a,b", "partition": "iid", "models": "mlp-1"}
    return run_federation(run_config(folder, algo="fedproto", rounds=1, **data | more), 3, nodes=nodes)


def test_it_stands_in_files_on_the_screen_and_on_the_page(tmp_path: Path, capsys: Printed, monkeypatch: Patch) -> None:
    monkeypatch.setattr("protofl_common.report.page.FIGURES", {"Metrics": (charts.metrics,)})  # all take seconds
    outcome = run(tmp_path, (130, 60))
    assert set(outcome.summary["metrics"]) == UNASKED
    by_client = [client["metrics"]["head/balanced-accuracy"] for client in outcome.rows[-1]["clients"].values()]
    assert outcome.summary["metrics"]["head/balanced-accuracy"]["mean"] == pytest.approx(np.mean(by_client))
    assert "head/balanced-accuracy" in capsys.readouterr().out
    assert "head/balanced-accuracy" in page(RecordedRun(outcome.folder))


@pytest.mark.parametrize(
    ("counts", "settings"), [((120, 60), {}), ((130, 60), {"secagg": True}), ((130, 60), {"dp": "sample"})]
)
def test_nor_where_they_are_even_or_hidden(counts: tuple[int, int], settings: dict[str, Any], tmp_path: Path) -> None:
    assert not run(tmp_path, counts, **settings).summary["metrics"]


def test_no_site_with_an_operator_sends_it_unasked(tmp_path: Path) -> None:
    own = {"dataset": "arrays", "data-dir": str(tmp_path / "data.npz"), "classes": "a,b"}
    nodes = {1000 + n: {"site-name": f"site-{n}", "arch": "mlp-1", **own} for n in range(2)}
    assert not run(tmp_path, (130, 60), nodes, partition="own", num_clients=2).summary["metrics"]

"""Metrics beside accuracy: by hand, of clients with few classes, and all the way to a run's files."""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allow
from protofl_common.runs.evaluation_metrics import declared_metrics, evaluate_metrics, metric_names
from protofl_common.tools.tables.figure import Figure
from tests.support.harness import run_config, run_federation

SCORES = np.array([[3.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 2.0, 1.0], [2.0, 1.0, 0.0]])
LABELS = np.array([0, 0, 1, 1])
"""Predicted 0, 0, 1, 0: class 0 has recall 1 and precision 2/3, class 1 recall 1/2 and precision 1; nobody is of 2."""


def test_by_hand() -> None:
    found = evaluate_metrics(["balanced-accuracy", "macro-f1", "auc", "recall"], SCORES, LABELS)
    assert found.pop("balanced-accuracy") == pytest.approx(3 / 4)
    assert found.pop("macro-f1") == pytest.approx((4 / 5 + 2 / 3) / 2)
    auc_of_0 = (2 + 1.5) / 4  # pairs (class 0, class 1) in which class 0's score is larger, a tie counts half
    auc_of_1 = (2 + 1) / 4  # 2 beats 1 and 1, 1 ties with both
    assert found.pop("auc") == pytest.approx((auc_of_0 + auc_of_1) / 2)
    assert found == {"recall/0": 1.0, "recall/1": 0.5}


def test_what_a_report_may_hold_and_the_choices() -> None:
    wanted = {f"{kind}/{name}" for kind in ("head", "prototype") for name in ("auc", "recall/0", "recall/1")}
    assert declared_metrics(["auc", "recall"], 2) == wanted
    with pytest.raises(SettingsError, match="metrics = 'auc, f1': 'f1' is not one of balanced-accuracy, macro-f1, auc"):
        metric_names("auc, f1")


def test_a_client_of_one_class_or_none_has_no_figure_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mine")
    exec("def certain(scores, labels): return float('nan')", vars(module))
    monkeypatch.setitem(sys.modules, "mine", module)
    allow(["mine"])
    assert evaluate_metrics(["mine:certain", "auc"], SCORES[:2], LABELS[:2]) == {"auc": 0.5}
    assert evaluate_metrics(["auc", "recall"], SCORES[:0], LABELS[:0]) == {}


@pytest.mark.slow
def test_metrics_reach_rows_summary_and_tables(tmp_path: Path) -> None:
    config = run_config(tmp_path, metrics="auc, recall", train_samples=20, test_samples=40)
    outcome = run_federation(config, clients=3)
    last = outcome.rows[-1]
    for inference in ("head", "prototype"):
        each = [client["metrics"][f"{inference}/auc"] for client in last["clients"].values()]
        assert last["metrics"][f"{inference}/auc"]["mean"] == pytest.approx(sum(each) / 3)
        assert 0 <= min(each) <= max(each) <= 1
        of_classes = [
            client["metrics"][f"{inference}/recall/{c}"] for client in last["clients"].values() for c in range(10)
        ]
        accuracy = last["accuracy"][inference]["mean"]  # ten classes of four samples each
        assert sum(of_classes) / 30 == pytest.approx(accuracy)
    assert outcome.summary["metrics"] == last["metrics"]
    assert Figure(what="head/auc").read(outcome.folder) == pytest.approx(last["metrics"]["head/auc"]["mean"])
    assert {name.partition("/")[2] for name in last["metrics"]} >= {"auc", "recall/9"}

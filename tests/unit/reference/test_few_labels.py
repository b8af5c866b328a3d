"""Few labels in front of a frozen backbone: a batch without labels, and a last one of one sample, stop nothing."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import run_config, run_federation

LIVES_ON: dict[str, Any] = {"keep_optimizer": True, "momentum": 0.9, "head": "orthogonal-shared"}
CASES: dict[str, dict[str, Any]] = {
    "ditto": LIVES_ON,
    "pfedme": LIVES_ON | {"momentum": 0.5, "participation": 0.67, "rounds": 3, "lr": 0.01},
    "fml": {},
    "fedkd": {},
    "fpl": {},
    "fedpcl": {},
    "fedproto": {"pu_weight": 0.0},
}
"""Algorithm -> what else; a client of pFedMe joins later, FML and FedKD have a second network with normalisation."""


@pytest.mark.parametrize("algo", CASES)
def test_a_client_of_few_labels_trains(algo: str, tmp_path: Path) -> None:
    few = {"positive_rate": 0.1, "pu_weight": 1.0, "train_samples": 21, "test_samples": 20, "batch_size": 5}
    outcome = run_federation(run_config(tmp_path, liars=0, algo=algo, backbones="glyphs", **few | CASES[algo]), 3)
    assert [row["valid"] for row in outcome.rows] == [row["asked"] for row in outcome.rows]
    assert outcome.rows[-1]["valid"] == 3
    assert (outcome.rows[1]["losses"].get("unlabelled", 0) > 0) == (CASES[algo].get("pu_weight") != 0)
    assert algo != "fpl" or {"contrast", "consistency"} <= outcome.rows[1]["losses"].keys()

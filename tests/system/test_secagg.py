"""Secure aggregation, and differential privacy, with four real SuperNodes, beside the same run without them."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.standing import Standing

pytestmark = [pytest.mark.system, pytest.mark.long]
ROUNDS = 2
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "summed": {"secagg": True},
    "private": {"dp": "sample", "dp-epsilon": 50.0, "norm": "group"},
}


def test_four_supernodes_sum_what_they_would_have_sent(tmp_path: Path) -> None:
    """Bytes and seconds of each round are printed (`pytest -s`)."""
    found = {}
    with ExitStack() as running:
        here = Standing(tmp_path, running)
        here.start_superlink()
        here.start_worker()
        for index in range(4):
            here.start_site(f"site-{index}", index, 4)
        for name, more in RUNS.items():
            here.submit({"run-name": name, "rounds": ROUNDS, "num-clients": 4, "report": False, **more})
            assert here.finished(600) == "finished:completed", here.logs() + here.printed()
            rows = here.rows(name)
            assert [row["valid"] for row in rows] == 3 * [4]
            for row in rows[:ROUNDS]:
                print(name, row["bytes"], {key: row["seconds"][key] for key in ("total", "exchange", "aggregate")})
            found[name] = load_file(tmp_path / "runs" / name / "prototypes.safetensors")
    torch.testing.assert_close(found["summed"]["means"], found["plain"]["means"], rtol=2e-6, atol=2e-6)
    assert not list(tmp_path.rglob("secagg.json"))
    assert 0 < rows[0]["epsilon"] < rows[-1]["epsilon"] <= 50
    accounts = [json.loads(file.read_text()) for file in tmp_path.rglob("state/privacy/*.json")]
    assert [list(one) for one in accounts] == 4 * [["private"]]

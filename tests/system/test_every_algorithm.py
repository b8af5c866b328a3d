"""`flwr run . --run-config 'algo="…"'` with every other key at its default: each algorithm, 2 and 10 SuperNodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from protofl_common.catalog import CATALOG
from tests.system.processes import Connection, superlink

pytestmark = pytest.mark.system
FEDERATIONS = {
    2: (),  # Flower's own default
    10: ("--federation-config", "num-supernodes=10 client-resources-num-cpus=1"),
}


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    with superlink(tmp_path_factory.mktemp("simulation"), "--simulation") as connection:
        yield connection


@pytest.mark.parametrize("clients", FEDERATIONS)
@pytest.mark.parametrize("algo", CATALOG)
def test_the_defaults_work(algo: str, clients: int, simulation: Connection, tmp_path: Path) -> None:
    config = f'algo="{algo}" out-dir="{tmp_path}" run-name="mine"'
    output, status = simulation.run(*FEDERATIONS[clients], "--run-config", config, timeout=600)
    assert status == "finished:completed", output
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (summary["rounds"], len(summary["clients"])) == (20, clients)
    assert sum(summary["trouble"].values()) == 0, output
    assert all(figures["mean"] > 0.15 for figures in summary["accuracy"].values()), summary["accuracy"]

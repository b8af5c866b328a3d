"""`flwr run . --run-config 'algo="…"'` with every other key at its default: each algorithm, 2 and 10 SuperNodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from protofl_common.catalog import CATALOG
from tests.system.processes import Connection, superlink

pytestmark = pytest.mark.system
TEN = ("--federation-config", "num-supernodes=10 client-resources-num-cpus=1")


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    with superlink(tmp_path_factory.mktemp("simulation"), "--simulation") as connection:
        yield connection


@pytest.mark.parametrize("algo", CATALOG)
def test_the_defaults_work_on_flowers_own_two_supernodes(algo: str, simulation: Connection, tmp_path: Path) -> None:
    check(algo, 2, (), simulation, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("algo", CATALOG)
def test_the_defaults_work_on_ten_supernodes(algo: str, simulation: Connection, tmp_path: Path) -> None:
    check(algo, 10, TEN, simulation, tmp_path)


def check(algo: str, clients: int, options: tuple[str, ...], simulation: Connection, folder: Path) -> None:
    config = f'algo="{algo}" out-dir="{folder}" run-name="mine"'
    output, status = simulation.run(*options, "--run-config", config, timeout=600)
    assert status == "finished:completed", output
    summary = json.loads((folder / "mine" / "summary.json").read_text())
    assert (summary["rounds"], len(summary["clients"])) == (20, clients)
    assert sum(summary["trouble"].values()) == 0, output
    assert all(figures["mean"] > 0.15 for figures in summary["accuracy"].values()), summary["accuracy"]

"""Each algorithm by `flwr run .`: all in one short run; and alone with all defaults, by 2 and 10 SuperNodes (long)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from protofl_common.catalog import CATALOG
from protofl_common.run_folder import Summary, baseline_folder
from tests.system.processes import Connection, superlink

pytestmark = pytest.mark.system
TEN = ("--federation-config", "num-supernodes=10 client-resources-num-cpus=1")


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    with superlink(tmp_path_factory.mktemp("simulation"), "--simulation") as connection:
        yield connection


def test_all_work_on_flowers_own_two_supernodes(simulation: Connection, tmp_path: Path) -> None:
    """In one run, the others as its baselines: each has its two rounds of few samples."""
    first, *others = CATALOG
    config = f'algo="{first}" baselines="{",".join(others)}" out-dir="{tmp_path}" run-name="mine"'
    output, status = simulation.run("--run-config", f"{config} rounds=2 train-samples=20 test-samples=50", timeout=600)
    assert status == "finished:completed", output
    for folder in (tmp_path / "mine", *(baseline_folder(tmp_path / "mine", algo) for algo in others)):
        check(folder, 2, 2)


@pytest.mark.long
@pytest.mark.parametrize(("clients", "options"), [(2, ()), (10, TEN)])
@pytest.mark.parametrize("algo", CATALOG)
def test_the_defaults_work(
    algo: str, clients: int, options: tuple[str, ...], simulation: Connection, tmp_path: Path
) -> None:
    config = f'algo="{algo}" out-dir="{tmp_path}" run-name="mine"'
    output, status = simulation.run(*options, "--run-config", config, timeout=600)
    assert status == "finished:completed", output
    summary = check(tmp_path / "mine", 20, clients)
    assert all(figures["mean"] > 0.15 for figures in summary["accuracy"].values()), summary["accuracy"]


def check(folder: Path, rounds: int, clients: int) -> Summary:
    """The summary of a run that lost no reply."""
    summary: Summary = json.loads((folder / "summary.json").read_text())
    assert (summary["rounds"], len(summary["clients"])) == (rounds, clients)
    assert sum(summary["trouble"].values()) == 0, summary["trouble"]
    return summary

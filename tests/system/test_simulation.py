"""`flwr run` on Flower's Ray simulation, as a user types it."""

import json
from pathlib import Path

import pytest

from tests.support.processes import Connection

pytestmark = pytest.mark.system
FOUR = ("--federation-config", "num-supernodes=4 client-resources-num-cpus=1")


@pytest.mark.long
def test_fedproto_runs_and_leaves_its_results(simulation: Connection, tmp_path: Path) -> None:
    output, status = simulation.run(*FOUR, "--run-config", f'rounds=3 out-dir="{tmp_path}" run-name="demo"')
    assert status == "finished:completed", output
    assert "round 3/3" in output
    assert f"results: {tmp_path / 'demo'}" in output
    assert f"report: {tmp_path / 'demo' / 'report.html'}" in output
    sites = json.loads((tmp_path / "demo" / "sites.json").read_text())["sites"]
    assert all(sum(facts["train-classes"]) == facts["train-samples"] for facts in sites.values())
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert len(summary["clients"]) == 4
    assert len({client["arch"] for client in summary["clients"].values()}) == 3
    assert sum(summary["trouble"].values()) == 0
    assert summary["accuracy"]["prototype"]["mean"] > 0.1


def test_a_wrong_setting_reaches_the_person_at_once(simulation: Connection) -> None:
    output, status = simulation.run(*FOUR, "--run-config", 'lr="abc" dataset="mnst"')
    assert status == "finished:failed"
    assert "lr = 'abc': must be a number above 0" in output
    assert "dataset = 'mnst': choose one of digits, " in output
    assert "round 1" not in output


def test_flower_refuses_an_unknown_key_without_naming_it(simulation: Connection) -> None:
    """Hence `protofl doctor --recipe`; when Flower learns to name it, the README can say so."""
    output, _ = simulation.run(*FOUR, "--run-config", "roundz=3 rounds=1")
    assert "Invalid run configuration" in output
    assert "round 1/" not in output

"""`flwr run` on Flower's Ray simulation with wrong settings, as a user types it; `test_every_algorithm` has right."""

import pytest

from tests.support.processes import Connection

pytestmark = pytest.mark.system
FOUR = ("--federation-config", "num-supernodes=4 client-resources-num-cpus=1")


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

"""`flwr run .`: all algorithms in one run, and wrong settings.

In the long tests also each algorithm alone, by 2 and 10 SuperNodes.
"""

import json

import pytest

from protofl_common.experiment.catalog import CATALOG
from protofl_common.runs.folder import baseline_folder
from tests.support.processes import BIN, output_of
from tests.support.results import left_by

pytestmark = pytest.mark.system
TWO = ("--federation-config", "num-supernodes=2 client-resources-num-cpus=1")
TEN = ("--federation-config", "num-supernodes=10 client-resources-num-cpus=1")


def test_all_work_on_flowers_own_two_supernodes_and_give_the_same_bits_without_flower(
    simulation, tmp_path
):
    """A run of one algorithm has all others as its baselines; each trains for two rounds.

    `flwr run` and `protofl run` leave the same rows and tensors.
    """
    first, *others = CATALOG
    settings = {
        "algo": first,
        "baselines": ",".join(others),
        "run-name": "mine",
        "rounds": 2,
        "train-samples": 20,
        "test-samples": 50,
    }

    simulation.simulate(2, settings | {"out-dir": str(tmp_path / "flower")})
    words = [f"{key}={value}" for key, value in settings.items()]
    words += [f"out-dir={tmp_path / 'local'}", "--clients", "2"]
    output_of((str(BIN / "protofl"), "run", *words))

    for algo in CATALOG:
        results = []
        for engine in ("flower", "local"):
            run = tmp_path / engine / "mine"
            if algo != first:
                run = baseline_folder(run, algo)
            assert_complete(run, rounds=2, clients=2)
            results.append(left_by(run))
        assert results[0] == results[1], algo


@pytest.mark.long
@pytest.mark.parametrize(("clients", "options"), [(2, ()), (10, TEN)])
@pytest.mark.parametrize("algo", CATALOG)
def test_the_defaults_work(algo, clients, options, simulation, tmp_path):
    """Each algorithm runs with all its defaults, on Flower's own 2 SuperNodes and on 10."""
    config = f'algo="{algo}" out-dir="{tmp_path}" run-name="mine"'
    output, status = simulation.run(*options, "--run-config", config, timeout=600)
    assert status == "finished:completed", output
    accuracy = assert_complete(tmp_path / "mine", rounds=20, clients=clients)["accuracy"]
    # of ten classes a tenth is right by chance
    assert min(figures["mean"] for figures in accuracy.values()) > 0.15, accuracy


def assert_complete(folder, rounds, clients):
    """A run has made so many rounds with so many clients, and lost no reply; return its summary."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == rounds
    assert len(summary["clients"]) == clients
    assert sum(summary["trouble"].values()) == 0, summary["trouble"]
    return summary


def test_a_wrong_setting_reaches_the_person_at_once(simulation):
    """Two wrong settings are both named before the first round."""
    output, status = simulation.run(*TWO, "--run-config", 'lr="abc" dataset="mnst"')
    assert status == "finished:failed"
    assert "lr = 'abc': must be a number above 0" in output
    assert "dataset = 'mnst': choose one of digits, " in output
    assert "round 1" not in output


def test_flower_refuses_an_unknown_key_without_naming_it(simulation):
    """So `protofl doctor --recipe` names it; when Flower does, the README can say so."""
    output, _ = simulation.run(*TWO, "--run-config", "roundz=3 rounds=1")
    assert "Invalid run configuration" in output
    assert "round 1/" not in output

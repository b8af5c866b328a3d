"""Median and trimmed mean: by hand, against NumPy and SciPy, and under attack where the mean fails."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import trim_mean

from protofl_common.catalog import CATALOG
from protofl_common.config.options import SettingsError
from protofl_common.prototypes import Prototypes, merge_by_class
from protofl_common.robust import dropped, merge_prototypes
from protofl_common.settings import Settings, default_run_config
from tests.attacks import both, flipped, scaled
from tests.bench.robust_merging import SHARED, attacked, honest_accuracy
from tests.harness import run_config, run_federation


def sets_of(rng: np.random.Generator, clients: int) -> list[Prototypes]:
    """Each client with its own choice of five classes, eight dimensions."""
    found = []
    for _ in range(clients):
        labels = torch.from_numpy(np.sort(rng.choice(5, rng.integers(1, 6), replace=False)))
        means = torch.from_numpy(rng.normal(size=(len(labels), 8)).astype(np.float32))
        found.append(Prototypes(means, labels, torch.from_numpy(rng.integers(1, 90, len(labels)))))
    return found


def test_by_hand() -> None:
    values = [[0.0, 9.0], [1.0, 0.0], [2.0, 1.0], [1000.0, 2.0]]
    sets = [Prototypes(torch.tensor([value]), torch.tensor([4])) for value in values]
    for merging, wanted in (("median", [1.5, 1.5]), ("trimmed-mean", [1.5, 1.5]), ("mean", [250.75, 3.0])):
        assert merge_prototypes(sets, "uniform", None, merging, 0.25).means.tolist() == [wanted]
    one_less = merge_prototypes(sets[1:], "uniform", None, "median", 0.0)
    assert one_less.means.tolist() == [[2.0, 1.0]]


def test_how_many_are_dropped() -> None:
    """⌈βn⌉ at each end, never all; three are enough to drop one, two never are."""
    assert [dropped(n, "trimmed-mean", 0.2) for n in (1, 2, 3, 5, 6, 10, 11)] == [0, 0, 1, 1, 2, 2, 3]
    assert [dropped(n, "median", 0.2) for n in (1, 2, 3, 4, 5, 10)] == [0, 0, 1, 1, 2, 4]
    assert dropped(10, "trimmed-mean", 0.0) == 0
    assert dropped(100, "trimmed-mean", 0.07) == 7  # 0.07 · 100 is 7.000000000000001


@pytest.mark.parametrize("seed", range(5))
def test_against_numpy_and_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sets = sets_of(rng, clients=10)
    rows = {label: [s.means[s.labels == label][0].numpy() for s in sets if label in s.labels] for label in range(5)}
    median = merge_prototypes(sets, "counts", None, "median", 0.2)
    for label, mean in zip(median.labels.tolist(), median.means.numpy(), strict=True):
        np.testing.assert_allclose(mean, np.median(np.stack(rows[label]).astype(np.float64), axis=0), rtol=1e-6)
    trimmed = merge_prototypes(sets, "counts", None, "trimmed-mean", 0.2)
    for label, mean in zip(trimmed.labels.tolist(), trimmed.means.numpy(), strict=True):
        n = len(rows[label])
        part = dropped(n, "trimmed-mean", 0.2) / n  # SciPy rounds down
        np.testing.assert_allclose(mean, trim_mean(np.stack(rows[label]).astype(np.float64), part + 1e-9), rtol=1e-6)


def test_the_order_of_clients_does_not_matter_and_a_class_nobody_sent_is_kept() -> None:
    sets = [
        Prototypes(one.means[one.labels < 4], one.labels[one.labels < 4])
        for one in sets_of(np.random.default_rng(3), 4)
    ]
    previous = Prototypes(torch.full((1, 8), 7.0), torch.tensor([4]))
    wanted = merge_prototypes(sets, "uniform", previous, "median", 0.2)
    assert wanted.means[-1].tolist() == [7.0] * 8
    for order in itertools.permutations(sets):
        found = merge_prototypes(list(order), "uniform", previous, "median", 0.2)
        assert torch.equal(found.means, wanted.means)


def test_the_default_is_the_mean_to_the_last_bit() -> None:
    sets = sets_of(np.random.default_rng(0), 7)
    for weighting in ("counts", "uniform"):
        found, wanted = merge_prototypes(sets, weighting, None, "mean", 0.2), merge_by_class(sets, weighting)
        assert torch.equal(found.means, wanted.means)
    assert default_run_config()["merging"] == "mean"


def test_algorithms_that_do_not_average_refuse_it_by_name() -> None:
    for algo, row in CATALOG.items():
        for merging in ("median", "trimmed-mean"):
            config = default_run_config() | {"algo": algo, "merging": merging}
            if row.averages_prototypes:
                assert Settings.from_run_config(config).federation.merging == merging
                continue
            with pytest.raises(SettingsError) as caught:
                Settings.from_run_config(config)
            able = "fedproto, fedpcl, protofed, fedproto-avg"
            said = f"merging = '{merging}': {algo} does not average prototypes; choose mean, or an algo of {able}"
            assert str(caught.value) == said
    with pytest.raises(SettingsError, match="merging = 'mode': choose one of mean, median, trimmed-mean"):
        Settings.from_run_config(default_run_config() | {"merging": "mode"})
    with pytest.raises(SettingsError, match=r"trim-fraction = 0\.5: must be a number at least 0 and at most 0\.49"):
        Settings.from_run_config(default_run_config() | {"trim-fraction": 0.5})


@pytest.mark.parametrize("algo", [algo for algo, row in CATALOG.items() if row.averages_prototypes])
def test_every_algorithm_that_averages_takes_the_median(algo: str, tmp_path: Path) -> None:
    """Its global prototypes are the median of what the clients of the last round sent."""
    config = run_config(tmp_path, algo=algo, merging="median", rounds=1, dataset="digits", partition="iid")
    outcome = run_federation(config, clients=3)
    sent = [
        reply.content["prototypes"] for message, reply in outcome.grid.log if message.metadata.message_type == "train"
    ]
    means = np.stack([np.frombuffer(one["means"].data, "<f4").reshape(one["means"].shape) for one in sent])
    found = load_file(outcome.folder / "prototypes.safetensors")["means"]
    np.testing.assert_allclose(found.numpy(), np.median(means.astype(np.float64), axis=0), rtol=1e-6)


# -- two of ten are hostile --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unattacked(tmp_path_factory: pytest.TempPathFactory) -> float:
    return honest_accuracy(attacked(tmp_path_factory.mktemp("calm"), "mean", None, rounds=4, **SHARED))


ATTACKS = {"×10": scaled(10), "×-5": scaled(-5), "flipped ×5": both(flipped(10), scaled(5))}


@pytest.mark.parametrize("attack", ATTACKS)
def test_robust_merging_holds_where_the_mean_does_not(attack: str, unattacked: float, tmp_path: Path) -> None:
    found = {
        merging: honest_accuracy(attacked(tmp_path / merging, merging, ATTACKS[attack], rounds=4, **SHARED))
        for merging in ("mean", "median", "trimmed-mean")
    }
    assert unattacked > 60
    assert found["mean"] < unattacked - 30
    assert found["median"] > unattacked - 5
    assert found["trimmed-mean"] > unattacked - 5

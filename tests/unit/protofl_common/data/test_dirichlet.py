"""Dirichlet partitions against Flower's and PFLlib's, and for more clients than a plain draw can serve."""

import warnings

import numpy as np
import pytest

from protofl_common.data.partitions import DIVIDE, Pool, _filled_up, balanced_dirichlet, dirichlet

from .conftest import MakeSettings


def made_up(samples: int, classes: int) -> Pool:
    labels = np.random.default_rng(0).integers(0, classes, samples)
    return Pool(np.arange(samples), labels, np.zeros_like(labels), ("one",))


@pytest.mark.parametrize(("classes", "clients", "alpha"), [(10, 6, 0.1), (3, 20, 0.5), (30, 20, 0.05)])
def test_shares_are_those_of_flowers_partitioner(
    data_settings: MakeSettings, classes: int, clients: int, alpha: float
) -> None:
    from datasets import Dataset  # with its plots, two seconds, which collecting the tests need not take
    from flwr_datasets.partitioner import DirichletPartitioner

    pool = made_up(1500, classes)
    found = dirichlet(pool, data_settings(alpha=alpha), clients, np.random.default_rng(3))
    seed = int(np.random.default_rng(3).integers(2**31))
    flowers = DirichletPartitioner(clients, "label", alpha, min_partition_size=10, seed=seed)
    flowers.dataset = Dataset.from_dict({"row": pool.rows, "label": pool.labels})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [flowers.load_partition(client)["row"][:] for client in range(clients)]
    assert [share.tolist() for share in found] == wanted


def of_pfllib(
    labels: np.ndarray, clients: int, alpha: float, least: float, rng: np.random.Generator
) -> list[list[int]]:
    """``separate_data`` of PFLlib's ``dataset_utils.py``, partition "dir": the samples of each class a client gets."""
    smallest = 0
    while smallest < least:
        batches: list[list[int]] = [[] for _ in range(clients)]
        for k in range(labels.max() + 1):
            idx_k = np.where(labels == k)[0]
            proportions = rng.dirichlet(np.repeat(alpha, clients))
            proportions = np.array(
                [p * (len(held) < len(labels) / clients) for p, held in zip(proportions, batches, strict=True)]
            )
            proportions = proportions / proportions.sum()
            cuts = (np.cumsum(proportions) * len(idx_k)).astype(int)[:-1]
            batches = [held + idx.tolist() for held, idx in zip(batches, np.split(idx_k, cuts), strict=True)]
        smallest = min(map(len, batches))
    return [sorted(held) for held in batches]


@pytest.mark.parametrize(("samples", "clients", "alpha"), [(4000, 10, 0.1), (3000, 20, 0.3), (2000, 30, 0.5)])
def test_balanced_shares_follow_pfllibs_rule(
    data_settings: MakeSettings, samples: int, clients: int, alpha: float
) -> None:
    pool = made_up(samples, 10)
    found = balanced_dirichlet(pool, data_settings(alpha=alpha), clients, np.random.default_rng(3))
    least = int(min(10 / (1 - 0.75), samples / clients / 2))
    wanted = of_pfllib(pool.labels, clients, alpha, least, np.random.default_rng(3))
    assert [sorted(share.tolist()) for share in found] == wanted


@pytest.mark.parametrize(("partition", "least"), [("dirichlet", 10), ("balanced-dirichlet", 30)])
def test_a_thousand_clients_get_their_least(data_settings: MakeSettings, partition: str, least: int) -> None:
    pool = made_up(60_000, 10)
    shares = DIVIDE[partition](pool, data_settings(alpha=0.1), 1000, np.random.default_rng(3))
    sizes = [len(share) for share in shares]
    assert min(sizes) == least
    assert sorted(np.concatenate(shares).tolist()) == list(range(60_000))
    mixes = np.stack([np.bincount(pool.labels[share], minlength=10) / len(share) for share in shares])
    assert mixes[np.array(sizes) == least].max(axis=1).mean() > 0.5  # few classes each, as Dir(0.1) has it


@pytest.mark.parametrize("partition", ["dirichlet", "balanced-dirichlet", "feature-label-shift"])
def test_there_is_a_division_where_the_numbers_allow_one(data_settings: MakeSettings, partition: str) -> None:
    pool = made_up(400, 10)
    shares = DIVIDE[partition](pool, data_settings(partition=partition, alpha=0.01), 200, np.random.default_rng(3))
    assert {len(share) for share in shares} == {2}


def test_the_poor_are_filled_up_in_their_own_proportions_by_those_with_most() -> None:
    counts_CN = np.array([[9, 0, 4], [3, 1, 6]])
    assert _filled_up(counts_CN, np.array([[0.6, 0.6, 0.2], [0.2, 0.2, 0.6]]), 4).tolist() == [[6, 3, 4], [3, 1, 6]]
    assert _filled_up(counts_CN, np.array([[0.6, 0.0, 0.2], [0.2, 0.5, 0.6]]), 4).tolist() == [[9, 0, 4], [3, 4, 3]]

"""Every partition on the embedded data, and Dirichlet partitions against Flower's and PFLlib's."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from protofl_common.data import open_client_data
from protofl_common.data.division import Division
from protofl_common.data.partitions import DIVIDE, Pool, _filled_up, balanced_dirichlet, dirichlet
from protofl_common.data.store import open_data
from protofl_common.experiment.settings import OF_PARTITIONS

from .conftest import WHOLE, MakeSettings, OpenAll, counts, held, identities

COMMON = ("iid", "dirichlet", "balanced-dirichlet", "pathological", "n-way-k-shot", "label-shift")
ON_DOMAINS = ("iid", "dirichlet", "label-shift", "feature-shift", "feature-label-shift")
EACH = [("digits", partition) for partition in COMMON] + [
    ("digit-domains", partition) for partition in ON_DOMAINS
]


@pytest.mark.parametrize("clients", [2, 10, 20])
@pytest.mark.parametrize(("dataset", "partition"), EACH)
def test_shares_are_disjoint_and_of_the_seed(
    open_all: OpenAll, dataset: str, partition: str, clients: int
) -> None:
    few = {"shots": 5, "alpha": 0.5, "dataset": dataset, "partition": partition}
    everyone = open_all(clients, **few, **WHOLE)
    trains = [identities(client.train_inputs) for client in everyone]
    for client, train in zip(everyone, trains, strict=True):
        assert len(client.train_labels) >= 1
        assert len(client.test_labels) >= 1
        assert len(client.train_inputs) == len(client.train_labels)
        assert not train & identities(client.test_inputs)
    assert len(set.union(*trains)) == sum(len(client.train_labels) for client in everyone)
    if dataset == "digits" and partition != "n-way-k-shot" and clients > 2:
        assert sum(counts(client).sum() for client in everyone) == 1797
    if partition == "iid":
        assert np.ptp([counts(client).sum() for client in everyone]) <= 1
    assert identities(open_all(clients, seed=43, **few, **WHOLE)[-1].train_inputs) != trains[-1]


CHANGED = {"alpha": 5.0, "classes-per-client": 4, "clients-per-domain": "1,2,1,1,1"}
CHANGED |= {"ways": 5, "ways-stdev": 0, "shots": 9, "shots-stdev": 3}


@pytest.mark.parametrize("partition", sorted({*COMMON, *ON_DOMAINS}))
@pytest.mark.parametrize("setting", CHANGED)
def test_a_partition_reads_the_settings_said_to_act(
    data_settings: MakeSettings, setting: str, partition: str
) -> None:
    """With another that it does not read it divides alike: of the same seed."""
    assert CHANGED.keys() == OF_PARTITIONS.keys()
    before = data_settings(dataset="digit-domains", partition=partition, shots=5)
    after = data_settings(
        dataset="digit-domains", partition=partition, **{"shots": 5, setting: CHANGED[setting]}
    )
    two = [Division(open_data(settings), settings, 5, "").shares(6) for settings in (before, after)]
    alike = all(
        np.array_equal(*pair) for both in zip(*two, strict=True) for pair in zip(*both, strict=True)
    )
    assert alike == (partition not in OF_PARTITIONS[setting])


@pytest.mark.parametrize("partition", COMMON)
def test_the_order_of_the_file_is_nobodys_share(
    data_settings: MakeSettings, partition: str
) -> None:
    """Look after look stands in the file; a client with 40 samples of a class has all five."""
    settings = data_settings(
        dataset="digit-domains", partition=partition, shots=50, alpha=0.5, **WHOLE
    )
    data = open_data(settings)
    shares = [share.train for share in Division(data, settings, 5, "").shares(4)]
    of_classes = [rows[data.labels[rows] == label] for rows in shares for label in range(10)]
    assert {len(np.unique(data.domains[rows])) for rows in of_classes if len(rows) >= 40} == {5}


@pytest.mark.parametrize("clients", [5, 10, 20])
def test_pathological_covers_all_classes_unequally(open_all: OpenAll, clients: int) -> None:
    everyone = open_all(
        clients, dataset="digits", partition="pathological", classes_per_client=2, **WHOLE
    )
    assert all(len(held(client)) == 2 for client in everyone)
    assert set.union(*map(held, everyone)) == set(range(10))
    sizes = np.array([counts(client).sum() for client in everyone])
    if clients > 5:
        assert sizes.max() > 1.5 * sizes.min()


@pytest.mark.parametrize(
    ("shots", "fraction"), [(1, 0.75), (2, 0.75), (3, 0.99), (7, 0.1), (10, 0.5), (1, 0.99)]
)
def test_n_way_k_shot_is_exact_for_any_fraction(
    open_all: OpenAll, shots: int, fraction: float
) -> None:
    few = {
        "partition": "n-way-k-shot",
        "ways": 3,
        "ways_stdev": 0,
        "shots": shots,
        "train_fraction": fraction,
    }
    for client in open_all(2, dataset="digits", **few, **WHOLE):
        train = np.bincount(client.train_labels, minlength=10)
        assert sorted(train[train > 0]) == [shots] * 3


def test_n_way_k_shot_varies_shots_and_stays_within_the_classes(open_all: OpenAll) -> None:
    wide = {"partition": "n-way-k-shot", "ways": 10, "ways_stdev": 3, "shots": 5, "shots_stdev": 2}
    everyone = open_all(20, dataset="digits", **wide, **WHOLE)
    assert (
        {3, 7}
        <= {int(np.bincount(client.train_labels).max()) for client in everyone}
        <= {3, 4, 5, 6, 7}
    )
    assert all(7 <= len(held(client)) <= 10 for client in everyone)
    everyone = open_all(
        20, dataset="digits", partition="n-way-k-shot", ways=4, ways_stdev=1, shots=8, **WHOLE
    )
    assert {len(held(client)) for client in everyone} == {3, 4, 5}
    for client in everyone:
        train = np.bincount(client.train_labels, minlength=10)
        assert set(train[train > 0]) == {8}
        assert len(client.test_labels) > 0


def test_n_way_k_shot_shares_samples_only_when_a_class_runs_out_and_none_for_testing(
    open_all: OpenAll,
) -> None:
    many = {"partition": "n-way-k-shot", "ways": 10, "ways_stdev": 0, "shots": 90}
    everyone = open_all(3, dataset="digits", **many, **WHOLE)
    samples = [
        identities(np.concatenate([client.train_inputs, client.test_inputs])) for client in everyone
    ]
    assert all(
        len(ids) == counts(client).sum() == 1200
        for ids, client in zip(samples, everyone, strict=True)
    )
    greedy = open_all(2, dataset="digits", **(many | {"shots": 1000}), **WHOLE)
    assert [counts(client).sum() for client in greedy] == [1797, 1797]
    trained = set.union(*(identities(client.train_inputs) for client in everyone))
    tested = set.union(*(identities(client.test_inputs) for client in everyone))
    assert len(trained) < 3 * 900  # the clients do share some
    assert not trained & tested


@pytest.mark.parametrize(
    "partition", ["label-shift", "feature-label-shift", "dirichlet", "pathological"]
)
def test_a_cap_keeps_the_proportions_that_the_partition_gives(
    open_all: OpenAll, partition: str
) -> None:
    shaped = {"dataset": "digit-domains", "partition": partition, "alpha": 0.5, "test_samples": 0}
    capped, whole = (open_all(5, **shaped, train_samples=limit) for limit in (40, 0))
    for pair in zip(capped, whole, strict=True):
        found, wanted = (
            np.bincount(one.train_labels, minlength=10) / len(one.train_labels) for one in pair
        )
        assert len(pair[0].train_labels) <= 40
        np.testing.assert_allclose(found, wanted, atol=1.5 / 40)


@pytest.mark.parametrize("partition", ["iid", "feature-shift"])
def test_a_cap_balances_the_classes_where_the_partition_gives_none(
    open_all: OpenAll, partition: str
) -> None:
    for client in open_all(
        5, dataset="digit-domains", partition=partition, train_samples=35, test_samples=0
    ):
        assert sorted(np.bincount(client.train_labels)) == [3] * 5 + [4] * 5
        assert len(client.test_labels) == 500 - 35


def test_feature_shift_deals_domains_in_turn_or_as_clients_per_domain_says(
    open_all: OpenAll,
) -> None:
    everyone = open_all(10, dataset="digit-domains", partition="feature-shift", **WHOLE)
    assert [client.domain for client in everyone] == [
        "scanned",
        "printed",
        "photo",
        "inverted",
        "coloured",
    ] * 2
    assert all((counts(client) == 25).all() for client in everyone)
    several = {"partition": "feature-shift", "clients_per_domain": "1,0, 3,1,2"}
    everyone = open_all(7, dataset="digit-domains", **several, **WHOLE)
    assert [client.domain for client in everyone] == [
        "scanned",
        *["photo"] * 3,
        "inverted",
        *["coloured"] * 2,
    ]
    assert [counts(client).sum() for client in everyone] == [500, 167, 167, 166, 500, 250, 250]


@pytest.mark.parametrize("partition", ["own", "feature-shift"])
def test_a_named_domain_is_all_the_clients_own(data_settings: MakeSettings, partition: str) -> None:
    settings = data_settings(
        dataset="digit-domains", partition=partition, clients_per_domain="4,4,4,4,4", **WHOLE
    )
    one = open_client_data(settings, seed=1, partition=7, num_partitions=20, domain="photo")
    two = open_client_data(settings, seed=1, partition=0, num_partitions=3, domain="photo")
    assert one.domain == "photo"
    assert (counts(one) == 50).all()
    np.testing.assert_array_equal(one.train_inputs, two.train_inputs)


def test_own_is_everything_whoever_asks(data_settings: MakeSettings, domain_dir: Path) -> None:
    settings = data_settings(
        dataset="image-folder", data_dir=str(domain_dir / "sketch"), partition="own", **WHOLE
    )
    client = open_client_data(settings, seed=1, partition=99, num_partitions=2)
    assert counts(client).tolist() == [8, 8, 8]
    assert np.bincount(client.train_labels).tolist() == [6, 6, 6]
    assert client.domain == ""


def test_label_shift_has_equal_sizes_and_mixed_domains(open_all: OpenAll) -> None:
    everyone = open_all(20, dataset="digit-domains", partition="label-shift", alpha=0.2, **WHOLE)
    assert {counts(client).sum() for client in everyone} == {125}
    assert {client.domain for client in everyone} == {""}
    assert np.mean([counts(client).max() / counts(client).sum() for client in everyone]) > 0.4


def test_feature_label_shift_has_a_domain_and_proportions(
    open_all: OpenAll, data_settings: MakeSettings
) -> None:
    everyone = open_all(
        5, dataset="digit-domains", partition="feature-label-shift", alpha=0.3, **WHOLE
    )
    assert [client.domain for client in everyone] == [
        "scanned",
        "printed",
        "photo",
        "inverted",
        "coloured",
    ]
    settings = data_settings(dataset="digit-domains", partition="feature-label-shift", **WHOLE)
    named = open_client_data(settings, seed=1, partition=7, num_partitions=20, domain="photo")
    assert named.domain == "photo"
    for client in (*everyone, named):
        assert counts(client).max() == 50
        assert counts(client).sum() < 400
    assert len({tuple(counts(client)) for client in everyone}) == 5


def made_up(samples: int, classes: int) -> Pool:
    labels = np.random.default_rng(0).integers(0, classes, samples)
    return Pool(np.arange(samples), labels, np.zeros_like(labels), ("one",))


@pytest.mark.parametrize(
    ("classes", "clients", "alpha"), [(10, 6, 0.1), (3, 20, 0.5), (30, 20, 0.05)]
)
def test_shares_are_flowers_partitioners(
    data_settings: MakeSettings, classes: int, clients: int, alpha: float
) -> None:
    from datasets import (
        Dataset,
    )  # with its plots, two seconds, which collecting the tests need not take
    from flwr_datasets.partitioner import DirichletPartitioner

    pool = made_up(1500, classes)
    found = dirichlet(pool, data_settings(alpha=alpha), clients, np.random.default_rng(3))
    assert sorted(np.concatenate(found)) == list(range(1500))
    seed = int(np.random.default_rng(3).integers(2**31))
    flowers = DirichletPartitioner(clients, "label", alpha, min_partition_size=10, seed=seed)
    flowers.dataset = Dataset.from_dict({"row": pool.rows, "label": pool.labels})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [flowers.load_partition(client)["label"][:] for client in range(clients)]
    assert [sorted(pool.labels[share]) for share in found] == [sorted(labels) for labels in wanted]


def pfllib(
    labels: np.ndarray, clients: int, alpha: float, least: float, rng: np.random.Generator
) -> list[list[int]]:
    """``separate_data`` of PFLlib's ``dataset_utils.py``, partition "dir": the labels that a client gets, sorted."""
    smallest = 0
    while smallest < least:
        batches: list[list[int]] = [[] for _ in range(clients)]
        for k in range(labels.max() + 1):
            idx_k, proportions = np.where(labels == k)[0], rng.dirichlet(np.repeat(alpha, clients))
            proportions *= [len(held) < len(labels) / clients for held in batches]
            proportions = proportions / proportions.sum()
            cuts = (np.cumsum(proportions) * len(idx_k)).astype(int)[:-1]
            batches = [
                held + idx.tolist()
                for held, idx in zip(batches, np.split(idx_k, cuts), strict=True)
            ]
        smallest = min(map(len, batches))
    return [sorted(labels[held]) for held in batches]


@pytest.mark.parametrize(
    ("samples", "clients", "alpha"), [(4000, 10, 0.1), (3000, 20, 0.3), (2000, 30, 0.5)]
)
def test_balanced_shares_are_pfllibs(
    data_settings: MakeSettings, samples: int, clients: int, alpha: float
) -> None:
    pool = made_up(samples, 10)
    found = balanced_dirichlet(pool, data_settings(alpha=alpha), clients, np.random.default_rng(3))
    least = int(min(10 / (1 - 0.75), samples / clients / 2))
    wanted = pfllib(pool.labels, clients, alpha, least, np.random.default_rng(3))
    assert [sorted(pool.labels[share]) for share in found] == wanted


@pytest.mark.parametrize(("partition", "least"), [("dirichlet", 10), ("balanced-dirichlet", 30)])
def test_a_thousand_clients_get_their_least(
    data_settings: MakeSettings, partition: str, least: int
) -> None:
    pool = made_up(60_000, 10)
    shares = DIVIDE[partition](pool, data_settings(alpha=0.1), 1000, np.random.default_rng(3))
    sizes = [len(share) for share in shares]
    assert min(sizes) == least
    assert sorted(np.concatenate(shares).tolist()) == list(range(60_000))
    mixes = np.stack(
        [np.bincount(pool.labels[share], minlength=10) / len(share) for share in shares]
    )
    assert (
        mixes[np.array(sizes) == least].max(axis=1).mean() > 0.5
    )  # few classes each, as Dir(0.1) has it


@pytest.mark.parametrize("partition", ["dirichlet", "balanced-dirichlet", "feature-label-shift"])
def test_there_is_a_division_where_the_numbers_allow_one(
    data_settings: MakeSettings, partition: str
) -> None:
    pool = made_up(400, 10)
    shares = DIVIDE[partition](
        pool, data_settings(partition=partition, alpha=0.01), 200, np.random.default_rng(3)
    )
    assert {len(share) for share in shares} == {2}


def test_the_poor_are_filled_up_in_their_own_proportions_by_those_with_most() -> None:
    counts_CN = np.array([[9, 0, 4], [3, 1, 6]])
    assert _filled_up(counts_CN, np.array([[0.6, 0.6, 0.2], [0.2, 0.2, 0.6]]), 4).tolist() == [
        [6, 3, 4],
        [3, 1, 6],
    ]
    assert _filled_up(counts_CN, np.array([[0.6, 0.0, 0.2], [0.2, 0.5, 0.6]]), 4).tolist() == [
        [9, 0, 4],
        [3, 4, 3],
    ]

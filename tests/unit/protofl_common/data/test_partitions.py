"""Every partition on the embedded data, and Dirichlet partitions against Flower's and PFLlib's."""

import warnings

import numpy as np
import pytest

from protofl_common.config.datasets import PARTITIONS
from protofl_common.data import open_client_data
from protofl_common.data.division import Division
from protofl_common.data.partitions import (
    DIVIDE,
    Pool,
    balanced_dirichlet,
    dirichlet,
    pathological_in_order,
)
from protofl_common.data.store import open_data

from .conftest import WHOLE, counts, held, identities

COMMON = [name for name, row in PARTITIONS.items() if name != "own" and not row.needs_domains]
ON_DOMAINS = ["iid", "dirichlet", "label-shift"]
ON_DOMAINS += [name for name, row in PARTITIONS.items() if row.shares_domains]
DOMAINS = ["scanned", "printed", "photo", "inverted", "coloured"]
SHOTS = {"dataset": "digits", "partition": "n-way-k-shot", **WHOLE}
NUMBER_OF_DIGITS = 1797
EACH = [("digits", partition) for partition in COMMON]
EACH += [("digit-domains", partition) for partition in ON_DOMAINS]


@pytest.mark.parametrize("clients", [2, 10, 20])
@pytest.mark.parametrize(("dataset", "partition"), EACH)
def test_shares_are_disjoint_and_of_the_seed(open_clients, dataset, partition, clients):
    """No sample is with two clients, and another seed divides otherwise."""
    settings = {"dataset": dataset, "partition": partition, "shots": 5, "alpha": 0.5, **WHOLE}

    everyone = open_clients(clients, **settings)

    trained = set()
    for client in everyone:
        assert len(client.train_labels) >= 1
        assert len(client.test_labels) >= 1
        assert len(client.train_inputs) == len(client.train_labels)
        train = identities(client.train_inputs)
        assert not train & identities(client.test_inputs)
        trained |= train

    assert len(trained) == sum(len(client.train_labels) for client in everyone)

    sizes = [counts(client).sum() for client in everyone]
    if dataset == "digits" and not PARTITIONS[partition].leaves_out:
        assert sum(sizes) == NUMBER_OF_DIGITS
    if partition == "iid":
        assert np.ptp(sizes) <= 1

    of_another_seed = open_clients(clients, seed=43, **settings)
    assert identities(of_another_seed[-1].train_inputs) != identities(everyone[-1].train_inputs)


CHANGED = {
    "alpha": 5.0,
    "classes-per-client": 4,
    "clients-per-domain": "1,2,1,1,1",
    "ways": 5,
    "ways-stdev": 0,
    "shots": 9,
    "shots-stdev": 3,
}
"""Another value for each setting of a partition."""


@pytest.mark.parametrize("partition", sorted({*COMMON, *ON_DOMAINS}))
@pytest.mark.parametrize("setting", CHANGED)
def test_a_partition_reads_the_settings_said_to_act(data_settings, setting, partition):
    """Its division changes with each setting that is said to act on it, and with no other."""
    assert CHANGED.keys() == {key for row in PARTITIONS.values() for key in row.reads}

    def rows(**changes):
        """Return each of six clients' rows for training, its rows for testing, and so on."""
        settings = data_settings(dataset="digit-domains", partition=partition, **changes)
        shares = Division(open_data(settings), settings, 5, "").shares(6)
        return [part.tolist() for share in shares for part in share]

    before = rows(shots=5)  # the default asks for more samples than there are
    after = rows(**{"shots": 5, setting: CHANGED[setting]})

    assert (after == before) == (setting not in PARTITIONS[partition].reads)


@pytest.mark.parametrize("partition", COMMON)
def test_the_order_of_the_file_is_nobodys_share(data_settings, partition):
    """The five domains stand one after the other in the file.

    So a share in the file's order would be of one or two; who has 40 samples of a class has all.
    """
    mixed = {"dataset": "digit-domains", "partition": partition, "shots": 50, "alpha": 0.5}
    settings = data_settings(**mixed, **WHOLE)
    data = open_data(settings)

    numbers_of_domains = set()
    for share in Division(data, settings, 5, "").shares(4):
        for label in range(10):
            rows = share.train[data.labels[share.train] == label]
            if len(rows) >= 40:
                numbers_of_domains.add(len(np.unique(data.domains[rows])))

    assert numbers_of_domains == {5}


@pytest.mark.parametrize("clients", [5, 10, 20])
def test_pathological_covers_all_classes_unequally(open_clients, clients):
    two_classes = {"partition": "pathological", "classes_per_client": 2}
    everyone = open_clients(clients, dataset="digits", **two_classes, **WHOLE)

    assert all(len(held(client)) == 2 for client in everyone)
    assert set.union(*map(held, everyone)) == set(range(10))

    sizes = np.array([counts(client).sum() for client in everyone])
    if clients > 5:  # more clients share classes, in unequal parts
        assert sizes.max() > 1.5 * sizes.min()


@pytest.mark.parametrize(
    ("shots", "fraction"), [(1, 0.75), (2, 0.75), (3, 0.99), (7, 0.1), (10, 0.5), (1, 0.99)]
)
def test_n_way_k_shot_is_exact_for_any_fraction(open_clients, shots, fraction):
    three_ways = {**SHOTS, "ways": 3, "ways_stdev": 0, "shots": shots}
    for client in open_clients(2, **three_ways, train_fraction=fraction):
        train = np.bincount(client.train_labels)
        assert sorted(train[train > 0]) == [shots] * 3


def test_n_way_k_shot_varies_shots_and_stays_within_the_classes(open_clients):
    everyone = open_clients(20, **SHOTS, ways=10, ways_stdev=3, shots=5, shots_stdev=2)

    # uniform in 5 ± 2, and both ends occur among twenty clients
    shots = {int(np.bincount(client.train_labels).max()) for client in everyone}
    assert {3, 7} <= shots <= {3, 4, 5, 6, 7}
    assert all(7 <= len(held(client)) <= 10 for client in everyone)


def test_n_way_k_shot_varies_ways(open_clients):
    """Clients have 4 ± 1 classes, with eight training samples of each."""
    everyone = open_clients(20, **SHOTS, ways=4, ways_stdev=1, shots=8)

    assert {len(held(client)) for client in everyone} == {3, 4, 5}
    for client in everyone:
        train = np.bincount(client.train_labels)
        assert set(train[train > 0]) == {8}
        assert len(client.test_labels) > 0


def test_n_way_k_shot_shares_samples_only_when_a_class_runs_out_and_none_for_testing(open_clients):
    """Three clients train on 90 images of each of ten classes, which is more than there are.

    With their tests, a quarter of a share, each has 1,200 images.
    """
    all_ways = {**SHOTS, "ways": 10, "ways_stdev": 0}
    everyone = open_clients(3, **all_ways, shots=90)
    trained = set()
    tested = set()
    for client in everyone:
        train = identities(client.train_inputs)
        test = identities(client.test_inputs)
        assert len(train | test) == counts(client).sum() == 1200
        trained |= train
        tested |= test

    assert len(trained) < 3 * 900  # the clients do share some
    assert not trained & tested

    greedy = open_clients(2, **all_ways, shots=1000)
    assert [counts(client).sum() for client in greedy] == [NUMBER_OF_DIGITS] * 2


@pytest.mark.parametrize(
    "partition", ["label-shift", "feature-label-shift", "dirichlet", "pathological"]
)
def test_a_cap_keeps_the_proportions_that_the_partition_gives(open_clients, partition):
    """A client's 40 capped samples have the class proportions of its whole share."""
    same = {"dataset": "digit-domains", "partition": partition, "alpha": 0.5, "test_samples": 0}
    everyone = open_clients(5, **same, train_samples=40)
    uncapped = open_clients(5, **same, train_samples=0)

    for client, whole in zip(everyone, uncapped, strict=True):
        assert len(client.train_labels) <= 40
        one_sample_and_a_half = 1.5 / 40  # of 40: so far off may rounding be
        np.testing.assert_allclose(
            proportions(client), proportions(whole), atol=one_sample_and_a_half
        )


def proportions(client):
    """Return the part that each of ten classes has of a client's training samples."""
    return np.bincount(client.train_labels, minlength=10) / len(client.train_labels)


@pytest.mark.parametrize("partition", ["iid", "feature-shift"])
def test_a_cap_balances_the_classes_where_the_partition_gives_none(open_clients, partition):
    capped = {"train_samples": 35, "test_samples": 0}
    for client in open_clients(5, dataset="digit-domains", partition=partition, **capped):
        # 35 samples of ten classes
        assert sorted(np.bincount(client.train_labels)) == [3] * 5 + [4] * 5
        assert len(client.test_labels) == 500 - 35


def test_feature_shift_deals_domains_in_turn(open_clients):
    everyone = open_clients(10, dataset="digit-domains", partition="feature-shift", **WHOLE)
    assert [client.domain for client in everyone] == [*DOMAINS, *DOMAINS]
    assert all((counts(client) == 25).all() for client in everyone)


def test_feature_shift_deals_domains_as_clients_per_domain_says(open_clients):
    """The clients of a domain divide its 500 samples; here the second domain has no client."""
    several = {"partition": "feature-shift", "clients_per_domain": "1,0, 3,1,2"}
    everyone = open_clients(7, dataset="digit-domains", **several, **WHOLE)
    domains = [client.domain for client in everyone]

    assert domains == ["scanned"] + 3 * ["photo"] + ["inverted"] + 2 * ["coloured"]
    assert [counts(client).sum() for client in everyone] == [500, 167, 167, 166, 500, 250, 250]


@pytest.mark.parametrize("partition", ["own", "feature-shift"])
def test_a_named_domain_is_all_the_clients_own(data_settings, partition):
    """A client with a domain of its own has all of it, whatever its number among the clients."""
    settings = data_settings(
        dataset="digit-domains", partition=partition, clients_per_domain="4,4,4,4,4", **WHOLE
    )
    one = open_client_data(settings, seed=1, partition=7, num_partitions=20, domain="photo")
    two = open_client_data(settings, seed=1, partition=0, num_partitions=3, domain="photo")

    assert one.domain == "photo"
    assert (counts(one) == 50).all()
    np.testing.assert_array_equal(one.train_inputs, two.train_inputs)


def test_own_is_everything_whoever_asks(data_settings, domain_dir):
    """Each class of the folder has eight images, three quarters of them for training."""
    sketches = {"dataset": "image-folder", "data_dir": str(domain_dir / "sketch")}
    settings = data_settings(**sketches, partition="own", **WHOLE)
    client = open_client_data(settings, seed=1, partition=99, num_partitions=2)

    assert counts(client).tolist() == [8, 8, 8]
    assert np.bincount(client.train_labels).tolist() == [6, 6, 6]
    assert client.domain == ""


def test_label_shift_has_equal_sizes_and_mixed_domains(open_clients):
    everyone = open_clients(
        20, dataset="digit-domains", partition="label-shift", alpha=0.2, **WHOLE
    )
    assert {counts(client).sum() for client in everyone} == {125}
    assert {client.domain for client in everyone} == {""}

    largest = [counts(client).max() / counts(client).sum() for client in everyone]
    assert np.mean(largest) > 0.4  # of ten classes, which iid shares have at 0.1 each


def test_feature_label_shift_has_a_domain_and_proportions(open_clients, data_settings):
    """Each of five clients has one domain: all 50 samples of some class, and fewer of others."""
    same = {"dataset": "digit-domains", "partition": "feature-label-shift", **WHOLE}
    everyone = open_clients(5, **same, alpha=0.3)

    assert [client.domain for client in everyone] == DOMAINS

    settings = data_settings(**same)
    named = open_client_data(settings, seed=1, partition=7, num_partitions=20, domain="photo")

    assert named.domain == "photo"
    for client in (*everyone, named):
        assert counts(client).max() == 50
        assert counts(client).sum() < 400
    assert len({tuple(counts(client)) for client in everyone}) == 5


def made_up(samples, classes):
    """Return samples of one domain with random labels, to be divided."""
    labels = np.random.default_rng(0).integers(0, classes, samples)
    return Pool(np.arange(samples), labels, np.zeros_like(labels), ("one",))


@pytest.mark.parametrize(
    ("classes", "clients", "alpha"), [(10, 6, 0.1), (3, 20, 0.5), (30, 20, 0.05)]
)
def test_shares_are_flowers_partitioners(data_settings, classes, clients, alpha):
    """With the same seed Flower's partitioner gives each client the same labels."""
    # these take two seconds, which collecting the tests need not take
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner

    pool = made_up(1500, classes)
    found = dirichlet(pool, data_settings(alpha=alpha), clients, np.random.default_rng(3))

    assert sorted(np.concatenate(found)) == list(range(1500))

    seed = int(np.random.default_rng(3).integers(2**31))  # which `dirichlet` draws first
    flowers = DirichletPartitioner(clients, "label", alpha, min_partition_size=10, seed=seed)
    flowers.dataset = Dataset.from_dict({"row": pool.rows, "label": pool.labels})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [flowers.load_partition(client)["label"][:] for client in range(clients)]

    assert [sorted(pool.labels[share]) for share in found] == [sorted(labels) for labels in wanted]


def pfllib(labels, clients, alpha, least, rng):
    """Return the labels that each client gets, sorted, by PFLlib's partition "dir".

    This is ``separate_data`` of its ``dataset_utils.py``: it draws anew until each client has
    ``least`` samples.
    """
    smallest = 0
    while smallest < least:
        batches = [[] for _ in range(clients)]
        for k in range(labels.max() + 1):
            idx_k = np.where(labels == k)[0]
            proportions = rng.dirichlet(np.repeat(alpha, clients))
            # who has an equal share already gets no more
            proportions *= [len(idx_j) < len(labels) / clients for idx_j in batches]
            proportions = proportions / proportions.sum()
            cuts = (np.cumsum(proportions) * len(idx_k)).astype(int)[:-1]
            for idx_j, idx in zip(batches, np.split(idx_k, cuts), strict=True):
                idx_j += idx.tolist()
        smallest = min(map(len, batches))
    return [sorted(labels[idx_j]) for idx_j in batches]


@pytest.mark.parametrize(
    ("samples", "clients", "alpha"), [(4000, 10, 0.1), (3000, 20, 0.3), (2000, 30, 0.5)]
)
def test_balanced_shares_are_pfllibs(data_settings, samples, clients, alpha):
    """PFLlib's code, from the same random numbers, gives each client the same labels."""
    pool = made_up(samples, 10)
    found = balanced_dirichlet(pool, data_settings(alpha=alpha), clients, np.random.default_rng(3))
    # PFLlib's least_samples, for its batch size of 10 and its train ratio of 0.75
    least = int(min(10 / (1 - 0.75), samples / clients / 2))
    wanted = pfllib(pool.labels, clients, alpha, least, np.random.default_rng(3))

    assert [sorted(pool.labels[share]) for share in found] == wanted


def test_neighbours_share_classes_as_pfllib_deals_them(data_settings):
    """Four neighbours share two classes of about 7,000 samples each.

    PFLlib's rule: three of them take from a tenth of an equal share to all of it, 175 to 1,749
    samples of a class; the fourth takes the rest.
    """
    pool = made_up(70_000, 10)
    settings = data_settings(partition="pathological-in-order", classes_per_client=2)

    shares = pathological_in_order(pool, settings, 20, np.random.default_rng(3))

    assert sorted(np.concatenate(shares).tolist()) == list(range(70_000))
    class_sizes = np.bincount(pool.labels)
    for client, share in enumerate(shares):
        pair = client // 4 * 2
        sizes = np.bincount(pool.labels[share], minlength=10)
        assert set(np.flatnonzero(sizes)) == {pair, pair + 1}
        for label in (pair, pair + 1):
            equal = class_sizes[label] // 4
            if client % 4 < 3:
                assert equal // 10 <= sizes[label] < equal
            else:
                assert sizes[label] > equal


@pytest.mark.parametrize(("partition", "least"), [("dirichlet", 10), ("balanced-dirichlet", 30)])
def test_a_thousand_clients_get_their_least(data_settings, partition, least):
    """An equal share is 60 samples: the least is 10, and half of a share in the balanced one."""
    pool = made_up(60_000, 10)
    shares = DIVIDE[partition](pool, data_settings(alpha=0.1), 1000, np.random.default_rng(3))
    sizes = [len(share) for share in shares]

    assert min(sizes) == least
    assert sorted(np.concatenate(shares).tolist()) == list(range(60_000))

    # the smallest have few classes each, as Dir(0.1) has it
    smallest = [pool.labels[share] for share in shares if len(share) == least]
    largest_part = [np.bincount(labels).max() / least for labels in smallest]

    assert np.mean(largest_part) > 0.5


@pytest.mark.parametrize("partition", ["dirichlet", "balanced-dirichlet", "feature-label-shift"])
def test_there_is_a_division_where_the_numbers_allow_one(data_settings, partition):
    """Each client needs two samples, one for training and one for testing: all there are."""
    clients = 200
    pool = made_up(2 * clients, classes=10)
    settings = data_settings(partition=partition, alpha=0.01)
    shares = DIVIDE[partition](pool, settings, clients, np.random.default_rng(3))

    assert {len(share) for share in shares} == {2}

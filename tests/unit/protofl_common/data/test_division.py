"""Around the partitions: what cannot be divided, training and test samples, caps, hidden labels."""

from itertools import pairwise

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from protofl_common.config.datasets import DATASETS
from protofl_common.data import (
    DataError,
    check_data_settings,
    open_client_data,
)
from protofl_common.data.clients import hide_labels
from protofl_common.tasks import UNLABELLED

from .conftest import WHOLE, counts, held, identities, refused


def test_a_cap_on_tests_keeps_proportions_and_total_samples_are_drawn_before_dividing(open_clients):
    """``test_samples`` caps each client's tests, ``total_samples`` all data."""
    for client in open_clients(
        5, dataset="digit-domains", partition="feature-shift", test_samples=50
    ):
        assert len(client.train_labels) == 30  # as `data_settings` has it
        # 50 of ten classes that are equally large: about 5 of each
        assert set(np.bincount(client.test_labels)) <= {4, 5, 6}
        assert len(client.test_labels) == 50

    everyone = open_clients(4, dataset="digits", partition="iid", total_samples=100, **WHOLE)
    assert [counts(client).sum() for client in everyone] == [25] * 4


def test_an_official_test_part_is_divided_by_classes_and_capped_alike(open_clients, mnist_dir):
    """Each client is tested on the official test samples of its classes."""
    official = {"dataset": "mnist", "data_dir": str(mnist_dir), "test_from": "official"}
    everyone = open_clients(5, **official, partition="pathological", **WHOLE)
    assert sorted(trained_numbers(everyone)) == list(range(400))
    for client in everyone:
        classes = held(client)
        of_its_classes = [number for number in range(400, 500) if number % 10 in classes]
        assert sorted(numbers(client.test_inputs)) == of_its_classes

    caps = {"train_samples": 20, "test_samples": 30, "total_samples": 390}
    for client in open_clients(5, **official, partition="iid", **caps):
        assert (np.bincount(client.train_labels) == 2).all()
        assert (np.bincount(client.test_labels) == 3).all()


def numbers(images):
    """Return which images of `mnist_dir` these are.

    0…399 are for training and 400…499 for testing; an image's class is its number mod 10. The
    first two pixels are the number's digits in base 256.
    """
    return (images[:, 0, 0, :2].astype(int) @ [256, 1]).tolist()


def trained_numbers(clients):
    return numbers(np.concatenate([client.train_inputs for client in clients]))


def test_the_official_test_part_for_everybody(open_clients, data_settings, mnist_dir):
    """Clients of two classes each are tested on all ten, and so is a site with data of its own.

    Training shares are as with ``official``. The test part is in memory once, for all clients.
    """
    same = {"dataset": "mnist", "data_dir": str(mnist_dir), "partition": "pathological", **WHOLE}
    everyone = open_clients(5, **same, test_from="official-all")
    tested_on_their_classes = open_clients(5, **same, test_from="official")
    for client, official in zip(everyone, tested_on_their_classes, strict=True):
        assert numbers(client.test_inputs) == list(range(400, 500))
        assert_array_equal(client.test_labels, np.arange(100) % 10)
        assert len(held(official)) == 2
        assert_array_equal(client.train_inputs, official.train_inputs)
        assert client.train_inputs.flags.owndata
        assert not client.test_inputs.flags.owndata
        assert not client.test_inputs.flags.writeable

    same |= {"partition": "own", "train_samples": 30}
    settings = data_settings(**same, test_from="official-all")
    alone = open_client_data(settings, seed=1, partition=4, num_partitions=9)
    assert len(alone.train_labels) == 30
    assert numbers(alone.test_inputs) == list(range(400, 500))


def test_a_cap_on_the_test_part_for_everybody_is_balanced_common_and_of_the_seed(
    open_clients, mnist_dir
):
    """All clients have the same 30 test samples, three of each class."""
    same = {"dataset": "mnist", "data_dir": str(mnist_dir), "partition": "iid"}
    same |= {"test_from": "official-all", "test_samples": 30}

    first, second, third = open_clients(3, **same)
    of_another_seed = open_clients(3, seed=7, **same)[0]

    assert (np.bincount(first.test_labels) == 3).all()
    assert numbers(first.test_inputs) == numbers(second.test_inputs) == numbers(third.test_inputs)
    assert numbers(of_another_seed.test_inputs) != numbers(first.test_inputs)


def test_balanced_tests_have_every_class_as_often_of_what_nobody_trains_on(open_clients, mnist_dir):
    """The made-up MNIST has 50 images of a class: 30 to divide, 20 to test on."""
    same = {"dataset": "mnist", "data_dir": str(mnist_dir), **WHOLE}
    same |= {"partition": "dirichlet", "alpha": 0.5}
    same |= {"test_from": "balanced", "train_fraction": 0.6}

    everyone = open_clients(5, **same)
    trained = trained_numbers(everyone)
    assert np.bincount(np.array(trained) % 10).tolist() == [30] * 10
    for client in everyone:
        assert sorted(numbers(client.test_inputs) + trained) == list(range(500))

    capped = open_clients(5, **same | {"test_samples": 30})
    for client in capped:
        assert np.bincount(client.test_labels).tolist() == [3] * 10
        assert not set(numbers(client.test_inputs)) & set(trained)
    assert numbers(capped[0].test_inputs) != numbers(capped[1].test_inputs)


def test_balanced_tests_are_of_ones_own_domain_however_skewed_the_training_share(open_clients):
    """Two clients of one domain share their test samples: ten of each class."""
    skewed = {"dataset": "digit-domains", "partition": "feature-label-shift", "alpha": 0.3}
    skewed |= {"clients_per_domain": "2,1,1,1,1", **WHOLE}

    everyone = open_clients(6, **skewed, test_from="balanced", train_fraction=0.8)

    for client in everyone:
        trained = np.bincount(client.train_labels, minlength=10)
        assert trained.max() > 5 * trained.min()
        assert np.bincount(client.test_labels).tolist() == [10] * 10
    first, second, third, *_ = everyone
    assert first.domain == second.domain != third.domain
    assert_array_equal(first.test_inputs, second.test_inputs)
    assert not identities(first.test_inputs) & identities(second.train_inputs)


def test_validation_samples_are_taken_from_training_and_change_nothing_else(open_clients):
    """A fifth of each client's training samples is set aside."""
    same = {"dataset": "digit-domains", "partition": "dirichlet", **WHOLE}
    same |= {"alpha": 0.5, "total_samples": 600}

    everyone = open_clients(4, **same, validation_fraction=0.2)

    without_validation = open_clients(4, **same)
    for client, without in zip(everyone, without_validation, strict=True):
        assert len(without.validation_labels) == 0
        assert_array_equal(client.test_inputs, without.test_inputs)
        assert len(client.validation_labels) == round(0.2 * len(without.train_labels))
        both = np.concatenate([client.train_inputs, client.validation_inputs])
        assert len(both) == len(without.train_inputs)
        assert identities(both) == identities(without.train_inputs)
        assert set(client.train_labels) == set(without.train_labels)


def test_which_samples_are_for_validation_is_of_the_seed(open_clients):
    """The same seed sets the same samples aside, and another seed others."""
    same = {"dataset": "digits", "partition": "iid", "validation_fraction": 0.2}
    one_of_four = 2
    first = open_clients(4, **same)[one_of_four]
    again = open_clients(4, **same)[one_of_four]
    of_another_seed = open_clients(4, **same, seed=7)[one_of_four]
    assert_array_equal(first.validation_inputs, again.validation_inputs)
    assert not np.array_equal(first.validation_inputs, of_another_seed.validation_inputs)


def test_a_share_may_be_too_small_for_a_validation_sample(open_clients):
    small = {"dataset": "digits", "partition": "iid", "train_samples": 4}
    for client in open_clients(3, **small, validation_fraction=0.1):  # 0.4 of a sample
        assert len(client.train_labels) == 4
        assert client.validation_inputs.shape == (0, 1, 8, 8)


def test_a_part_of_each_class_keeps_its_labels_at_least_one_of_them():
    """A fifth of 10, 5, 1 and 100 samples, and so small a rate that one sample is left."""
    labels = np.repeat([0, 3, 4, 7], [10, 5, 1, 100])
    labels.flags.writeable = False

    hidden = hide_labels(labels, rate=0.2, seed=0)

    assert [int((hidden == label).sum()) for label in (0, 3, 4, 7)] == [2, 1, 1, 20]
    kept = hidden != UNLABELLED
    assert (~kept).sum() == 116 - 24
    assert_array_equal(hidden[kept], labels[kept])
    assert hide_labels(labels, rate=1.0, seed=3) is labels
    for rate in (1e-9, 0.001, 0.005):
        hidden = hide_labels(np.repeat([1, 2], [100, 3]), rate, seed=0)
        assert (hidden == 1).sum() == (hidden == 2).sum() == 1


def test_what_is_labelled_at_a_rate_is_labelled_at_every_larger_one():
    """At each of five rates the labelled samples contain those at the smaller ones."""
    labels = np.arange(300) % 3

    labelled = [
        set(np.flatnonzero(hide_labels(labels, rate, 5) != UNLABELLED))
        for rate in (0.05, 0.1, 0.2, 0.5, 1.0)
    ]

    assert [len(samples) for samples in labelled] == [15, 30, 60, 150, 300]
    assert all(small < large for small, large in pairwise(labelled))


def test_hiding_labels_changes_only_training_labels(open_clients):
    """With ``positive_rate`` 0.1 a tenth of each class stays labelled."""
    same = {"dataset": "digit-domains", "partition": "feature-shift", "train_samples": 0}
    labelled = open_clients(5, **same)
    hidden = open_clients(5, **same, positive_rate=0.1)

    for whole, client in zip(labelled, hidden, strict=True):
        assert_array_equal(client.train_inputs, whole.train_inputs)
        assert_array_equal(client.test_inputs, whole.test_inputs)
        assert_array_equal(client.test_labels, whole.test_labels)
        assert client.domain == whole.domain

        is_known = client.train_labels != UNLABELLED
        known = client.train_labels[is_known]
        assert_array_equal(known, whole.train_labels[is_known])
        assert set(known) == set(whole.train_labels)
        tenth_of_each_class = np.round(0.1 * np.bincount(whole.train_labels))
        assert_array_equal(np.bincount(known), tenth_of_each_class)


def test_which_labels_are_hidden_depends_on_seed_and_client_alone(open_clients, cache_dir):
    """Three clients with two seeds have six different choices."""
    same = {"dataset": "digits", "partition": "iid", "train_samples": 0, "positive_rate": 0.2}
    first = open_clients(3, **same)
    for client, again in zip(first, open_clients(3, **same), strict=True):
        assert_array_equal(client.train_labels, again.train_labels)

    of_another_seed = open_clients(3, seed=7, **same)
    known = [client.train_labels != UNLABELLED for client in (*first, *of_another_seed)]
    assert len({mask.tobytes() for mask in known}) == 6  # all differ

    before = set(cache_dir.iterdir())
    open_clients(3, **same | {"positive_rate": 0.3})  # rates share one division in the cache
    assert set(cache_dir.iterdir()) == before


OWN_FOLDER = {"dataset": "image-folder", "partition": "own"}
MNIST_BY_CLASSES = {"dataset": "mnist", "partition": "pathological"}
FOLDER_BY_CLASSES = {"dataset": "image-folder", "partition": "pathological", "classes": "a,b,c"}


@pytest.mark.parametrize(("changes", "message"), [
    (
        {"dataset": "digits", "partition": "feature-shift"},
        r"partition = 'feature-shift'.*'digits' has no domains",
    ),
    ({"test_from": "official"}, r"test-from = 'official'.*no official test part"),
    (
        {"dataset": "digits", "test_from": "official-all"},
        r"test-from = 'official-all': dataset 'digits' has no official",
    ),
    ({"clients_per_domain": "1,two"}, "clients-per-domain = '1,two': must be numbers"),
    ({"clients_per_domain": "1,-2"}, "must be numbers"),
    ({"clients_per_domain": "1,4,2"}, r"'1,4,2' has 3 numbers.*5 domains: scanned, printed"),
    ({**MNIST_BY_CLASSES, "classes_per_client": 11}, "classes-per-client = 11.*10"),
    ({**FOLDER_BY_CLASSES, "classes_per_client": 4}, "classes-per-client = 4.*3 classes"),
    ({"classes": "a,b"}, "classes = 'a,b': only for data of your own"),
    ({**OWN_FOLDER, "classes": "a,,b"}, "classes = 'a,,b': must be different names"),
    ({**OWN_FOLDER, "classes": "a,a"}, "must be different names"),
])  # fmt: skip
def test_wrong_settings_need_no_data(data_settings, changes, message):
    with refused(message):
        check_data_settings(data_settings(**changes))


def test_all_problems_are_told_at_once(data_settings):
    three_wrong = {"test_from": "official", "classes": "a", "clients_per_domain": "x"}
    with pytest.raises(DataError) as caught:
        check_data_settings(data_settings(dataset="digits", **three_wrong))
    assert len(str(caught.value).splitlines()) == 4  # and the partition needs domains


def test_every_data_set_has_settings_that_pass_the_check(data_settings):
    for dataset, row in DATASETS.items():
        test_from = "official-own" if row.shares_parts else "split"
        check_data_settings(
            data_settings(dataset=dataset, partition="iid", task=row.tasks[0], test_from=test_from)
        )
    by_domains = {"partition": "feature-shift", "clients_per_domain": "1,2"}
    check_data_settings(data_settings(dataset="domain-folder", **by_domains))


@pytest.mark.parametrize("partition", [-1, 5])
def test_a_client_is_one_of_the_number_of_clients(data_settings, partition):
    with refused(f"partition-id = {partition}: must be from 0 to num-partitions - 1 = 4"):
        open_client_data(data_settings(), seed=1, partition=partition, num_partitions=5)


@pytest.mark.parametrize(("changes", "clients", "domain", "message"), [
    ({}, 0, "", "num-partitions = 0"),
    (
        {"clients_per_domain": "1,4,2,2,1"},
        5,
        "",
        "'1,4,2,2,1' sums to 10 clients, but num-partitions is 5",
    ),
    (
        {"dataset": "digits", "partition": "iid"},
        1000,
        "",
        "1797 samples are too few for 1000 clients",
    ),
    ({"total_samples": 20}, 11, "", "20 samples are too few for 11 clients"),
    ({"total_samples": 30}, 15, "", r"(would have|has) \d+ samples"),
    ({"total_samples": 9999}, 5, "", "total-samples = 9999: there are only 2500"),
    (
        {"dataset": "digits", "partition": "pathological"},
        890,
        "",
        r"class \d+ has 17\d samples for 178 clients",
    ),
    ({}, 5, "attic", r"domain = 'attic'.*scanned, printed, photo, inverted, coloured"),
    ({"partition": "iid"}, 5, "photo", "domain = 'photo': has no meaning with partition 'iid'"),
    (
        {"dataset": "digits", "partition": "own"},
        5,
        "photo",
        "domain = 'photo'.*its domains: none",
    ),
])  # fmt: skip
def test_data_that_cannot_be_divided_as_asked(data_settings, changes, clients, domain, message):
    settings = data_settings(**changes)
    with refused(message):
        open_client_data(settings, seed=1, partition=0, num_partitions=clients, domain=domain)


def test_a_domain_without_samples_is_refused_unless_a_site_has_another(data_settings, domain_dir):
    """Two clients would be of the first two domains, and nobody would miss the third.

    A site has one domain only, so the others do not matter to it.
    """
    (domain_dir / "watercolour").mkdir()
    where = {"dataset": "domain-folder", "data_dir": str(domain_dir)}
    settings = data_settings(**where, partition="feature-shift")

    with refused("= 'feature-shift': domain 'watercolour' is empty; fill or remove it"):
        open_client_data(settings, seed=1, partition=0, num_partitions=2)

    site = open_client_data(settings, seed=1, partition=0, num_partitions=1, domain="photo")
    assert site.domain == "photo"


@pytest.mark.parametrize(("changes", "said"), [
    ({"clients_per_domain": "1,1,1"}, "names 3 domains; the data have 2: photo, sketch"),
    ({"partition": "pathological", "classes_per_client": 4}, "= 4: the data have only 3 classes"),
])  # fmt: skip
def test_settings_must_fit_the_domains_and_classes_that_the_files_have(
    data_settings, domain_dir, changes, said
):
    settings = data_settings(dataset="domain-folder", data_dir=str(domain_dir), **changes)
    with refused(said):
        open_client_data(settings, seed=1, partition=0, num_partitions=3)


def test_an_official_test_part_must_have_a_clients_classes(data_settings, mnist_dir):
    """The test part is made to have class 0 only; ten clients have one class each."""
    labels = mnist_dir / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    header = labels.read_bytes()[:8]
    labels.write_bytes(header + bytes(100))  # all 100 are of class 0
    pathological = {"partition": "pathological", "classes_per_client": 1, "test_from": "official"}
    settings = data_settings(dataset="mnist", data_dir=str(mnist_dir), **pathological)
    with refused("the official test part has no sample of classes"):
        open_client_data(settings, seed=1, partition=0, num_partitions=10)

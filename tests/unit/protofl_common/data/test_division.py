"""Around the partitions: what cannot be divided, the pool, training and test samples, the caps, and hidden labels."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofl_common.config.datasets import DATASETS
from protofl_common.data import UNLABELLED, DataError, check_data_settings, open_client_data
from protofl_common.data.clients import hide_labels

from .conftest import WHOLE, MakeSettings, OpenAll, counts, held


def test_a_cap_on_tests_keeps_proportions_and_total_samples_are_drawn_before_dividing(
    open_all: OpenAll,
) -> None:
    for client in open_all(5, dataset="digit-domains", partition="feature-shift", test_samples=50):
        assert len(client.train_labels) == 30
        assert set(np.bincount(client.test_labels)) <= {4, 5, 6}
        assert len(client.test_labels) == 50
    everyone = open_all(4, dataset="digits", partition="iid", total_samples=100, **WHOLE)
    assert [counts(client).sum() for client in everyone] == [25] * 4


def test_official_test_part(open_all: OpenAll, mnist_dir: Path) -> None:
    """The made-up MNIST has images 0…399 for training and 400…499 for testing, of class number mod 10."""
    official = {"dataset": "mnist", "data_dir": str(mnist_dir), "test_from": "official"}
    everyone = open_all(5, **official, partition="pathological", **WHOLE)
    assert sorted(number for client in everyone for number in numbers(client.train_inputs)) == list(
        range(400)
    )
    for client in everyone:
        assert set(numbers(client.test_inputs)) == {
            number for number in range(400, 500) if number % 10 in held(client)
        }
    for client in open_all(
        5, **official, partition="iid", train_samples=20, test_samples=30, total_samples=390
    ):
        assert (np.bincount(client.train_labels) == 2).all()
        assert (np.bincount(client.test_labels) == 3).all()


def numbers(images: np.ndarray) -> list[int]:
    """Which of the made-up MNIST images these are."""
    found: list[int] = (images[:, 0, 0, :2].astype(int) @ [256, 1]).tolist()
    return found


def test_the_official_test_part_for_everybody(
    open_all: OpenAll, data_settings: MakeSettings, mnist_dir: Path
) -> None:
    """Clients of two classes each are tested on all ten, and a client alone; training shares are as with official."""
    same = {"dataset": "mnist", "data_dir": str(mnist_dir), "partition": "pathological", **WHOLE}
    everyone, own = (open_all(5, **same, test_from=part) for part in ("official-all", "official"))
    for client, narrow in zip(everyone, own, strict=True):
        assert numbers(client.test_inputs) == list(range(400, 500))
        np.testing.assert_array_equal(client.test_labels, np.arange(100) % 10)
        assert len(held(narrow)) == 2
        np.testing.assert_array_equal(client.train_inputs, narrow.train_inputs)
        assert client.train_inputs.flags.owndata
        assert not client.test_inputs.flags.owndata
        assert not client.test_inputs.flags.writeable
    settings = data_settings(
        **same | {"partition": "own", "train_samples": 30}, test_from="official-all"
    )
    alone = open_client_data(settings, seed=1, partition=4, num_partitions=9)
    assert len(alone.train_labels) == 30
    assert numbers(alone.test_inputs) == list(range(400, 500))


def test_a_cap_on_it_is_balanced_common_and_of_the_seed(open_all: OpenAll, mnist_dir: Path) -> None:
    few = {
        "dataset": "mnist",
        "data_dir": str(mnist_dir),
        "partition": "iid",
        "test_from": "official-all",
    }
    first, second, third = open_all(3, **few, test_samples=30)
    assert (np.bincount(first.test_labels) == 3).all()
    assert numbers(first.test_inputs) == numbers(second.test_inputs) == numbers(third.test_inputs)
    assert numbers(open_all(3, seed=7, **few, test_samples=30)[0].test_inputs) != numbers(
        first.test_inputs
    )


def test_every_class_as_often_of_what_nobody_trains_on(open_all: OpenAll, mnist_dir: Path) -> None:
    """The made-up MNIST has 50 images of a class: 30 to divide, 20 to test on."""
    same = {"dataset": "mnist", "data_dir": str(mnist_dir), "partition": "dirichlet", "alpha": 0.5}
    everyone = open_all(5, **same, **WHOLE | {"test_from": "balanced", "train_fraction": 0.6})
    trained = sorted(number for client in everyone for number in numbers(client.train_inputs))
    assert np.bincount(np.array(trained) % 10).tolist() == [30] * 10
    for client in everyone:
        assert sorted(numbers(client.test_inputs) + trained) == list(range(500))
    few = open_all(
        5, **same, **WHOLE | {"test_from": "balanced", "train_fraction": 0.6, "test_samples": 30}
    )
    for client in few:
        assert np.bincount(client.test_labels).tolist() == [3] * 10
        assert not set(numbers(client.test_inputs)) & set(trained)
    assert numbers(few[0].test_inputs) != numbers(few[1].test_inputs)


def test_of_ones_own_domain_however_skewed_the_training_share(open_all: OpenAll) -> None:
    skewed = {"dataset": "digit-domains", "partition": "feature-label-shift", "alpha": 0.3,
        "clients_per_domain": "2,1,1,1,1"}  # fmt: skip
    everyone = open_all(6, **skewed, **WHOLE | {"test_from": "balanced", "train_fraction": 0.8})
    for client in everyone:
        trained = np.bincount(client.train_labels, minlength=10)
        assert trained.max() > 5 * trained.min()
        assert np.bincount(client.test_labels).tolist() == [10] * 10
    assert everyone[0].domain == everyone[1].domain != everyone[2].domain
    np.testing.assert_array_equal(everyone[0].test_inputs, everyone[1].test_inputs)
    assert not {one.tobytes() for one in everyone[0].test_inputs} & {
        one.tobytes() for one in everyone[1].train_inputs
    }


def test_validation_samples_are_taken_from_training_and_change_nothing_else(
    open_all: OpenAll,
) -> None:
    same = {
        "dataset": "digit-domains",
        "partition": "dirichlet",
        "alpha": 0.5,
        "total_samples": 600,
        **WHOLE,
    }
    fifth = {"validation_fraction": 0.2}
    whole, some, again, other = (
        open_all(4, **same, **more) for more in ({}, fifth, fifth, fifth | {"seed": 7})
    )
    for before, client in zip(whole, some, strict=True):
        assert not len(before.validation_labels)
        np.testing.assert_array_equal(client.test_inputs, before.test_inputs)
        assert len(client.validation_labels) == round(0.2 * len(before.train_labels))
        parts = [images.tobytes() for images in (*client.train_inputs, *client.validation_inputs)]
        assert sorted(parts) == sorted(images.tobytes() for images in before.train_inputs)
        assert set(client.train_labels) == set(before.train_labels)
    np.testing.assert_array_equal(again[2].validation_inputs, some[2].validation_inputs)
    assert not np.array_equal(other[2].validation_inputs, some[2].validation_inputs)
    for client in open_all(
        3, dataset="digits", partition="iid", train_samples=4, validation_fraction=0.1
    ):
        assert len(client.train_labels) == 4
        assert client.validation_inputs.shape == (0, 1, 8, 8)  # too small for one


def test_a_rate_of_every_class_keeps_its_label_and_at_least_one() -> None:
    labels = np.repeat([0, 3, 4, 7], [10, 5, 1, 100])
    labels.flags.writeable = False
    hidden = hide_labels(labels, 0.2, 0)
    assert [int((hidden == label).sum()) for label in (0, 3, 4, 7)] == [2, 1, 1, 20]
    kept = hidden != UNLABELLED
    assert (hidden == UNLABELLED).sum() == 116 - 24
    np.testing.assert_array_equal(hidden[kept], labels[kept])
    assert hide_labels(labels, 1.0, 3) is labels
    for rate in (1e-9, 0.001, 0.005):
        hidden = hide_labels(np.repeat([1, 2], [100, 3]), rate, 0)
        assert (hidden == 1).sum() == (hidden == 2).sum() == 1


def test_what_is_labelled_at_a_rate_is_labelled_at_every_larger_one() -> None:
    labels = np.arange(300) % 3
    sets = [
        set(np.flatnonzero(hide_labels(labels, rate, 5) != UNLABELLED))
        for rate in (0.05, 0.1, 0.2, 0.5, 1.0)
    ]
    assert [len(one) for one in sets] == [15, 30, 60, 150, 300]
    assert all(small < large for small, large in pairwise(sets))


SHIFT: dict[str, Any] = {
    "dataset": "digit-domains",
    "partition": "feature-shift",
    "train_samples": 0,
}


def test_only_training_labels_change(open_all: OpenAll) -> None:
    for whole, few in zip(
        open_all(5, **SHIFT), open_all(5, **SHIFT, positive_rate=0.1), strict=True
    ):
        np.testing.assert_array_equal(few.train_inputs, whole.train_inputs)
        np.testing.assert_array_equal(few.test_inputs, whole.test_inputs)
        np.testing.assert_array_equal(few.test_labels, whole.test_labels)
        known = few.train_labels != UNLABELLED
        np.testing.assert_array_equal(few.train_labels[known], whole.train_labels[known])
        assert set(few.train_labels[known]) == set(whole.train_labels)
        every = np.bincount(whole.train_labels)
        np.testing.assert_array_equal(np.bincount(few.train_labels[known]), np.round(0.1 * every))
        assert few.domain == whole.domain


def test_which_labels_depends_on_seed_and_client_alone(open_all: OpenAll, cache_dir: Path) -> None:
    same = {"dataset": "digits", "partition": "iid", "train_samples": 0, "positive_rate": 0.2}
    first, again = open_all(3, **same), open_all(3, **same)
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.train_labels, two.train_labels)
    known = [client.train_labels != UNLABELLED for client in (*first, *open_all(3, seed=7, **same))]
    assert len({mask.tobytes() for mask in known}) == 6
    before = set(cache_dir.iterdir())
    open_all(3, **same | {"positive_rate": 0.3})  # rates share one division in the cache
    assert set(cache_dir.iterdir()) == before


STATIC = [
    ({"dataset": "digits", "partition": "feature-shift"}, r"partition = 'feature-shift'.*'digits' has no domains"),
    ({"dataset": "mnist", "partition": "feature-label-shift"}, "'mnist' has no domains"),
    ({"test_from": "official"}, r"test-from = 'official'.*no official test part"),
    ({"dataset": "image-folder", "partition": "own", "test_from": "official"}, "no official test part"),
    ({"dataset": "digits", "test_from": "official-all"},
     r"test-from = 'official-all': dataset 'digits' has no official"),
    ({"clients_per_domain": "1,two"}, "clients-per-domain = '1,two': must be numbers"),
    ({"clients_per_domain": "1,,2"}, "must be numbers"),
    ({"clients_per_domain": "1,-2"}, "must be numbers"),
    ({"clients_per_domain": "1,4,2"}, r"'1,4,2' has 3 numbers.*5 domains: scanned, printed"),
    ({"dataset": "mnist", "partition": "pathological", "classes_per_client": 11}, "classes-per-client = 11.*10"),
    ({"dataset": "image-folder", "classes": "a,b,c", "partition": "pathological", "classes_per_client": 4},
     "classes-per-client = 4.*3 classes"),
    ({"classes": "a,b"}, "classes = 'a,b': only for data of your own"),
    ({"dataset": "image-folder", "partition": "own", "classes": "a,,b"}, "classes = 'a,,b': must be different names"),
    ({"dataset": "image-folder", "partition": "own", "classes": "a,a"}, "must be different names"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), STATIC)
def test_wrong_settings_need_no_data(
    data_settings: MakeSettings, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_data_settings(data_settings(**changes))


def test_all_problems_at_once_and_every_data_set_can_be_right(data_settings: MakeSettings) -> None:
    with pytest.raises(DataError) as caught:
        check_data_settings(
            data_settings(
                dataset="digits", test_from="official", classes="a", clients_per_domain="x"
            )
        )
    assert len(str(caught.value).splitlines()) == 4
    for dataset in DATASETS:
        check_data_settings(data_settings(dataset=dataset, partition="iid"))
    check_data_settings(
        data_settings(dataset="domain-folder", partition="feature-shift", clients_per_domain="1,2")
    )


DIVIDING: list[tuple[dict[str, Any], int, str, str]] = [
    *[
        ({"n": n}, 5, "", f"partition-id = {n}: must be from 0 to num-partitions - 1 = 4")
        for n in (-1, 5)
    ],
    ({}, 0, "", "num-partitions = 0"),
    (
        {"clients_per_domain": "1,4,2,2,1"},
        5,
        "",
        r"'1,4,2,2,1' sums to 10 clients, but num-partitions is 5",
    ),
    ({}, 5, "attic", r"domain = 'attic'.*scanned, printed, photo, inverted, coloured"),
    ({"partition": "iid"}, 5, "photo", r"domain = 'photo': has no meaning with partition 'iid'"),
    ({"dataset": "digits", "partition": "own"}, 5, "photo", r"domain = 'photo'.*its domains: none"),
    (
        {"dataset": "digits", "partition": "iid"},
        1000,
        "",
        r"1797 samples are too few for 1000 clients",
    ),
    ({"total_samples": 20}, 11, "", r"20 samples are too few for 11 clients"),
    ({"total_samples": 30}, 15, "", r"(would have|has) \d+ samples"),
    ({"total_samples": 9999}, 5, "", r"total-samples = 9999: there are only 2500"),
    (
        {"dataset": "digits", "partition": "pathological"},
        890,
        "",
        r"class \d+ has 17\d samples for 178 clients",
    ),
]


@pytest.mark.parametrize(("changes", "clients", "domain", "message"), DIVIDING)
def test_data_that_cannot_be_divided_as_asked(
    data_settings: MakeSettings, changes: dict[str, Any], clients: int, domain: str, message: str
) -> None:
    settings = data_settings(**{key: value for key, value in changes.items() if key != "n"})
    with pytest.raises(DataError, match=message):
        open_client_data(
            settings, seed=1, partition=changes.get("n", 0), num_partitions=clients, domain=domain
        )


def test_a_domain_without_samples_is_no_domain_less(
    data_settings: MakeSettings, domain_dir: Path
) -> None:
    """Two clients would be of the first two, and nobody would miss the third; a site has one domain only."""
    (domain_dir / "watercolour").mkdir()
    settings = data_settings(
        dataset="domain-folder", data_dir=str(domain_dir), partition="feature-shift"
    )
    with pytest.raises(
        DataError, match="= 'feature-shift': domain 'watercolour' is empty; fill or remove it"
    ):
        open_client_data(settings, seed=1, partition=0, num_partitions=2)
    assert (
        open_client_data(settings, seed=1, partition=0, num_partitions=1, domain="photo").domain
        == "photo"
    )


def test_the_domains_and_classes_of_files_count(
    data_settings: MakeSettings, domain_dir: Path, mnist_dir: Path
) -> None:
    for changes, said in (
        ({"clients_per_domain": "1,1,1"}, r"names 3 domains; the data have 2: photo, sketch"),
        (
            {"partition": "pathological", "classes_per_client": 4},
            "= 4: the data have only 3 classes",
        ),
    ):
        settings = data_settings(dataset="domain-folder", data_dir=str(domain_dir), **changes)
        with pytest.raises(DataError, match=said):
            open_client_data(settings, seed=1, partition=0, num_partitions=3)
    labels = mnist_dir / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:8] + bytes(100))
    pathological = {"partition": "pathological", "classes_per_client": 1, "test_from": "official"}
    settings = data_settings(dataset="mnist", data_dir=str(mnist_dir), **pathological)
    with pytest.raises(DataError, match="the official test part has no sample of classes"):
        open_client_data(settings, seed=1, partition=0, num_partitions=10)

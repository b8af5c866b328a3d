"""What is wrong with the settings is said before data are read, or when they are divided."""

from pathlib import Path
from typing import Any

import pytest

from protofl_common.config.datasets import DATASETS
from protofl_common.data import DataError, check_data_settings, open_client_data

from .conftest import MakeSettings

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
def test_wrong_settings_are_found_without_data(
    data_settings: MakeSettings, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_data_settings(data_settings(**changes))


def test_all_problems_at_once(data_settings: MakeSettings) -> None:
    with pytest.raises(DataError) as caught:
        check_data_settings(data_settings(dataset="digits", test_from="official", classes="a", clients_per_domain="x"))
    assert len(str(caught.value).splitlines()) == 4


def test_every_data_set_can_be_right(data_settings: MakeSettings) -> None:
    for dataset in DATASETS:
        check_data_settings(data_settings(dataset=dataset, partition="iid"))
    check_data_settings(data_settings(dataset="domain-folder", partition="feature-shift", clients_per_domain="1,2"))


DIVIDING: list[tuple[dict[str, Any], int, str, str]] = [
    ({"clients_per_domain": "1,4,2,2,1"}, 5, "", r"'1,4,2,2,1' sums to 10 clients, but num-partitions is 5"),
    ({}, 5, "attic", r"domain = 'attic'.*scanned, printed, photo, inverted, coloured"),
    ({"partition": "iid"}, 5, "photo", r"domain = 'photo': has no meaning with partition 'iid'"),
    ({"dataset": "digits", "partition": "own"}, 5, "photo", r"domain = 'photo'.*its domains: none"),
    ({"dataset": "digits", "partition": "iid"}, 1000, "", r"1797 samples are too few for 1000 clients"),
    ({"total_samples": 20}, 11, "", r"20 samples are too few for 11 clients"),
    ({"total_samples": 30}, 15, "", r"(would have|has) \d+ samples"),
    ({"total_samples": 9999}, 5, "", r"total-samples = 9999: there are only 2500"),
    ({"dataset": "digits", "partition": "pathological"}, 890, "", r"class \d+ has 17\d samples for 178 clients"),
]


@pytest.mark.parametrize(("changes", "clients", "domain", "message"), DIVIDING)
def test_data_that_cannot_be_divided_as_asked(
    data_settings: MakeSettings, changes: dict[str, Any], clients: int, domain: str, message: str
) -> None:
    settings = data_settings(**changes)
    with pytest.raises(DataError, match=message):
        open_client_data(settings, seed=1, partition=0, num_partitions=clients, domain=domain)


@pytest.mark.parametrize(("partition", "clients"), [(-1, 5), (5, 5), (0, 0)])
def test_partition_id_out_of_range(data_settings: MakeSettings, partition: int, clients: int) -> None:
    said = f"partition-id = {partition}: must be from 0 to num-partitions - 1 = 4" if clients else "num-partitions = 0"
    with pytest.raises(DataError, match=said):
        open_client_data(data_settings(), seed=1, partition=partition, num_partitions=clients)


def test_the_domains_and_the_classes_of_a_folder_count(data_settings: MakeSettings, domain_dir: Path) -> None:
    for changes, said in (
        ({"clients_per_domain": "1,1,1"}, r"names 3 domains; the data have 2: photo, sketch"),
        ({"partition": "pathological", "classes_per_client": 4}, "= 4: the data have only 3 classes"),
    ):
        settings = data_settings(dataset="domain-folder", data_dir=str(domain_dir), **changes)
        with pytest.raises(DataError, match=said):
            open_client_data(settings, seed=1, partition=0, num_partitions=3)


def test_official_test_part_that_lacks_the_clients_classes(data_settings: MakeSettings, mnist_dir: Path) -> None:
    labels = mnist_dir / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:8] + bytes(100))
    pathological = {"partition": "pathological", "classes_per_client": 1, "test_from": "official"}
    settings = data_settings(dataset="mnist", data_dir=str(mnist_dir), **pathological)
    with pytest.raises(DataError, match="the official test part has no sample of classes"):
        open_client_data(settings, seed=1, partition=0, num_partitions=10)

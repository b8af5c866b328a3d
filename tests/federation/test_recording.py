"""What the server records for the report: margins, who the sites are, and the division of the data."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType

from protofl_common.maths.prototypes import MAX_COMPARED, Prototypes, margins
from server_app.callbacks import artifacts as recording
from tests.support.attacks import by
from tests.support.given import Patch
from tests.support.harness import Outcome, run_config, run_federation


@pytest.mark.parametrize(("points", "labels", "wanted"), [
    ([(0, 0), (3, 4), (0, 2)], [0, 1, 3], [2, 13**0.5, np.nan, 2, np.nan]),  # classes 2 and 4 are absent
    ([(0, 0), (0, 1), (0, 5)], [0, 0, 1], [4, 4]),  # prototypes of one class are no neighbours
    ([(0, 0), (0, 1)], [1, 1], [np.nan] * 3),  # a single class has no margin
    ([(1, 1), (1, 1)], [0, 1], [0, 0]),
])  # fmt: skip
def test_margins_in_the_plane(points: list[tuple[float, float]], labels: list[int], wanted: list[float]) -> None:
    found = margins(Prototypes(torch.tensor(points), torch.tensor(labels)), len(wanted))
    np.testing.assert_allclose(found.numpy(), wanted)


def test_too_many_prototypes_are_not_compared() -> None:
    many = Prototypes(torch.zeros(MAX_COMPARED + 1, 2), torch.arange(MAX_COMPARED + 1))
    assert margins(many, MAX_COMPARED + 1).isnan().all()


def test_margins_of_20_clients_with_100_classes_take_no_time() -> None:
    """The bound is wide: machines may be busy; it takes some 20 ms."""
    sets = [Prototypes(torch.randn(100, 512), torch.arange(100)) for _ in range(20)]
    start = time.process_time()
    for one in sets:
        margins(one, 100)
    assert time.process_time() - start < 1


SMALL: dict[str, Any] = {"dataset": "digits", "train_samples": 30, "test_samples": 30}


def sites_of(outcome: Outcome) -> dict[str, Any]:
    return json.loads((outcome.folder / "sites.json").read_text())["sites"]


def test_with_hidden_labels_all_training_samples_are_counted(tmp_path: Path) -> None:
    config = run_config(tmp_path, algo="fedproto", partition="iid", positive_rate=0.5, rounds=1, **SMALL)
    assert all(sum(facts["train-classes"]) == 30 for facts in sites_of(run_federation(config, 2)).values())


def test_a_site_that_is_no_part_of_the_division_has_no_counts(tmp_path: Path) -> None:
    """It says it is client 1 of 2, but its data are those of another domain; and one has no partition at all."""
    nodes: dict[int, dict[str, Any]] = {
        1: {"partition-id": 0, "num-partitions": 2},
        2: {"partition-id": 1, "num-partitions": 2, "domain": "photo"},
        3: {"site-name": "north", "domain": "photo"},
    }
    sites = sites_of(run_federation(run_config(tmp_path, algo="fedtgp", num_clients=3, rounds=1), nodes=nodes))
    assert {site for site, facts in sites.items() if "train-classes" in facts} == {"site-0"}


def test_who_claims_a_million_partitions_makes_no_work(tmp_path: Path, monkeypatch: Patch) -> None:
    def claims(message: Message, reply: Message) -> Message:
        reply.content.config_records["site"]["num_partitions"] = 10**6
        return reply

    asked: list[int] = []
    original = recording.shares_of
    monkeypatch.setattr(recording, "shares_of", lambda *a: asked.append(a[3]) or original(*a))
    config = run_config(tmp_path, num_clients=2, rounds=1, partition="iid", **SMALL)
    run_federation(config, 2, by({1000: claims, 1001: claims}, MessageType.QUERY))
    assert not asked


def test_an_empty_cache_on_the_server_gives_no_division(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(recording, "data_if_cached", lambda settings: None)
    outcome = run_federation(run_config(tmp_path, rounds=1, partition="iid", **SMALL), 2)
    assert not any("train-classes" in facts for facts in sites_of(outcome).values())

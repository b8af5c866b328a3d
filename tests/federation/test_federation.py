"""Whole runs in one process: results, repetition, and what is refused before any client trains."""

import itertools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from flwr.app import Message, MessageType
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from safetensors.torch import load_file

from protofl_common.config.options import SettingsError
from protofl_common.data import DataError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings, default_run_config, flatten
from server_app.callbacks.screen import final_table
from server_app.network.membership import FederationError
from tests.support.declared import MINIMISED
from tests.support.given import Patch, Printed
from tests.support.harness import LONG, RUN_ID, LocalGrid, run_config, run_federation
from tests.support.results import without_times
from tests.support.sites import real_sites


@pytest.mark.parametrize("arrive", [True, False])
def test_half_sent_messages_are_sent_again(
    arrive: bool, tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    """Every push fails once, whether its messages have arrived all the same or not."""
    wanted = run_federation(run_config(tmp_path / "undisturbed", rounds=3), clients=3)
    push, calls = LocalGrid.push_messages, itertools.count()

    def failing_at_first(grid: LocalGrid, messages: Iterable[Message]) -> list[str]:
        fails = next(calls) % 2 == 0
        ids = push(grid, messages) if arrive or not fails else []
        if fails:
            raise ObjectPushError("an-object", 1, "a-session")
        return ids

    monkeypatch.setattr(LocalGrid, "push_messages", failing_at_first)
    found = run_federation(run_config(tmp_path / "disturbed", rounds=3), clients=3)
    means = [
        load_file(outcome.folder / "prototypes.safetensors")["means"] for outcome in (found, wanted)
    ]
    assert torch.equal(*means)
    assert without_times(found.rows) == without_times(wanted.rows)
    assert capsys.readouterr().out.count("half sent; sending them again") == next(calls) // 2


def test_a_superlink_that_keeps_losing_messages_ends_the_run(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    push = MagicMock(side_effect=ObjectPushError("an-object", 1, "a-session"))
    monkeypatch.setattr(LocalGrid, "push_messages", push)
    with pytest.raises(ObjectPushError):
        run_federation(run_config(tmp_path), clients=2)
    assert [len(list(messages)) for (messages,), _ in push.call_args_list] == [2, 2, 2]


WITHOUT_HEAD = {"fedpcl"}
"""Algorithms that train no classifier; frozen features make their prototypes useful before any training."""


@pytest.mark.parametrize("algo", CATALOG)
def test_a_run_leaves_complete_results(algo: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, algo=algo, run_name="mine", train_samples=10, test_samples=20)
    outcome = run_federation(config, clients=3)
    assert outcome.folder.name == "mine"
    kinds = [(row["kind"], row["evaluated-after-round"]) for row in outcome.rows]
    assert kinds == [("round", 0), ("round", 1), ("final", 2)]
    assert all(row["valid"] == 3 and len(row["clients"]) == 3 for row in outcome.rows)
    assert ("head" in outcome.summary["accuracy"]) == (algo not in WITHOUT_HEAD)
    down = CATALOG[algo].exchange.down
    with_prototypes = "prototypes" in down
    assert ("prototype" in outcome.summary["accuracy"]) == with_prototypes
    saved = flatten(tomllib.loads((outcome.folder / "settings.toml").read_text()))
    assert Settings.from_run_config(default_run_config() | saved) == Settings.from_run_config(
        config
    )
    assert (outcome.folder / "prototypes.safetensors").exists() == with_prototypes
    assert (outcome.folder / "weights.safetensors").exists() == ("weights" in down)
    assert len(list((outcome.folder / "clients").iterdir())) == 3
    assert outcome.rows[1]["losses"].keys() == (
        {"total", *MINIMISED[algo]} if MINIMISED[algo] else set()
    )
    assert " on digit-domains after 2 rounds" in " ".join(final_table(outcome.summary).split())
    own = final_table(
        outcome.summary | {"partition": "own", "rounds": 1}
    )  # names no data set that sites did not use
    assert " on the sites' own data after 1 round " in " ".join(own.split())


@pytest.mark.parametrize("algo", CATALOG)
def test_training_helps(algo: str, tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "dataset": "digits",
        "partition": "iid",
        "train_samples": 300,
        "test_samples": 150,
    }
    config = run_config(tmp_path, algo=algo, rounds=6, models="htcnn-3", batch_size=10, **data)
    outcome = run_federation(config | LONG, clients=2)
    assert all(figures["mean"] > 0.75 for figures in outcome.summary["accuracy"].values())
    if algo in WITHOUT_HEAD:
        before, after = (
            outcome.rows[0]["accuracy"]["prototype"],
            outcome.summary["accuracy"]["prototype"],
        )
        assert after["mean"] > before["mean"] + 0.02
    else:
        assert outcome.rows[0]["accuracy"]["head"]["mean"] < 0.4


def test_the_same_seed_gives_identical_metrics_and_another_does_not(tmp_path: Path) -> None:
    named = {"a": 1, "b": 1, "c": 2}
    half = {"participation": 0.5, "rounds": 3}
    runs = [
        run_federation(run_config(tmp_path / name, seed=seed, **half), clients=6)
        for name, seed in named.items()
    ]
    first, again, other = (without_times(run.rows) for run in runs)
    assert first == again
    assert first != other
    means = [load_file(run.folder / "prototypes.safetensors")["means"] for run in runs]
    assert torch.equal(means[0], means[1])


def test_node_ids_do_not_matter(tmp_path: Path) -> None:
    rows = []
    for name, ids in (
        ("forward", {100 + i: i for i in range(4)}),
        ("backward", {900 - i: i for i in (3, 2, 1, 0)}),
    ):
        nodes = {node: {"partition-id": i, "num-partitions": 4} for node, i in ids.items()}
        rows.append(
            run_federation(run_config(tmp_path / name, participation=0.5), nodes=nodes).rows
        )
    assert without_times(rows[0]) == without_times(rows[1])


def test_private_state_lives_where_the_site_says(tmp_path: Path) -> None:
    outcome = run_federation(run_config(tmp_path), nodes=real_sites(2, tmp_path / "disk"))
    for i in (0, 1):
        folder = (
            tmp_path / f"disk-{i}" / f"{outcome.folder.name}-{RUN_ID}" / "clients" / f"site-{i}"
        )
        assert [file.parent for file in (tmp_path / f"disk-{i}").rglob("*.safetensors")] == [
            folder
        ] * 2
    assert not (outcome.folder / "clients").exists()


def expect_refusal(kind: type[Exception], said: str, config: dict[str, Any], **kwargs: Any) -> None:
    trained: list[str] = []

    def watch(message: Message, reply: Message) -> Message:
        trained.append(message.metadata.message_type)
        return reply

    with pytest.raises(kind, match=re.escape(said)):
        run_federation(config, tamper=watch, **kwargs)
    assert MessageType.TRAIN not in trained


def test_a_round_of_sites_with_operators_asks_two_at_least(tmp_path: Path) -> None:
    """What is merged of one is its own upload, and the others would receive that."""
    found = run_federation(run_config(tmp_path, participation=0.1, rounds=2), nodes=real_sites(3))
    assert {row["valid"] for row in found.rows[:-1]} == {2}


REFUSED: dict[str, tuple[type[Exception], dict[str, Any], dict[int, dict[str, Any]] | None]] = {
    "lr = 'abc': must be a number above 0": (SettingsError, {"lr": "abc"}, None),
    "plain folder name": (SettingsError, {"run_name": "../x"}, None),
    "nowhere": (FederationError, {"dataset": "mnist", "partition": "iid", "data_dir": "nowhere"}, None),
    "feature-shift": (DataError, {"dataset": "digits"}, None),
    "3 of 5 clients were ready after 1 s (join-timeout)": (FederationError, {"num_clients": 5}, None),
    "min-replies = 4: a round asks only 3 sites": (FederationError, {"min_replies": 4}, None),
    "only 2 sites (participation = 0.5)": (FederationError, {"min_replies": 3, "participation": 0.5}, None),
    "num-clients = 0": (FederationError, {"join_timeout": 1e9}, {1: {"site-name": "north", "partition-id": 0}}),
    "the sites differ in arch": (FederationError, {"algo": "fedavg"}, {1: {"partition-id": 0, "num-partitions": 2},
        2: {"partition-id": 1, "num-partitions": 2, "arch": "mnist-cnn"}}),
}  # fmt: skip
"""What is said -> the error, the settings and the nodes for which it is."""


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_work_ends_the_run_before_any_client_trains(
    said: str, tmp_path: Path, capsys: Printed
) -> None:
    kind, settings, nodes = REFUSED[said]
    expect_refusal(
        kind, said, run_config(tmp_path, **{"join_timeout": 1.0} | settings), clients=3, nodes=nodes
    )
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("facts", "said"), [
    ({}, "give partition-id and num-partitions, or a site-name"),
    ({"partition-id": "x", "num-partitions": 2}, "partition-id = 'x'"),
    ({"site-name": "../../etc"}, "site-name"),
    ({"partition-id": 1, "num-partitions": 2, "arch": "vgg"}, "arch = 'vgg': choose one of"),
    ({"partition-id": 1, "num-partitions": 2, "device": "gpu"}, "device = 'gpu': choose one of auto, cpu, cuda"),
    ({"partition-id": 1, "num-partitions": 2, "domian": "photo"}, "domian: unknown key; did you mean domain?"),
    ({"partition-id": 1, "num-partitions": 3}, "the sites differ in num-partitions"),
    ({"partition-id": 1, "num-partitions": 2, "domain": "mars"}, "DataError (domain): its data"),
    ({"partition-id": 0, "num-partitions": 2}, "two clients call themselves site-0"),
])  # fmt: skip
def test_a_wrong_node_config_is_told_before_training(
    facts: dict[str, Any], said: str, tmp_path: Path
) -> None:
    nodes = {11: {"partition-id": 0, "num-partitions": 2}, 12: facts}
    expect_refusal(FederationError, said, run_config(tmp_path, join_timeout=5.0), nodes=nodes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_told_with_the_usual_reason(tmp_path: Path) -> None:
    config = run_config(tmp_path, device="cuda")
    expect_refusal(
        FederationError, "asks for a part of one: client-resources-num-gpus=0.25", config
    )


def test_participation_asks_a_part_of_the_sites_and_at_the_end_all(tmp_path: Path) -> None:
    outcome = run_federation(run_config(tmp_path, participation=0.5, rounds=3), clients=5)
    assert [row["asked"] for row in outcome.rows] == [2, 2, 2, 5]
    assert len({tuple(row["clients"]) for row in outcome.rows[:3]}) > 1
    best = outcome.summary["best-accuracy"]["head"]
    assert best == {
        "mean": outcome.summary["accuracy"]["head"]["mean"],
        "after-round": 3,
        "chosen-on": "test",
    }

"""Whole runs in one process: results, repetition, and what is refused before any client trains."""

import itertools
import re
import tomllib
from unittest.mock import MagicMock

import pytest
import torch
from flwr.app import MessageType
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from protofl_common.config.options import SettingsError, flatten
from protofl_common.data import DataError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings
from protofl_common.runs.figures import final_table
from server_app.network.membership import FederationError
from tests.support.declared import MINIMISED
from tests.support.harness import (
    LONG,
    RUN_ID,
    LocalGrid,
    federate,
    run_config,
    run_federation,
    settings_of,
)
from tests.support.results import left_by, without_times
from tests.support.sites import real_sites


@pytest.mark.parametrize("arrive", [True, False])
def test_half_sent_messages_are_sent_again(arrive, tmp_path, monkeypatch, capsys):
    """Every push to the SuperLink fails once; with ``arrive`` its messages arrive all the same."""
    wanted = federate(tmp_path / "undisturbed", clients=3, rounds=3)
    push = LocalGrid.push_messages
    tries = itertools.count()  # 0, 1, …: two of each push, of which the second succeeds

    def failing_at_first(grid, messages):
        is_second_try = next(tries) % 2 == 1
        if is_second_try:
            return push(grid, messages)
        if arrive:
            push(grid, messages)
        raise ObjectPushError("an-object", 1, "a-session")

    monkeypatch.setattr(LocalGrid, "push_messages", failing_at_first)
    found = federate(tmp_path / "disturbed", clients=3, rounds=3)

    assert left_by(found.folder) == left_by(wanted.folder)
    pushes = next(tries) // 2
    assert capsys.readouterr().out.count("half sent; sending them again") == pushes


def test_a_superlink_that_keeps_losing_messages_ends_the_run(tmp_path, monkeypatch):
    """The server tries three times to send its messages to two clients."""
    push = MagicMock(side_effect=ObjectPushError("an-object", 1, "a-session"))
    monkeypatch.setattr(LocalGrid, "push_messages", push)

    with pytest.raises(ObjectPushError):
        federate(tmp_path, clients=2)
    messages_of_each_try = [len(list(messages)) for (messages,), _ in push.call_args_list]
    assert messages_of_each_try == [2, 2, 2]


WITHOUT_HEAD = {"fedpcl"}
"""Algorithms that train no classifier.

Frozen features make their prototypes useful before any training.
"""


@pytest.mark.parametrize("algo", CATALOG)
def test_a_run_leaves_complete_results(algo, tmp_path):
    """Rows, figures and files of every algorithm after two rounds, as its catalog's row says."""
    config = run_config(tmp_path, algo=algo, run_name="mine", train_samples=10, test_samples=20)
    outcome = run_federation(config, clients=3)

    assert outcome.folder.name == "mine"

    kinds = [(row["kind"], row["evaluated-after-round"]) for row in outcome.rows]
    assert kinds == [("round", 0), ("round", 1), ("final", 2)]
    for row in outcome.rows:
        assert row["valid"] == 3
        assert len(row["clients"]) == 3

    # terms that need prototypes are there from the second round on
    losses = {"total", *MINIMISED[algo]} if MINIMISED[algo] else set()
    assert outcome.rows[1]["losses"].keys() == losses

    received = CATALOG[algo].exchange.down
    has_prototypes = "prototypes" in received

    assert ("head" in outcome.summary["accuracy"]) == (algo not in WITHOUT_HEAD)
    assert ("prototype" in outcome.summary["accuracy"]) == has_prototypes
    assert (outcome.folder / "prototypes.safetensors").exists() == has_prototypes
    assert (outcome.folder / "weights.safetensors").exists() == ("weights" in received)
    assert len(list((outcome.folder / "clients").iterdir())) == 3

    saved = flatten(tomllib.loads((outcome.folder / "settings.toml").read_text()))
    assert settings_of(saved) == Settings.from_run_config(config)

    assert final_table(outcome.summary).title.endswith(" on digit-domains after round 2")

    # the table names no data set that sites did not use
    own_data = final_table(outcome.summary | {"partition": "own", "rounds": 1})
    assert own_data.title.endswith(" on the sites' own data after round 1")


@pytest.mark.parametrize("algo", CATALOG)
def test_training_helps(algo, tmp_path):
    """Of ten classes of digits three quarters and more are right in the end, a few before."""
    config = run_config(
        tmp_path,
        algo=algo,
        rounds=6,
        models="htcnn-3",
        batch_size=10,
        dataset="digits",
        partition="iid",
        train_samples=300,
        test_samples=150,
    )
    outcome = run_federation(config | LONG, clients=2)

    first = outcome.rows[0]["accuracy"]
    last = outcome.summary["accuracy"]

    for figures in last.values():
        assert figures["mean"] > 0.75
    if algo in WITHOUT_HEAD:
        assert last["prototype"]["mean"] > first["prototype"]["mean"] + 0.02
    else:
        assert first["head"]["mean"] < 0.4


def test_node_ids_do_not_matter(tmp_path):
    """Clients under other node ids, in reverse order, have the same rows."""
    nodes = [{"partition-id": i, "num-partitions": 4} for i in range(4)]
    forward = {100 + i: nodes[i] for i in (0, 1, 2, 3)}
    backward = {900 - i: nodes[i] for i in (3, 2, 1, 0)}

    rows = {}
    for name, numbered in (("forward", forward), ("backward", backward)):
        config = run_config(tmp_path / name, participation=0.5)
        rows[name] = without_times(run_federation(config, nodes=numbered).rows)

    assert rows["forward"] == rows["backward"]


def test_private_state_lives_where_the_site_says(tmp_path):
    """Each of two sites has a state-dir of its own; the server's folder has nothing of it."""
    outcome = federate(tmp_path, nodes=real_sites(2, tmp_path / "disk"))

    run = f"{outcome.folder.name}-{RUN_ID}"
    for i in (0, 1):
        folder = tmp_path / f"disk-{i}" / run / "clients" / f"site-{i}"
        files = list((tmp_path / f"disk-{i}").rglob("*.safetensors"))
        assert [file.parent for file in files] == [folder, folder]  # its state and its model

    assert not (outcome.folder / "clients").exists()


def expect_refusal(error, said, config, **on):
    """The run ends with this error, and no client has trained; ``on`` are its nodes or clients."""
    kinds = []

    def watch(message, reply):
        kinds.append(message.metadata.message_type)
        return reply

    with pytest.raises(error, match=re.escape(said)):
        run_federation(config, tamper=watch, **on)
    assert MessageType.TRAIN not in kinds


def test_a_round_of_sites_with_operators_asks_two_at_least(tmp_path):
    """With participation = 0.1 one of three would be asked.

    A merge of one upload is that upload, and the others would receive it.
    """
    found = federate(tmp_path, nodes=real_sites(3), participation=0.1, rounds=2)
    assert {row["valid"] for row in found.rows[:-1]} == {2}


REFUSED = {
    "lr = 'abc': must be a number above 0": (SettingsError, {"lr": "abc"}),
    "plain folder name": (SettingsError, {"run_name": "../x"}),
    "nowhere": (
        FederationError,
        {"dataset": "mnist", "partition": "iid", "data_dir": "nowhere"},
    ),
    "feature-shift": (DataError, {"dataset": "digits"}),
    "3 of 5 clients were ready after 1 s (join-timeout)": (FederationError, {"num_clients": 5}),
    "min-replies = 4: a round asks only 3 sites": (FederationError, {"min_replies": 4}),
    "only 2 sites (participation = 0.5)": (
        FederationError,
        {"min_replies": 3, "participation": 0.5},
    ),
}
"""What is said -> the error, and the settings for which it is."""


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_work_ends_the_run_before_any_client_trains(said, tmp_path, capsys):
    """The reason is in the error, and is printed."""
    error, settings = REFUSED[said]
    config = run_config(tmp_path, **{"join_timeout": 1.0} | settings)
    expect_refusal(error, said, config, clients=3)

    assert said in capsys.readouterr().out


def test_a_site_that_does_not_say_how_many_there_are_ends_the_run(tmp_path, capsys):
    """Its node config lacks ``num-partitions``. The run does not wait for `join-timeout`."""
    said = "num-clients = 0"
    one_site = {1: {"site-name": "north", "partition-id": 0}}
    expect_refusal(FederationError, said, run_config(tmp_path, join_timeout=1e9), nodes=one_site)

    assert said in capsys.readouterr().out


SECOND = {"partition-id": 1, "num-partitions": 2}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "give partition-id and num-partitions, or a site-name"),
        ({"partition-id": "x", "num-partitions": 2}, "partition-id = 'x'"),
        ({"site-name": "../../etc"}, "site-name"),
        (SECOND | {"arch": "vgg"}, "arch = 'vgg': choose one of"),
        (SECOND | {"device": "gpu"}, "device = 'gpu': choose one of auto, cpu, cuda"),
        (SECOND | {"domian": "photo"}, "domian: unknown key; did you mean domain?"),
        ({"partition-id": 1, "num-partitions": 3}, "the sites differ in num-partitions"),
        (SECOND | {"domain": "mars"}, "DataError (domain): its data"),
        ({"partition-id": 0, "num-partitions": 2}, "two clients call themselves site-0"),
    ],
)
def test_a_wrong_node_config_is_told_before_training(facts, said, tmp_path):
    nodes = {11: {"partition-id": 0, "num-partitions": 2}, 12: facts}
    expect_refusal(FederationError, said, run_config(tmp_path, join_timeout=5.0), nodes=nodes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_told_with_the_usual_reason(tmp_path, monkeypatch):
    """The usual reason is that Flower gives clients no part of a GPU unless it is told so."""
    # what a client that computes on a GPU sets for its whole process
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    said = "asks for a part of one: client-resources-num-gpus=0.25"
    expect_refusal(FederationError, said, run_config(tmp_path, device="cuda"))


def test_participation_asks_a_part_of_the_sites_and_at_the_end_all(tmp_path):
    """Half of five sites are two, not always the same; only the final figures are of all.

    So the best accuracy is the final one, as others cannot be compared with it.
    """
    outcome = federate(tmp_path, clients=5, participation=0.5, rounds=3)

    assert outcome.per_row("asked") == [2, 2, 2, 5]
    assert len({tuple(row["clients"]) for row in outcome.rows[:3]}) > 1

    final = outcome.summary["accuracy"]["head"]["mean"]
    best = outcome.summary["best-accuracy"]["head"]

    assert best == {"mean": final, "after-round": 3, "chosen-on": "test"}

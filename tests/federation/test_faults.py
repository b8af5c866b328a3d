"""Faults of a federation, in one process: who dies, comes back, comes late, or has no room on the disk."""

import errno
import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, MessageType
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from safetensors.torch import load_file, save_file

from server_app.checkpoint import Checkpoint, checkpoints
from server_app.network.membership import FederationError
from tests.support.accidents import fails, flip_a_bit, on_round
from tests.support.attacks import both, card_with, interrupted, lost, report_with, when
from tests.support.given import Patch, Printed
from tests.support.harness import LocalGrid, Nodes, Tamper, run_config, run_federation
from tests.support.results import assert_same, digests
from tests.support.sites import real_sites

SMALL: dict[str, Any] = {"run_name": "mine", "train_samples": 20, "test_samples": 20, "rounds": 4}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: Patch) -> None:
    monkeypatch.setattr("server_app.network.exchange.LOOK_EVERY", 0.05)
    monkeypatch.setattr("server_app.network.exchange.PATIENCE", 2.0)


def four() -> Nodes:
    return {1000 + i: {"partition-id": i, "num-partitions": 4} for i in range(4)}


def restarts(nodes: Nodes, **facts: Any) -> Tamper:
    """Once node 1002 has trained in round 2, it is another node, and its reply is lost."""
    return on_round(2, 1002, lambda *_: nodes.update({2002: nodes.pop(1002) | facts}))


def test_a_restarted_supernode_is_known_again_and_asked_again(
    tmp_path: Path, capsys: Printed
) -> None:
    """It has another node id, its own site name, and the state from before the round: nothing is lost."""
    nodes = four()
    wanted = run_federation(run_config(tmp_path / "a", **SMALL))
    assert_same(
        run_federation(run_config(tmp_path / "b", **SMALL), nodes=nodes, tamper=restarts(nodes)),
        wanted,
    )
    assert capsys.readouterr().out.count("back: site-2, on another node") == 1


@pytest.mark.parametrize("simulated", [True, False])
def test_a_dead_process_of_a_simulation_ends_the_run_before_the_round_counts(
    simulated: bool, tmp_path: Path
) -> None:
    """Ray gives its clients to no other process. A site that sends the like of such an error costs its own reply."""

    def died(message: Message, _: Message) -> Message:
        return Message(
            Error(0, "<class 'ray.exceptions.ActorDiedError'>:<'The actor died'>"), reply_to=message
        )

    def simulate(grid: LocalGrid) -> None:
        if simulated:
            grid.state = type("InMemoryLinkState", (), {"store_message_ins": None})()  # type: ignore[attr-defined]

    config, how = (
        run_config(tmp_path, **SMALL),
        {"tamper": on_round(2, 1002, died), "on_grid": simulate},
    )
    if not simulated:
        rows = run_federation(config, **how).rows
        assert [list(row["failed"]) for row in rows if row["kind"] == "round"] == [
            [],
            ["site-2"],
            [],
            [],
        ]
        return
    wanted = run_federation(run_config(tmp_path / "whole", **SMALL))
    with pytest.raises(
        FederationError, match=r"has died \(ActorDiedError\), so that site-2 did not answer.*resume"
    ):
        run_federation(config, **how)
    assert_same(run_federation(config | {"resume": True}, run_id=2), wanted)


@pytest.mark.parametrize("node", [1002, 2002])
def test_a_supernode_that_flower_has_given_up_is_asked_again_once_it_is_back(
    node: int, tmp_path: Path
) -> None:
    """An authenticated one keeps its node id, any other gets a new one. What the SuperLink loses is no death."""
    nodes, gone, accidents = four(), list[dict[str, Any]](), iter(["loses", "loses", "dies"])

    def happens(_: Message, reply: Message) -> Message | None:
        if (accident := next(accidents, "")) == "loses":
            raise ObjectPushError("an-object", 1, "a-session")
        return gone.append(nodes.pop(1002)) if accident else reply  # type: ignore[func-returns-value]

    def back_once_given_up(grid: LocalGrid) -> None:
        pull = grid.pull_messages

        def pull_messages(message_ids: Iterable[str]) -> list[Message]:
            replies = pull(message_ids)
            if gone and any(reply.has_error() for reply in replies):
                nodes[node] = gone.pop()
            return replies

        grid.pull_messages = pull_messages  # type: ignore[method-assign]

    wanted, dies = run_federation(run_config(tmp_path / "a", **SMALL)), on_round(2, 1002, happens)
    found = run_federation(
        run_config(tmp_path / "b", **SMALL), nodes=nodes, tamper=dies, on_grid=back_once_given_up
    )
    assert_same(found, wanted)
    assert len(found.grid.log) == len(wanted.grid.log) + 2 * 3 + 1 + (node != 1002)


def test_a_site_that_always_says_that_its_node_died_is_asked_three_times_and_costs_its_reply(
    tmp_path: Path,
) -> None:
    gone = when(
        lambda message, _: Message(Error(5, "gone"), reply_to=message), MessageType.TRAIN, 1001
    )
    outcome = run_federation(run_config(tmp_path, **SMALL), tamper=gone)
    assert [row["failed"] for row in outcome.rows] == 4 * [{"site-1": "gone"}] + [{}]
    assert [len(outcome.exchanged(number=number)) for number in (1, 2, 3, 4)] == 4 * [6]


def test_a_supernode_that_comes_back_later_misses_its_round(tmp_path: Path) -> None:
    nodes, gone = four(), Nodes()
    goes = on_round(2, 1002, lambda *_: gone.update({2002: nodes.pop(1002)}))
    returns = when(lambda _, reply: nodes.update(gone) or reply, MessageType.TRAIN, number=3)
    outcome = run_federation(run_config(tmp_path, **SMALL), nodes=nodes, tamper=both(goes, returns))
    assert [row["valid"] for row in outcome.rows] == [4, 3, 4, 4, 4]
    assert outcome.rows[1]["failed"] == {"site-2": "Node Unavailable"}


def test_who_comes_late_or_comes_back_and_does_not_fit_is_left_out(
    tmp_path: Path, capsys: Printed
) -> None:
    nodes, other = four(), {"arch": "mnist-cnn"}
    extra = {"site-name": "extra", "partition-id": 3, "num-partitions": 4, **other}
    joins = on_round(1, 1000, lambda message, reply: nodes.setdefault(1009, extra) and reply)
    config = run_config(tmp_path, algo="fedavg", num_clients=4, **SMALL)
    outcome = run_federation(config, nodes=nodes, tamper=both(joins, restarts(nodes, **other)))
    assert [row["valid"] for row in outcome.rows] == [4, 3, 3, 3, 3]
    said = capsys.readouterr().out
    assert "1 client cannot take part: extra: the sites differ in arch" in said
    assert "1 client cannot take part: site-2: the sites differ in arch" in said


def test_who_comes_back_without_validation_samples_does_not_end_a_run_that_may_stop_early(
    tmp_path: Path,
) -> None:
    nodes, none = real_sites(3), when(card_with(validation_samples=0), MessageType.QUERY, 2002)
    config = run_config(tmp_path, validation_fraction=0.3, early_stopping=4, **SMALL)
    assert (
        run_federation(config, nodes=nodes, tamper=both(restarts(nodes), none)).summary["rounds"]
        == 4
    )


def test_a_second_node_of_the_same_name_does_not_displace_a_living_one(
    tmp_path: Path, capsys: Printed
) -> None:
    nodes = four()
    comes = when(
        lambda _, reply: nodes.update({2002: dict(nodes[1002])}) or reply,
        MessageType.TRAIN,
        number=1,
    )
    outcome = run_federation(run_config(tmp_path, **SMALL), nodes=nodes, tamper=comes)
    trained = {
        message.metadata.dst_node_id
        for message, _ in outcome.grid.log
        if message.metadata.group_id == "4"
    }
    assert trained == {1000, 1001, 1002, 1003}
    assert (
        capsys.readouterr().out.count("warning: another client calls itself site-2; it waits until")
        == 1
    )


def test_who_takes_the_name_of_a_site_that_is_away_does_not_keep_it(
    tmp_path: Path, capsys: Printed
) -> None:
    """It has it until the site's own node is back; where a study names the site's key, never (test_studies)."""
    nodes = four()
    away = {1002: dict(nodes[1002])}
    returns = on_round(3, 1000, lambda _, reply: nodes.update(away) or reply)
    outcome = run_federation(
        run_config(tmp_path, **SMALL), nodes=nodes, tamper=both(restarts(nodes), returns)
    )
    trained = [
        message.metadata.dst_node_id
        for message, _ in outcome.grid.log
        if message.metadata.group_id == "4"
    ]
    assert {1002} == {1002, 2002} & set(trained)
    assert "back: site-2, on its own node" in capsys.readouterr().out


def test_a_silent_site_rests_and_is_tried_again(tmp_path: Path, capsys: Printed) -> None:
    config = run_config(tmp_path, round_timeout=0.5, max_silent_rounds=2, **SMALL | {"rounds": 6})
    outcome = run_federation(config, tamper=both(on_round(1, 1001, lost), on_round(2, 1001, lost)))
    assert [(row["asked"], row["missing"]) for row in outcome.rows[:3]] == [
        (4, ["site-1"]),
        (4, ["site-1"]),
        (3, []),
    ]
    assert [row["asked"] for row in outcome.rows] == [4, 4, 3, 3, 4, 4, 4]
    assert "site-1: silent 2 times running; not asked until round 5" in capsys.readouterr().out


def test_a_late_client_joins_the_next_round_with_the_global_prototypes(
    tmp_path: Path, capsys: Printed
) -> None:
    nodes = four()
    late = nodes.pop(1003)
    joins = on_round(2, 1000, lambda message, reply: nodes.setdefault(1003, late) and reply)
    outcome = run_federation(
        run_config(tmp_path, num_clients=3, **SMALL), nodes=nodes, tamper=joins
    )
    assert [row["valid"] for row in outcome.rows] == [3, 3, 4, 4, 4]
    first = next(
        message for message, _ in outcome.exchanged() if message.metadata.dst_node_id == 1003
    )
    assert first.metadata.group_id == "3"
    assert "prototypes" in first.content.array_records
    assert "new: site-3, cnn4, takes part from the next round" in capsys.readouterr().out


def test_scaffolds_c_is_the_mean_of_its_clients_whatever_becomes_of_their_replies(
    tmp_path: Path,
) -> None:
    """One is lost, one refused, some are cut, a client comes late, and the server dies and goes on."""
    nodes = four()
    late = nodes.pop(1003)
    joins = on_round(2, 1000, lambda _, reply: nodes.setdefault(1003, late) and reply)
    ends = both(on_round(3, 1001, report_with(round=9)), on_round(4, 1000, interrupted))
    config = run_config(tmp_path, algo="scaffold", num_clients=3, max_update_ratio=1.0, **SMALL)
    with pytest.raises(KeyboardInterrupt):
        run_federation(
            config, nodes=nodes, tamper=both(both(joins, on_round(2, 1002, fails)), ends)
        )
    folder = run_federation(
        config | {"resume": True}, 4, on_round(4, 1003, fails), nodes, run_id=2
    ).folder
    after = Checkpoint.read(checkpoints(folder)[0])
    of_clients = []
    for site, (number, part) in after.counted.items():
        newest = max((folder / "clients" / site).glob("*-*.safetensors"))
        state, counts = load_file(newest), part * (int(newest.name[:6]) == number)
        of_clients.append(
            [state[f"own/{i}"] + counts * state[f"change/{i}"] for i in range(len(state) // 2)]
        )
    assert sorted(number for number, _ in after.counted.values()) == [3, 4, 4, 4]
    assert min(part for _, part in after.counted.values()) < 1
    means = [torch.stack(of_all).mean(dim=0) for of_all in zip(*of_clients, strict=True)]
    assert means[0].any()
    torch.testing.assert_close(means, [after.state[f"control/{i}"] for i in range(len(means))])


def a_round_late(grids: list[LocalGrid], rounds: str, asks: str = MessageType.TRAIN) -> Tamper:
    """In these rounds the reply of node 1001 arrives while the next round waits for another client."""
    held: list[Message] = []

    def tamper(message: Message, reply: Message) -> Message | None:
        meta = message.metadata
        if (
            meta.message_type == MessageType.TRAIN
            and meta.dst_node_id == 1001
            and meta.group_id in rounds
        ):
            held.append(reply)
            return None
        if meta.message_type == asks and held and held[0].metadata.group_id != meta.group_id:
            late = held.pop()
            grids[0]._ready[late.metadata.reply_to_message_id] = late
        return reply

    return tamper


@pytest.mark.parametrize(("secagg", "asks"), [(False, "train"), (True, "query.advertise")])
def test_a_slow_reply_is_counted_as_late_and_the_round_goes_on(
    tmp_path: Path, secagg: bool, asks: str
) -> None:
    """In the first of four exchanges of a secure sum."""
    grids: list[LocalGrid] = []
    config = run_config(tmp_path, round_timeout=1.0, secagg=secagg, **SMALL)
    outcome = run_federation(config, tamper=a_round_late(grids, "2", asks), on_grid=grids.append)
    assert outcome.rows[1]["missing"] == ["site-1"]
    assert outcome.rows[2]["late"] == {"site-1": "its reply to round 2"}
    assert [row["valid"] for row in outcome.rows] == [4, 3, 4, 4, 4]
    assert outcome.summary["trouble"] == {"failed": 0, "refused": 0, "missing": 1, "late": 1}


def test_a_site_that_is_a_round_behind_is_not_said_to_rest(tmp_path: Path, capsys: Printed) -> None:
    """It misses each round's end, but its reply to the one before arrives: it is not silent."""
    grids: list[LocalGrid] = []
    config = run_config(tmp_path, round_timeout=0.5, max_silent_rounds=2, **SMALL)
    outcome = run_federation(config, tamper=a_round_late(grids, "1234"), on_grid=grids.append)
    assert [(row["missing"], bool(row["late"])) for row in outcome.rows[1:4]] == 3 * [
        (["site-1"], True)
    ]
    assert [row["asked"] for row in outcome.rows] == 5 * [4]
    assert "not asked until" not in capsys.readouterr().out


def test_a_client_that_never_answers_costs_the_deadline_only(tmp_path: Path) -> None:
    never = both(when(lost, MessageType.TRAIN, 1001), when(lost, MessageType.EVALUATE, 1001))
    outcome = run_federation(run_config(tmp_path, round_timeout=0.3, **SMALL), tamper=never)
    assert [row["missing"] for row in outcome.rows] == [["site-1"]] * 5
    assert outcome.summary["void-rounds"] == 0


def test_a_full_disk_is_a_failed_reply_and_costs_that_round_only(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """The client goes on from its state of before that round."""

    def save_unless_full(
        tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]
    ) -> None:
        if path.parent.parent.name == "site-1" and metadata.get("round") == "2":
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr("protofl_common.basics.tensorfile.save_file", save_unless_full)
    found = run_federation(run_config(tmp_path, **SMALL))
    assert [row["valid"] for row in found.rows] == [4, 3, 4, 4, 4]
    assert found.summary["trouble"] == {"failed": 1, "refused": 0, "missing": 0, "late": 0}
    said = found.rows[1]["failed"]["site-1"]
    assert "round 2 is lost on this client, which has the state after round 1" in said
    assert "No space left on device" in said
    rounds = [reply for message, reply in found.grid.log if message.metadata.dst_node_id == 1001]
    assert [reply.has_error() for reply in rounds] == [False, False, True, False, False, False]


def older(folder: Path) -> None:
    """As a copy of before, or a machine whose file system lags."""
    max(folder.glob("*-*.safetensors")).unlink()


def under_another_name(folder: Path) -> None:
    first, *_, last = sorted(folder.glob("*-*.safetensors"))
    last.write_bytes(first.read_bytes())


def damaged(folder: Path) -> None:
    flip_a_bit(max(folder.glob("*-*.safetensors")), -3)


@pytest.mark.parametrize(("accident", "said"), [
    (shutil.rmtree, r"site-1: mine/clients/site-1/000002-\d+.safetensors, its state after round 2, is "
                    r"missing; there is none. Put this folder back"),
    (older, r"site-1: mine/.*, its state after round 2, is missing; the newest is of round 1. Put"),
    (under_another_name, r"000002-\d+.safetensors is of round 1; put the right one in its place"),
    (damaged, r"site-1: …/000002-\d+.safetensors is damaged: .*. Put this folder back"),
])  # fmt: skip
@pytest.mark.parametrize("algo", ["fedproto", "scaffold"])
def test_a_simulated_client_without_its_state_ends_the_run_which_goes_on_once_it_is_back(
    algo: str, accident: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    """No figures of a client that goes on from an older model, or from a new one."""
    config = run_config(tmp_path / "b", algo=algo, **SMALL)
    folder, kept = tmp_path / "b/runs/mine/clients/site-1", tmp_path / "kept"

    def happens(_: Message, reply: Message) -> Message:
        shutil.copytree(folder, kept)
        accident(folder)
        return reply

    with pytest.raises(FederationError, match=said + ".*This round does not count$"):
        run_federation(config, tamper=on_round(2, 1001, happens))
    rows = (tmp_path / "b/runs/mine/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["round"] for row in rows] == [1, 2]
    shutil.rmtree(folder, ignore_errors=True)
    kept.rename(folder)
    found = run_federation(config | {"resume": True}, run_id=2)
    wanted = run_federation(run_config(tmp_path / "a", algo=algo, **SMALL))
    assert digests(found.folder) == digests(wanted.folder)


@pytest.mark.parametrize(("settings", "tamper"), [
    ({"participation": 0.5}, None),
    ({"algo": "fedavg"}, None),
    ({"algo": "fedavg", "keep_optimizer": True, "momentum": 0.0}, None),
    ({"algo": "fedavg", "keep_optimizer": True, "momentum": 0.9, "participation": 0.7}, None),
    ({}, lambda folder: both(*(on_round(n, 1001, fails) for n in (1, 2)))),
    ({"baselines": "local,fedavg", "keep_best": True}, None),
    ({"new_clients": 1, "new_client_epochs": 1}, None),
])  # fmt: skip
def test_runs_in_which_no_state_is_lost_end(
    settings: dict[str, Any], tamper: Callable[[Path], Tamper] | None, tmp_path: Path
) -> None:
    """Some are not asked, keep nothing, an empty state, or have not counted yet."""
    there = tmp_path / "runs/mine/clients"
    outcome = run_federation(
        run_config(tmp_path, **SMALL | settings), tamper=tamper(there) if tamper else None
    )
    assert [row["round"] for row in outcome.rows] == [1, 2, 3, 4, 4]
    assert sum(len(row["failed"]) for row in outcome.rows) == (2 if tamper and not settings else 0)
    if "baselines" in settings:
        assert len(list((tmp_path / "runs").glob("mine*/summary.json"))) == 3


def test_a_round_with_too_few_replies_keeps_the_prototypes(tmp_path: Path) -> None:
    """Client 3 fails in round 2, where all are wanted: round 3 sends down what round 2 did."""
    outcome = run_federation(
        run_config(tmp_path, min_replies=4, **SMALL), tamper=on_round(2, 1003, fails)
    )
    assert [row["void"] for row in outcome.rows] == [False, True, False, False, False]
    second, third, fourth = (
        outcome.exchanged(number=n)[0][0].content["prototypes"] for n in (2, 3, 4)
    )
    assert all(second[key].data == third[key].data for key in ("means", "labels"))
    assert third["means"].data != fourth["means"].data


def test_one_site_of_several_operators_is_no_round(tmp_path: Path) -> None:
    """What is merged of one is its upload, and the others would be sent it; simulated clients are one person's own."""
    one_is_left = on_round(2, 1001, fails)
    real = run_federation(
        run_config(tmp_path / "real", **SMALL), nodes=real_sites(2), tamper=one_is_left
    )
    assert [row["void"] for row in real.rows] == [False, True, False, False, False]
    assert real.rows[1]["void-because"] == "1 valid replies, fewer than min-replies = 2"
    simulated = run_federation(
        run_config(tmp_path / "simulated", **SMALL), clients=2, tamper=one_is_left
    )
    assert not any(row["void"] for row in simulated.rows)
    alone = run_federation(run_config(tmp_path / "alone", **SMALL), nodes=real_sites(1))
    assert not any(row["void"] for row in alone.rows)


def test_a_server_waits_for_clients_that_are_all_gone(tmp_path: Path, capsys: Printed) -> None:
    """Instead of burning its rounds; they come back under other node ids."""
    nodes = four()
    back = {node + 1000: facts for node, facts in nodes.items()}
    looked: list[int] = []

    def back_once_missed(grid: LocalGrid) -> None:
        def get_node_ids() -> list[int]:
            found = list(nodes)
            looked.append(len(found))
            if looked[-3:] == [0, 0, 0]:
                nodes.update(back)
            return found

        grid.get_node_ids = get_node_ids  # type: ignore[method-assign]

    config = run_config(tmp_path, min_replies=2, **SMALL)
    go = on_round(2, 1003, lambda _, reply: nodes.clear() or reply)
    outcome = run_federation(config, nodes=nodes, tamper=go, on_grid=back_once_missed)
    assert [row["valid"] for row in outcome.rows] == [4] * 5
    assert "waiting: 0 clients are connected, fewer than min-replies = 2" in capsys.readouterr().out


def test_a_superlink_that_was_away_is_told(
    tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    """Flower's own client waits until it is back."""
    monkeypatch.setattr("server_app.log.SILENCE", 0.5)
    away = [1.0]

    def slow_once(grid: LocalGrid) -> None:
        def now() -> bool:
            return bool(away) and any(
                entry.metadata.message_type == MessageType.TRAIN for entry, _ in grid.log
            )

        pull, look = grid.pull_messages, grid.get_node_ids
        grid.pull_messages = lambda ids: [] if now() else pull(ids)  # type: ignore[method-assign]
        grid.get_node_ids = lambda: look() if not now() else time.sleep(away.pop()) or look()  # type: ignore

    run_federation(run_config(tmp_path, **SMALL), clients=1, on_grid=slow_once)
    assert "the SuperLink did not answer for 1 s; going on" in capsys.readouterr().out


GAVE_UP = r"3 rounds in a row changed nothing: 3 valid replies, fewer than min-replies = 4; the first reason: .+"


def test_a_run_that_gave_up_can_be_resumed(tmp_path: Path) -> None:
    """Three void rounds change nothing, end the run, and count as rounds; the next one goes on."""

    def tamper(message: Message, reply: Message) -> Message:
        ill = message.metadata.dst_node_id == 1003 and int(message.metadata.group_id) >= 2
        return fails(message, reply) if ill else reply

    config = run_config(tmp_path, min_replies=4, **SMALL | {"rounds": 5})
    with pytest.raises(FederationError, match=GAVE_UP + r".* resume\.toml lets it go on"):
        run_federation(config, tamper=tamper, run_id=1)
    found = run_federation(config | {"resume": True}, run_id=2)
    assert [row["void"] for row in found.rows] == [False, True, True, True, False, False]
    assert found.summary["resumed-after-rounds"] == [4]

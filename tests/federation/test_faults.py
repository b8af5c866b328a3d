"""Faults of a federation, in one process: who dies, comes back, is late, or has no disk space."""

import errno
import json
import re
import shutil
import time
from functools import cache

import pytest
import torch
from flwr.app import MessageType
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from safetensors.torch import load_file, save_file

from protofl_common.flower import ErrorCode
from protofl_common.runs.folder import RunFolder
from server_app.network.membership import FederationError
from server_app.run.checkpoint import Checkpoint
from tests.support.accidents import a_round_late, fails, flip_a_bit, meanwhile, on_round
from tests.support.attacks import (
    both,
    card_with,
    failing,
    interrupted,
    lost,
    report_with,
    when,
)
from tests.support.harness import (
    client_of,
    federate,
    run_config,
    run_federation,
)
from tests.support.results import assert_same, digests
from tests.support.sites import real_sites

SMALL = {"run_name": "mine", "train_samples": 20, "test_samples": 20, "rounds": 4}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Let the server look for sites that are back 20 times a second, and give up after 2 s."""
    monkeypatch.setattr("server_app.network.exchange.LOOK_AROUND_SECONDS", 0.05)
    monkeypatch.setattr("server_app.network.exchange.RETURN_SECONDS", 2.0)


def four_nodes():
    """Return the node configs of site-0 to site-3, which are the nodes 1000 to 1003."""
    return {1000 + i: {"partition-id": i, "num-partitions": 4} for i in range(4)}


def run(folder, tamper=None, nodes=None, on_grid=None, **settings):
    """Run four simulated clients, unless other nodes are given."""
    config = run_config(folder, **SMALL | settings)
    return run_federation(config, clients=4, tamper=tamper, nodes=nodes, on_grid=on_grid)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function: settings -> a run of four simulated clients to which nothing happens.

    Each run is made once.
    """
    return cache(lambda **settings: run(tmp_path_factory.mktemp("undisturbed"), **settings))


def restarts(nodes, **facts):
    """Let node 1002 come back as node 2002 once it has trained in round 2; its reply is lost.

    ``facts`` are what the new node's config has in place of the old one's.
    """

    def restart(message, reply):
        nodes[2002] = nodes.pop(1002) | facts

    return on_round(number=2, node=1002, change=restart)


def nodes_asked(outcome, number):
    """Return the nodes to which messages of this round have gone."""
    asked = set()
    for message, _ in outcome.grid.log:
        if message.metadata.group_id == str(number):
            asked.add(message.metadata.dst_node_id)
    return asked


# -- nodes that die and come back ----------------------------------------------------------------


def test_a_restarted_supernode_is_known_again_and_asked_again(tmp_path, undisturbed, capsys):
    """It comes back within the round: another node with its site name and its state of before."""
    nodes = four_nodes()

    found = run(tmp_path, restarts(nodes), nodes)

    assert_same(found, undisturbed())
    assert capsys.readouterr().out.count("back: site-2, on another node") == 1


DIED = on_round(
    number=2,
    node=1002,
    change=failing(0, "<class 'ray.exceptions.ActorDiedError'>:<'The actor died'>"),
)
"""Site-2's reply in round 2 is the error that Flower makes if a process of Ray has died."""


def look_like_a_simulation(grid):
    """Let the grid have the state that Flower's has in a simulation only."""
    grid.state = type("InMemoryLinkState", (), {"store_message_ins": None})()


def test_a_dead_process_of_a_simulation_ends_the_run_before_the_round_counts(tmp_path, undisturbed):
    """Ray gives the clients of that process to no other, so the run must be resumed."""
    config = run_config(tmp_path, **SMALL)

    line = r"has died \(ActorDiedError\), so that site-2 did not answer.*resume"
    with pytest.raises(FederationError, match=line):
        run_federation(config, tamper=DIED, on_grid=look_like_a_simulation)

    assert_same(run_federation(config | {"resume": True}, run_id=2), undisturbed())


def test_a_site_that_sends_the_error_of_a_dead_process_costs_its_own_reply(tmp_path):
    """Outside of a simulation a site could send that error itself, and must not end the run."""
    outcome = run(tmp_path, DIED)

    failed = [list(row["failed"]) for row in outcome.rows if row["kind"] == "round"]
    assert failed == [[], ["site-2"], [], []]


@pytest.mark.parametrize("node", [1002, 2002])
def test_a_supernode_that_flower_has_given_up_is_asked_again_once_it_is_back(
    node, tmp_path, undisturbed
):
    """An authenticated SuperNode keeps its node id, 1002, and any other gets a new one, 2002.

    Before it dies, the SuperLink loses its reply twice: the server asks once more each time.
    """
    wanted = undisturbed()
    nodes = four_nodes()
    gone = []
    accidents = ["loses", "loses", "dies"]

    def happens(message, reply):
        accident = accidents.pop(0) if accidents else ""
        if accident == "loses":
            raise ObjectPushError("an-object", 1, "a-session")
        if accident == "dies":
            gone.append(nodes.pop(1002))
            return None
        return reply

    def back_once_given_up(grid):
        pull = grid.pull_messages

        def pull_messages(message_ids):
            replies = pull(message_ids)
            if gone and any(reply.has_error() for reply in replies):
                nodes[node] = gone.pop()
            return replies

        grid.pull_messages = pull_messages

    found = run(
        tmp_path, on_round(number=2, node=1002, change=happens), nodes, on_grid=back_once_given_up
    )

    assert_same(found, wanted)

    # each push that was lost had reached three nodes, and is made again to all
    repeated = 2 * 3
    asked_again = 1
    introduction = 1 if node != 1002 else 0
    more = repeated + asked_again + introduction
    assert len(found.grid.log) == len(wanted.grid.log) + more


def test_a_site_that_always_says_that_its_node_died_is_asked_three_times_and_costs_its_reply(
    tmp_path,
):
    """In the final evaluation, after four rounds, it answers."""
    gone = when(failing(ErrorCode.NODE_UNAVAILABLE, "gone"), MessageType.TRAIN, node=1001)

    outcome = run(tmp_path, gone)

    assert outcome.per_row("failed") == 4 * [{"site-1": "gone"}] + [{}]
    to_three_others = 3
    to_site_1 = 3
    for number in (1, 2, 3, 4):
        assert len(outcome.exchanged(number=number)) == to_three_others + to_site_1


def test_a_supernode_that_comes_back_later_misses_its_round(tmp_path):
    """Site-2 goes in round 2 and is back, as another node, in round 3."""
    nodes = four_nodes()
    gone = {}

    def go(message, reply):
        gone[2002] = nodes.pop(1002)

    returns = when(meanwhile(lambda: nodes.update(gone)), MessageType.TRAIN, number=3)
    outcome = run(tmp_path, both(on_round(number=2, node=1002, change=go), returns), nodes)

    assert outcome.per_row("valid") == [4, 3, 4, 4, 4]
    assert outcome.rows[1]["failed"] == {"site-2": "Node Unavailable"}


def test_who_comes_late_or_comes_back_and_does_not_fit_is_left_out(tmp_path, capsys):
    """FedAvg needs one architecture: a new client and one that comes back have another."""
    nodes = four_nodes()
    other = {"arch": "mnist-cnn"}
    extra = {"site-name": "extra", "partition-id": 3, "num-partitions": 4, **other}

    joins = on_round(number=1, node=1000, change=meanwhile(lambda: nodes.setdefault(1009, extra)))
    tamper = both(joins, restarts(nodes, **other))
    outcome = run(tmp_path, tamper, nodes, algo="fedavg", num_clients=4)

    assert outcome.per_row("valid") == [4, 3, 3, 3, 3]

    said = capsys.readouterr().out
    assert "1 client cannot take part: extra: the sites differ in arch" in said
    assert "1 client cannot take part: site-2: the sites differ in arch" in said


def test_who_comes_back_without_validation_samples_does_not_end_a_run_that_may_stop_early(tmp_path):
    """Such a run is refused at its beginning only if nobody has validation samples."""
    nodes = real_sites(3)
    none = when(card_with(validation_samples=0), MessageType.QUERY, node=2002)

    tamper = both(restarts(nodes), none)
    outcome = run(tmp_path, tamper, nodes, validation_fraction=0.3, early_stopping=4)

    assert outcome.summary["rounds"] == 4


def test_a_second_node_of_the_same_name_does_not_displace_a_living_one(tmp_path, capsys):
    """Node 2002 comes in round 1 and calls itself site-2, as node 1002 does: it is never asked."""
    nodes = four_nodes()
    second = {2002: dict(nodes[1002])}

    comes = when(meanwhile(lambda: nodes.update(second)), MessageType.TRAIN, number=1)
    outcome = run(tmp_path, comes, nodes)

    assert nodes_asked(outcome, 4) == {1000, 1001, 1002, 1003}

    warning = "warning: another client calls itself site-2; it waits until"
    assert capsys.readouterr().out.count(warning) == 1


def test_who_takes_the_name_of_a_site_that_is_away_does_not_keep_it(tmp_path, capsys):
    """The other node has the name until the site's own node is back.

    In a study that names the site's key it never has (`test_studies.py`).
    """
    nodes = four_nodes()
    away = {1002: dict(nodes[1002])}

    returns = on_round(number=3, node=1000, change=meanwhile(lambda: nodes.update(away)))
    outcome = run(tmp_path, both(restarts(nodes), returns), nodes)

    assert {1002, 2002} & nodes_asked(outcome, 4) == {1002}
    assert "back: site-2, on its own node" in capsys.readouterr().out


def test_a_late_client_joins_the_next_round_with_the_global_prototypes(tmp_path, capsys):
    """Site-3 comes while the others train in round 2, and takes part from round 3 on."""
    nodes = four_nodes()
    late = nodes.pop(1003)

    joins = on_round(number=2, node=1000, change=meanwhile(lambda: nodes.setdefault(1003, late)))
    outcome = run(tmp_path, joins, nodes, num_clients=3)

    assert outcome.per_row("valid") == [3, 3, 4, 4, 4]

    asked = [message for message, _ in outcome.exchanged()]
    first, *_ = [message for message in asked if message.metadata.dst_node_id == 1003]

    assert first.metadata.group_id == "3"
    assert "prototypes" in first.content.array_records
    assert "new: site-3, cnn4, takes part from the next round" in capsys.readouterr().out


def test_a_server_waits_for_clients_that_are_all_gone(tmp_path, capsys):
    """They go in round 2 and come back under other node ids; meanwhile no rounds are used up.

    All four reply in each of four rounds and in the final evaluation.
    """
    nodes = four_nodes()
    back = {node + 1000: facts for node, facts in nodes.items()}
    connected_at_each_look = []

    def back_once_missed(grid):
        """Let them come back once the server has found nobody three times running."""

        def get_node_ids():
            connected = list(nodes)
            connected_at_each_look.append(len(connected))
            if connected_at_each_look[-3:] == [0, 0, 0]:
                nodes.update(back)
            return connected

        grid.get_node_ids = get_node_ids

    all_go = on_round(number=2, node=1003, change=meanwhile(nodes.clear))
    outcome = run(tmp_path, all_go, nodes, on_grid=back_once_missed, min_replies=2)

    assert outcome.per_row("valid") == [4] * 5
    assert "waiting: 0 clients are connected, fewer than min-replies = 2" in capsys.readouterr().out


def test_a_superlink_that_was_away_is_told(tmp_path, capsys, monkeypatch):
    """Flower's own client waits until the SuperLink is back, and the server says for how long."""
    monkeypatch.setattr("server_app.run.log.SILENCE_SECONDS", 0.5)
    absences = [1.0]

    def slow_once(grid):
        """Let the SuperLink be away for a second once a training message was sent."""
        pull = grid.pull_messages
        look = grid.get_node_ids

        def is_away():
            kinds = [message.metadata.message_type for message, _ in grid.log]
            return bool(absences) and MessageType.TRAIN in kinds

        def pull_messages(message_ids):
            return [] if is_away() else pull(message_ids)

        def get_node_ids():
            if is_away():
                time.sleep(absences.pop())
            return list(look())

        grid.pull_messages = pull_messages
        grid.get_node_ids = get_node_ids

    federate(tmp_path, clients=1, on_grid=slow_once, **SMALL)

    assert "the SuperLink did not answer for 1 s; going on" in capsys.readouterr().out


# -- replies that are lost or late ---------------------------------------------------------------


def test_a_client_that_never_answers_costs_the_deadline_only(tmp_path):
    """It is missing in each of four rounds and at the end, and no round is void for it."""
    never = both(
        when(lost, MessageType.TRAIN, node=1001), when(lost, MessageType.EVALUATE, node=1001)
    )

    outcome = run(tmp_path, never, round_timeout=0.3)

    assert outcome.per_row("missing") == [["site-1"]] * 5
    assert outcome.summary["void-rounds"] == 0


def test_a_silent_site_rests_and_is_tried_again(tmp_path, capsys):
    """After two silent rounds it is left out of the next two, and then takes part again."""
    silent_twice = both(
        on_round(number=1, node=1001, change=lost), on_round(number=2, node=1001, change=lost)
    )

    outcome = run(tmp_path, silent_twice, round_timeout=0.5, max_silent_rounds=2, rounds=6)

    six_rounds_and_the_final_evaluation = [4, 4, 3, 3, 4, 4, 4]
    assert outcome.per_row("asked") == six_rounds_and_the_final_evaluation
    assert outcome.per_row("missing")[:3] == [["site-1"], ["site-1"], []]
    assert "site-1: silent 2 times running; not asked until round 5" in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["query.share", "query.unmask"])
def test_only_who_was_awaited_to_the_end_is_missing_in_a_void_round(stage, tmp_path, capsys):
    """Sites that answered all they were asked are not blamed, and do not rest."""
    silent = both(when(lost, stage, node=1001, number=1), when(lost, stage, node=1002, number=1))

    outcome = run(tmp_path, silent, round_timeout=0.5, max_silent_rounds=1, rounds=3, secagg=True)

    row = outcome.rows[0]
    assert row["void"]
    assert row["missing"] == ["site-1", "site-2"]
    assert row["unused"] == ["site-0", "site-3"]
    assert row["valid"] == 0

    said = capsys.readouterr().out
    assert "nothing was merged; heard, not used: site-0, site-3" in said
    assert re.findall(r"(site-\d): silent", said) == ["site-1", "site-2"]


@pytest.mark.parametrize(("secagg", "asks"), [(False, "train"), (True, "query.advertise")])
def test_a_slow_reply_is_counted_as_late_and_the_round_goes_on(tmp_path, secagg, asks):
    """In a secure sum the slow reply belongs to the first of the four exchanges."""
    grids = []
    late = a_round_late(grids, rounds="2", asks=asks)

    outcome = run(tmp_path, late, on_grid=grids.append, round_timeout=1.0, secagg=secagg)

    assert outcome.rows[1]["missing"] == ["site-1"]
    assert outcome.rows[2]["late"] == {"site-1": "its reply to round 2"}
    assert outcome.per_row("valid") == [4, 3, 4, 4, 4]
    assert outcome.summary["trouble"] == {"failed": 0, "refused": 0, "missing": 1, "late": 1}


def test_a_site_that_is_a_round_behind_is_not_said_to_rest(tmp_path, capsys):
    """The site misses each round's end, but its reply to the one before arrives then."""
    grids = []
    late = a_round_late(grids, rounds="1234")

    outcome = run(tmp_path, late, on_grid=grids.append, round_timeout=0.5, max_silent_rounds=2)

    for row in outcome.rows[1:4]:
        assert row["missing"] == ["site-1"]
        assert row["late"]
    assert outcome.per_row("asked") == 5 * [4]
    assert "not asked until" not in capsys.readouterr().out


# -- rounds that fail ----------------------------------------------------------------------------


def test_a_full_disk_is_a_failed_reply_and_costs_that_round_only(tmp_path, monkeypatch):
    """The client goes on from its state of before that round."""

    def save_unless_full(tensors, path, metadata):
        if path.parent.name == "site-1" and metadata.get("round") == "2":
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr("protofl_common.basics.tensorfile.save_file", save_unless_full)

    outcome = run(tmp_path)

    assert outcome.per_row("valid") == [4, 3, 4, 4, 4]
    assert outcome.summary["trouble"] == {"failed": 1, "refused": 0, "missing": 0, "late": 0}

    said = outcome.rows[1]["failed"]["site-1"]
    assert "round 2 is lost on this client, which has the state after round 1" in said
    assert "No space left on device" in said

    errors = []
    for message, reply in outcome.grid.log:
        if message.metadata.dst_node_id == 1001:
            errors.append(reply.has_error())
    # its introduction, four rounds, of which the second failed, and the final evaluation
    assert errors == [False, False, True, False, False, False]


def newest_state(folder):
    """Return the file of a client's newest state; names begin with the round."""
    return max(folder.glob("*-*.safetensors"))


def remove_newest_state(folder):
    """Let the folder be as an older copy of it, or as on a file system that lags."""
    newest_state(folder).unlink()


def put_first_state_in_place_of_last(folder):
    first, *_, last = sorted(folder.glob("*-*.safetensors"))
    last.write_bytes(first.read_bytes())


def damage_newest_state(folder):
    flip_a_bit(newest_state(folder), -3)  # in its last byte


MISSING = (
    r"site-1: mine/clients/site-1/000002-\*, its state after round 2, is missing; "
    "there is none. Put this folder back"
)
NEWEST = r"site-1: mine/.*, its state after round 2, is missing; the newest is of round 1. Put"
OTHER_ROUND = r"000002-\d+.safetensors was stored with round = '1', not '2'; put the right one"
DAMAGED = r"site-1: …/000002-\d+.safetensors is damaged: .*. Put this folder back"


@pytest.mark.parametrize(("settings", "accident", "said"), [
    ({}, shutil.rmtree, MISSING),
    ({}, remove_newest_state, NEWEST),
    ({}, put_first_state_in_place_of_last, OTHER_ROUND),
    ({}, damage_newest_state, DAMAGED),
    ({"algo": "scaffold"}, remove_newest_state, NEWEST),
    ({"secagg": True}, shutil.rmtree, MISSING),
])  # fmt: skip
def test_a_simulated_client_without_its_state_ends_the_run_which_goes_on_once_it_is_back(
    settings, accident, said, tmp_path, undisturbed
):
    """Site-1's state is lost, older or damaged in round 2, which does not count then.

    Else there would be figures of a client that goes on from an older model, or from a new one.
    """
    config = run_config(tmp_path, **SMALL | settings)
    folder = tmp_path / "runs/mine/clients/site-1"
    kept = tmp_path / "kept"

    def happens(_, reply):
        shutil.copytree(folder, kept)
        accident(folder)
        return reply

    with pytest.raises(FederationError, match=said + ".*This round does not count$"):
        run_federation(config, tamper=on_round(number=2, node=1001, change=happens))

    # the accident happens after training in round 2, and is found in round 3
    rows = (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["round"] for row in rows] == [1, 2]

    shutil.rmtree(folder, ignore_errors=True)
    kept.rename(folder)
    resumed = run_federation(config | {"resume": True}, run_id=2)

    assert digests(resumed.folder) == digests(undisturbed(**settings).folder)


FAILS_TWICE = both(
    on_round(number=1, node=1001, change=fails), on_round(number=2, node=1001, change=fails)
)
"""Site-1 fails in rounds 1 and 2, so that none of its states counts."""


@pytest.mark.parametrize(("settings", "tamper", "failures"), [
    ({"participation": 0.5}, None, 0),
    ({"algo": "fedavg"}, None, 0),
    ({"algo": "fedavg", "keep_optimizer": True, "momentum": 0.0}, None, 0),
    ({"algo": "fedavg", "keep_optimizer": True, "momentum": 0.9, "participation": 0.7}, None, 0),
    ({}, FAILS_TWICE, 2),
    ({"baselines": "local,fedavg", "keep_best": True}, None, 0),
    ({"new_clients": 1, "new_client_epochs": 1}, None, 0),
])  # fmt: skip
def test_runs_in_which_no_state_is_lost_end(settings, tamper, failures, tmp_path):
    """No state is missed of clients that were not asked, keep nothing, or have not counted yet.

    A run with two baselines leaves three results.
    """
    outcome = run(tmp_path, tamper, **settings)

    assert outcome.per_row("round") == [1, 2, 3, 4, 4]  # the last is the final evaluation
    assert sum(len(row["failed"]) for row in outcome.rows) == failures
    if "baselines" in settings:
        assert len(list((tmp_path / "runs").glob("mine*/summary.json"))) == 3


def test_a_round_with_too_few_replies_keeps_the_prototypes(tmp_path):
    """Site-3 fails in round 2, where all four are needed: round 3 sends down what round 2 did."""
    outcome = run(tmp_path, on_round(number=2, node=1003, change=fails), min_replies=4)

    assert outcome.per_row("void") == [False, True, False, False, False]

    def sent_down(number):
        """Return the prototypes that all clients are sent in a round, as the first gets them."""
        (message, _reply), *_to_others = outcome.exchanged(number=number)
        return message.content["prototypes"]

    second = sent_down(2)
    third = sent_down(3)
    fourth = sent_down(4)

    assert second["means"].data == third["means"].data
    assert second["labels"].data == third["labels"].data
    assert third["means"].data != fourth["means"].data


def test_one_site_of_several_operators_is_no_round(tmp_path):
    """A merge of one upload is that upload, which others would be sent: the round is void.

    Simulated clients are one person's own, and so is a site that is alone in a run.
    """
    one_is_left = on_round(number=2, node=1001, change=fails)

    real = run(tmp_path / "real", one_is_left, real_sites(2))
    assert real.per_row("void") == [False, True, False, False, False]
    assert real.rows[1]["void-because"] == "1 valid replies, fewer than min-replies = 2"

    simulated = federate(tmp_path / "simulated", clients=2, tamper=one_is_left, **SMALL)

    assert not any(simulated.per_row("void"))

    alone = run(tmp_path / "alone", nodes=real_sites(1))
    assert not any(alone.per_row("void"))


GAVE_UP = (
    r"3 rounds in a row changed nothing: 3 valid replies, fewer than min-replies = 4; "
    r"the first reason: .+ resume\.toml lets it go on"
)


def test_a_run_that_gave_up_can_be_resumed(tmp_path):
    """Three void rounds end the run, since they change nothing; they count as rounds.

    Resumed, the run goes on with the round after them.
    """
    config = run_config(tmp_path, min_replies=4, **SMALL | {"rounds": 5})

    def ill(message, reply):
        is_ill = message.metadata.dst_node_id == 1003 and int(message.metadata.group_id) >= 2
        return fails(message, reply) if is_ill else reply

    with pytest.raises(FederationError, match=GAVE_UP):
        run_federation(config, tamper=ill, run_id=1)

    outcome = run_federation(config | {"resume": True}, run_id=2)

    assert outcome.per_row("void") == [False, True, True, True, False, False]
    assert outcome.summary["resumed-after-rounds"] == [4]


def test_a_bug_of_all_simulated_clients_ends_the_run_at_once(tmp_path, monkeypatch, capfd):
    """If all fail for one reason, the run ends and shows one traceback.

    If each has a reason of its own, every round is void, and the run ends after three of them.
    """

    def broken(self):
        reason = "mine" if alike else f"of {self.client.name}"
        raise ZeroDivisionError(reason)

    monkeypatch.setattr("client_app.algorithms.base.ClientAlgorithm.fit", broken)
    alike = True
    with pytest.raises(FederationError, match=r"all clients failed in round 1, .*: mine, in "):
        federate(tmp_path / "alike", clients=3, **SMALL)
    shown = capfd.readouterr().err
    assert shown.count("Traceback") == 1
    assert shown.count("raise ZeroDivisionError(reason)") == 1

    alike = False
    with pytest.raises(FederationError, match="3 rounds in a row changed nothing"):
        federate(tmp_path / "unlike", clients=3, **SMALL)


# -- all of it at once ---------------------------------------------------------------------------


def control_of(client, number, part):
    """Return a client's control variate as far as the server has counted it.

    Its newest state has the variate ``own`` and how this changed in the last round, ``change``.
    ``part`` of the change in round ``number`` was counted, and nothing of a later one.
    """
    newest = newest_state(client)
    state = load_file(newest)
    round_of_state, _ = newest.name.split("-", 1)
    counted = part if int(round_of_state) == number else 0.0
    num_tensors = len(state) // 2  # half of the state is ``own``, half ``change``
    return [state[f"own/{i}"] + counted * state[f"change/{i}"] for i in range(num_tensors)]


@pytest.mark.parametrize("algo", ["scaffold", "feddyn"])
def test_a_mean_variate_is_that_of_its_clients_whatever_becomes_of_their_replies(algo, tmp_path):
    """The server's variate is the mean of what it has counted of its clients' variates.

    One reply is lost, one refused, some are cut (max-update-ratio), a client comes late, and the
    server dies in round 4 and goes on.
    """
    nodes = four_nodes()
    late = nodes.pop(1003)
    config = run_config(tmp_path, algo=algo, num_clients=3, max_update_ratio=1.0, **SMALL)
    tamper = on_round(number=2, node=1000, change=meanwhile(lambda: nodes.setdefault(1003, late)))
    for accident in (
        on_round(number=2, node=1002, change=fails),
        on_round(number=3, node=1001, change=report_with(round=9)),
        on_round(number=4, node=1000, change=interrupted),
    ):
        tamper = both(tamper, accident)

    with pytest.raises(KeyboardInterrupt):
        run_federation(config, nodes=nodes, tamper=tamper)

    outcome = run_federation(
        config | {"resume": True},
        clients=4,
        tamper=on_round(number=4, node=1003, change=fails),
        nodes=nodes,
        run_id=2,
    )

    newest, *_older = RunFolder(outcome.folder).checkpoints()
    server = Checkpoint.read(newest)
    # of each site's change in the last round that counted, which part has counted
    last_counted = [number for number, _part in server.counted.values()]
    assert sorted(last_counted) == [3, 4, 4, 4]  # site-3 fails in round 4
    assert min(part for _number, part in server.counted.values()) < 1

    controls = []
    for site, (number, part) in server.counted.items():
        controls.append(control_of(outcome.folder / "clients" / site, number, part))
    means = [torch.stack(tensors).mean(dim=0) for tensors in zip(*controls, strict=True)]

    assert means[0].any()

    keys = [f"control/{i}" for i in range(len(means))]
    if algo == "feddyn":
        model = client_of(config, **nodes[1000]).model
        keys = [f"control/{name}" for name, _ in model.named_parameters()]

    torch.testing.assert_close(means, [server.state[key] for key in keys])

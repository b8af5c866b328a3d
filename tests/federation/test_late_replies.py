"""Replies that come after their round has closed count in a later one (``late``)."""

import json

import pytest
import torch

from client_app.answers import ERROR_CODE
from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.prototypes import Prototypes
from protofl_common.runs.folder import HEADS, WAITING, RunFolder
from protofl_common.tools.known_runs import KnownRun
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report
from server_app.network.exchange import MessageExchange
from server_app.network.late import LateReplies, LateReply
from server_app.run.replies import Upload
from tests.support.accidents import a_round_late, on_round
from tests.support.attacks import both, failing
from tests.support.fakes import server_of
from tests.support.harness import federate, refusal
from tests.support.results import assert_same
from tests.support.sites import NORTH, SOUTH, Three

SMALL = {"models": "mnist-cnn", "train_samples": 10, "test_samples": 20}
SLOW = SMALL | {"slow_rate": 0.25, "slow_factor": 2, "rounds": 6, "run_name": "mine"}
SUPPORTING = [name for name, row in CATALOG.items() if "late" in row.supports]


def run(folder, tamper=None, **settings):
    """Run four simulated clients, of which one is slow: its replies come two rounds later."""
    return federate(folder, clients=4, tamper=tamper, **SLOW | settings)


def of_rounds(outcome, key):
    """Return an entry of each round's row, without the final evaluation's."""
    return [row.get(key) for row in outcome.rows if row["kind"] == "round"]


# -- among simulated clients ---------------------------------------------------------------------


def test_a_slow_client_counts_in_a_later_round(tmp_path, capsys):
    """One client's reply to round 1 counts in round 3, and its reply to round 4 in round 6.

    Meanwhile it is at work and is asked nothing.
    """
    outcome = run(tmp_path, late="next-round")

    (slow,) = outcome.rows[0]["missing"]
    assert of_rounds(outcome, "missing") == [[slow], [], [], [slow], [], []]
    assert of_rounds(outcome, "asked") == [4, 3, 3, 4, 3, 3]
    assert of_rounds(outcome, "counted-late") == [None, None, {slow: 1}, None, None, {slow: 4}]
    assert outcome.summary["trouble"] == {"failed": 0, "refused": 0, "missing": 0, "late": 0}
    assert outcome.rows[-1]["valid"] == 4, "the final evaluation waits for it"
    assert f"late: {slow}: its reply to round 4 counts in this one" in capsys.readouterr().out

    known = KnownRun(outcome.folder).known_sites()[slow]
    assert known.trouble == {"missing": 2, "counted late": 2}
    assert known.reason == "round 6: its reply to round 4 counted"


def test_late_replies_that_are_discarded_change_nothing(tmp_path):
    """Without late = 'next-round' the same client is late in the same rounds, and counts never."""
    discarded = run(tmp_path / "discarded")
    counted = run(tmp_path / "counted", late="next-round")

    (slow,) = discarded.rows[0]["missing"]
    late = [row["late"].get(slow) for row in discarded.rows]

    assert late[2::3] == ["its reply to round 1", "its reply to round 4"]  # in rounds 3 and 6
    assert not any(of_rounds(discarded, "counted-late"))
    assert of_rounds(counted, "asked") == of_rounds(discarded, "asked")

    def bytes_up(outcome):
        return sum(row["bytes"]["up"] for row in outcome.rows)

    assert bytes_up(discarded) < bytes_up(counted), "only what counts is added up"


@pytest.mark.parametrize("algo", SUPPORTING)
def test_a_run_with_slow_clients_repeats_to_the_bit(algo, tmp_path):
    first = run(tmp_path / "first", algo=algo, late="next-round", rounds=4)
    again = run(tmp_path / "again", algo=algo, late="next-round", rounds=4)

    assert_same(again, first)
    assert any(of_rounds(first, "counted-late"))


# -- over a network ------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path):
    return Three(tmp_path)


IMPATIENT = {"late": "next-round", "min_wait": 0.0, "round_timeout": 60.0, "algo": "fedavg"}


def test_a_round_does_not_wait_for_a_slow_site(three):
    """South's replies to rounds 1 and 3 come a round late; when they are there, it is asked again.

    No round takes the whole time limit, not even the first.
    """
    grids = []  # the run puts its grid here, by which its messages are delayed
    late = a_round_late(grids, rounds="13", node=SOUTH)  # a digit for each round

    outcome = three.run(late, grids.append, rounds=5, **IMPATIENT)

    assert of_rounds(outcome, "missing") == [["south"], [], ["south"], [], []]
    assert of_rounds(outcome, "counted-late") == [None, {"south": 1}, None, {"south": 3}, None]
    assert of_rounds(outcome, "asked") == [3, 2, 3, 2, 3]
    assert max(row["seconds"]["total"] for row in outcome.rows) < 60

    lines = (outcome.folder.parent / HEADS).read_text().splitlines()
    heads_of_logs = [json.loads(line)["heads"] for line in lines]
    # a late reply comes alone, and its site's head is stored as well
    assert {"south"} in [heads.keys() for heads in heads_of_logs]


@pytest.mark.parametrize("late", ["discard", "next-round"])
def test_a_site_that_fails_late_says_why(late, three):
    """South's error in round 1 arrives in round 2, and is in the row and in `protofl status`."""
    grids = []
    arrives_late = a_round_late(grids, rounds="1", node=SOUTH)
    fails_in_round_1 = on_round(1, SOUTH, failing(ERROR_CODE, "its disk is full"))

    impatient = IMPATIENT | {"late": late, "round_timeout": 1.0}
    outcome = three.run(both(fails_in_round_1, arrives_late), grids.append, rounds=2, **impatient)

    why = "its reply to round 1 failed: its disk is full"
    assert of_rounds(outcome, "missing") == [["south"], []]
    assert of_rounds(outcome, "late") == [{}, {"south": why}]
    assert KnownRun(outcome.folder).known_sites()["south"].reason == f"round 2: {why}"


def test_for_whom_a_round_waits_is_told_meanwhile(three, monkeypatch):
    """Round 2 waits for south: events tell that, and a file tells `protofl status`.

    The file is gone when the round closes.
    """
    monkeypatch.setattr("server_app.network.exchange.LOOK_AROUND_SECONDS", 0.0)
    monkeypatch.setattr("server_app.network.waiting.FIRST_WORD_SECONDS", 0.0)
    told = []  # each event, and what the file has at that time

    def note(event):
        told.append((event, RunFolder(three.folder / "runs" / "first").awaited()))

    monkeypatch.setattr("server_app.network.waiting.emit", note)
    silent = on_round(number=2, node=SOUTH, change=lambda message, reply: None)

    outcome = three.run(silent, rounds=2, run_name="first", round_timeout=3.0, algo="fedavg")

    assert outcome.rows[1]["missing"] == ["south"]

    waiting, awaited = told[-1]
    assert (waiting.round, *waiting.sites) == (2, "south")
    assert waiting.sites["south"] > 0, "it has answered in round 1"
    assert 0 < waiting.seconds + waiting.seconds_left <= 3.001  # the round-timeout, rounded
    assert awaited["sites"] == waiting.sites
    assert awaited["until"] - awaited["since"] == pytest.approx(3.0)
    assert not (outcome.folder / WAITING).exists()


def test_a_round_with_too_few_replies_waits_for_late_ones(three):
    """With north and south at work, east alone would be the whole mean of round 2.

    So round 1 is void, as one reply is too few, and round 2 waits for both.
    """
    grids = []
    north = a_round_late(grids, rounds="1", node=NORTH)
    south = a_round_late(grids, rounds="1", node=SOUTH)

    settings = IMPATIENT | {"round_timeout": 8.0}  # all of which round 1 waits
    outcome = three.run(
        both(north, south), grids.append, rounds=2, min_replies=1, liars=0, **settings
    )

    assert outcome.rows[0]["void"]
    assert outcome.rows[1]["counted-late"] == {"north": 1, "south": 1}


def test_a_reply_counts_once_and_never_after_a_newer_one(tmp_path, monkeypatch):
    """A client's reply to round 1 comes again in every round after it, and counts in round 2 only.

    From round 3 on the client also replies in time, and that counts. The final evaluation is no
    part of the lists: each has four rounds.
    """
    take = LateReplies.take
    hold_back = LateReplies.hold_back
    first = {}

    def take_again(late, number):
        first.update(take(late, number))
        return first if number > 1 else {}

    def in_time_from_the_third_on(late, number, replies):
        return replies if number > 2 else hold_back(late, number, replies)

    monkeypatch.setattr(LateReplies, "take", take_again)
    monkeypatch.setattr(LateReplies, "hold_back", in_time_from_the_third_on)

    outcome = run(tmp_path, late="next-round", slow_factor=1, rounds=4)

    (slow,) = outcome.rows[0]["missing"]
    assert of_rounds(outcome, "counted-late") == [None, {slow: 1}, None, None]
    late_from_round_3 = of_rounds(outcome, "late")[2:]
    assert late_from_round_3 == [{slow: "its reply to round 1"}] * 2
    assert of_rounds(outcome, "valid") == [3, 3, 4, 4]


def test_a_late_reply_is_checked_like_any_other(tmp_path, monkeypatch):
    """Here the server takes a late reply for one to the round after, which it is not."""
    take = LateReplies.take

    def of_another_round(late, number):
        taken = take(late, number)
        return {site: LateReply(reply.round + 1, reply.content) for site, reply in taken.items()}

    monkeypatch.setattr(LateReplies, "take", of_another_round)

    outcome = run(tmp_path, late="next-round", rounds=3)

    (refused,) = outcome.rows[2]["refused"].values()
    assert refused.startswith("its reply to round 2: ")
    assert not any(of_rounds(outcome, "counted-late"))


def test_with_discard_nobody_is_taken_to_be_at_work(three, monkeypatch):
    """South is late in round 2, and is asked in round 3 like the others."""
    found_at_work = []  # in each round
    at_work = MessageExchange.at_work

    def noted(exchange):
        found_at_work.append(at_work(exchange))
        return found_at_work[-1]

    monkeypatch.setattr(MessageExchange, "at_work", noted)
    grids = []

    discard = IMPATIENT | {"late": "discard"}
    three.run(a_round_late(grids, rounds="2", node=SOUTH), grids.append, rounds=3, **discard)

    assert found_at_work == [set()] * 3


# -- what it weighs, and what is refused ---------------------------------------------------------


def merge_zeros_and_sixes(server, payload, factor):
    """Let a server merge the upload of one client, of zeros, and a late one of sixes.

    The late one's weight is multiplied by ``factor``, so the mean is 6 · factor / (1 + factor).
    """
    in_time = Upload("a", payload(0.0), Report(1, 10, 5))
    late = Upload("b", payload(6.0), Report(1, 10, 5), age_factor=factor)
    server.merge([in_time, late])


WEIGHED = pytest.mark.parametrize(("factor", "mean"), [(1.0, 3.0), (0.5, 2.0)])


@WEIGHED
@pytest.mark.parametrize("weighting", ["counts", "uniform"])
def test_by_hand_a_late_prototype_weighs_less(weighting, factor, mean):
    def prototype(value):
        means = torch.tensor([[value]])
        return Payload(prototypes=Prototypes(means, torch.tensor([0]), torch.tensor([7])))

    server = server_of("fedproto", feature_dim=1, fedproto__weighting=weighting)
    merge_zeros_and_sixes(server, prototype, factor)

    assert server.prototypes.means.tolist() == [[mean]]


@WEIGHED
@pytest.mark.parametrize("algo", ["fedavg", "pfedme"])
def test_by_hand_late_weights_weigh_less(algo, factor, mean):
    server = server_of(algo)

    def weights(value):
        return Payload(weights={name: w * 0 + value for name, w in server.weights.items()})

    merge_zeros_and_sixes(server, weights, factor)

    for found in server.weights.values():
        assert (found == mean).all()


@pytest.mark.parametrize(("staleness", "factor"), [(0.0, 1.0), (0.5, 3**-0.5), (1.0, 1 / 3)])
def test_age_lessens_the_weight_by_staleness(staleness, factor, tmp_path, monkeypatch):
    """A reply to round 1 that counts in round 3 has age 2: its weight is (1 + age)^−staleness."""
    from server_app.strategies.fedproto import FedProto

    merge = FedProto.merge
    factors = []

    def noted(server, uploads):
        factors.append([upload.age_factor for upload in uploads if upload.age])
        return merge(server, uploads)

    monkeypatch.setattr(FedProto, "merge", noted)
    run(tmp_path, late="next-round", rounds=3, staleness=staleness)

    assert factors == [[], [], [factor]]


@pytest.mark.parametrize("algo", sorted(CATALOG.keys() - set(SUPPORTING)))
def test_an_algorithm_that_does_not_declare_late_replies_refuses_them(algo):
    said = refusal({"algo": algo, "late": "next-round"})
    assert f"late = 'next-round': the row of {algo} does not declare" in said
    assert "choose discard, or an algo of ditto, fedavg" in said


SECURE = {"secagg": True}
IMPOSSIBLE = [
    (
        SECURE | {"late": "next-round"},
        "late = 'next-round': secagg = true hides the single uploads that it needs",
    ),
    (SECURE | {"slow-rate": 0.5}, "slow-rate = 0.5: secagg = true forbids sums over"),
    ({"staleness": 1.5}, "staleness = 1.5: must be a number at least 0 and at most 1"),
    ({"late": "later"}, "late = 'later': choose one of discard, next-round"),
]


@pytest.mark.parametrize(("settings", "said"), IMPOSSIBLE)
def test_settings_of_late_replies_that_cannot_be_are_refused(settings, said):
    assert said in refusal(settings)

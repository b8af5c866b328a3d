"""A server or a few sites that cheat in a secure sum: nothing is read, and no honest site is out.

Each scene worked, or cost an honest site its place, before what it tries was stopped.
"""

import json
from contextlib import suppress

import pytest
import torch
from flwr.app import ConfigRecord

from client_app.algorithms.base import ClientAlgorithm, Payload
from protofl_common.privacy.masks import KEY, SIGNED
from protofl_common.runs.folder import RunFolder
from protofl_common.wire.records import SECAGG
from server_app.network.membership import FederationError
from server_app.protections.secure_sum import SecureSum
from tests.support.accidents import Killed, on_message
from tests.support.attacks import both, by, change_sent, silent, when
from tests.support.harness import RUN_ID, run_config, run_federation
from tests.support.sites import real_sites

CLIENTS = 4
SMALL = {
    "dataset": "digits",
    "partition": "pathological",
    "classes_per_client": 5,
    "models": "htcnn-1",
    "train_samples": 10,
    "test_samples": 10,
}
VICTIM = 1003


def config_of(folder, **settings):
    """Return the settings of a small run with secure aggregation."""
    secure = {"rounds": 2, "secagg": True, "run_name": "mine"}
    return run_config(folder, **secure | SMALL | settings)


def rows_of(folder, tamper=None, nodes=None, clients=CLIENTS, **settings):
    """Make a run and return its rows, even if it ends early because its rounds are void."""
    with suppress(FederationError):
        run_federation(config_of(folder, **settings), clients=clients, tamper=tamper, nodes=nodes)
    return RunFolder(folder / "runs/mine").rows()


@pytest.fixture
def sites(tmp_path):
    """Four machines with operators; the state of site-3, the victim, is in ``disk-3``."""
    return real_sites(CLIENTS, tmp_path / "disk")


# -- masks depend on all that a site was sent ------------------------------------------------------
def instruct(key, value, record="round"):
    """Return a change of a message: an entry of a record that instructs the site."""
    return lambda message: message.content.config_records[record].update({key: value})


NO_STATE_COUNTS = f"999:1,{RUN_ID}"
"""A history in which the run goes on with another one after its round 1, so no state counts."""


def test_a_site_does_not_begin_anew_because_the_server_says_that_no_state_counts(
    tmp_path, sites, monkeypatch
):
    """In round 2 the server tells site-3 that its model of round 1 does not count.

    Its peers' models may be dead from a poisoned round: a sum would show a new model's upload.
    """
    change_sent(monkeypatch, VICTIM, 2, instruct("run_history", NO_STATE_COUNTS))
    rows = rows_of(tmp_path, nodes=sites)

    answered = f"round 1 of the Flower run {RUN_ID} does not count, but this site has answered it"
    reason = f"round.run_history is '{NO_STATE_COUNTS}', in which {answered}"

    assert rows[1]["failed"] == {"site-3": reason}
    assert not rows[1]["void"]  # of the three others


@pytest.mark.parametrize(("algo", "reason"), [
    ("fedavg", f"in the Flower run {RUN_ID}, which had '{RUN_ID}'"),
    ("fedproto", "has models of earlier rounds, and begins with no new one"),
])  # fmt: skip
def test_a_site_goes_by_whatever_is_on_record(algo, reason, tmp_path, sites, monkeypatch):
    """Site-3 has lost its record of answers when the server says that no state counts.

    It refuses by its place in the secure sum (FedAvg keeps no models), or by its models.
    """

    def lose_record(message, reply):
        (tmp_path / "disk-3" / "privacy" / "site-3.answered").unlink()
        return reply

    change_sent(monkeypatch, VICTIM, 2, instruct("run_history", NO_STATE_COUNTS))
    tamper = when(lose_record, "query.unmask", node=VICTIM, number=1)
    rows = rows_of(tmp_path, tamper, sites, algo=algo)

    assert reason in rows[1]["failed"]["site-3"]


def test_a_site_that_comes_late_begins_with_a_new_model(tmp_path, sites):
    """Site-3 is lost at the first stage of round 1, and takes part in round 2."""
    rows = rows_of(tmp_path, when(silent, "query.advertise", node=VICTIM, number=1), sites)

    assert [list(row["failed"]) for row in rows] == [["site-3"], [], []]
    assert not any(row["void"] for row in rows)


def test_sites_go_on_with_their_models_in_a_run_that_is_resumed(tmp_path, sites):
    """The server dies in round 3, and its next Flower run tells the sites which rounds counted."""
    config = config_of(tmp_path, rounds=3)
    with pytest.raises(Killed):
        run_federation(config, nodes=sites, tamper=on_message("train", 3))

    rows = run_federation(config | {"resume": True}, nodes=sites, run_id=RUN_ID + 1).rows

    assert len(rows) == 4  # three rounds and the final evaluation
    assert not any(row["failed"] or row["void"] for row in rows)


def test_masks_of_sites_that_were_told_other_histories_do_not_cancel(tmp_path, monkeypatch):
    """The server tells site-3 another history in every round, so that each sum is void.

    This holds even where no site has a record of its own, as in a run's first round.
    """
    change_sent(monkeypatch, VICTIM, 1, instruct("run_history", NO_STATE_COUNTS))

    for row in rows_of(tmp_path):
        assert row["void"]
        assert not row["failed"]


@pytest.mark.parametrize(("record", "key", "value"), [
    ("round", "part", 0.5),
    ("counted", "site-3", 1),
])  # fmt: skip
def test_masks_depend_on_every_instruction(record, key, value, tmp_path, sites, monkeypatch):
    """If the server tells site-3 another value than the others, the sum is void.

    One instruction of each record is tried here; `test_privacy_sums.py` tries the others.
    """
    change_sent(monkeypatch, VICTIM, 1, instruct(key, value, record))

    assert all(row["void"] for row in rows_of(tmp_path, nodes=sites, algo="fedavg"))


def test_masks_depend_on_which_round_was_the_best(tmp_path, monkeypatch):
    """The server tells site-3 of another best round than the others: the last sum is void."""

    def change_best(message):
        if "best" in message.content:  # the others share one record
            message.content["best"] = ConfigRecord({"after": 7, "on": ""})

    change_sent(monkeypatch, node=VICTIM, number=1, change=change_best)
    rows = rows_of(tmp_path, rounds=3, keep_best=True, validation_fraction=0.3)

    assert rows[2]["void"]


# -- every key is one site's -----------------------------------------------------------------------
def copy_key(ignored_bit):
    """Let site-2 advertise the second of site-1's keys as its own.

    With ``ignored_bit`` the key has another highest bit, which X25519 ignores: it acts the same.
    """
    start = KEY  # after the first key
    keys_of_site_1 = []  # in each round

    def note(message, reply):
        keys_of_site_1.append(reply.content.config_records[SECAGG]["site-1"])
        return reply

    def copy(message, reply):
        record = reply.content.config_records[SECAGG]
        key = bytearray(keys_of_site_1[-1][start : start + KEY])
        if ignored_bit:
            key[-1] |= 0x80  # the highest bit of its last byte
        own = record["site-2"]
        record["site-2"] = own[:start] + bytes(key) + own[start + KEY :]
        return reply

    return by({1001: note, 1002: copy}, "query.advertise")


@pytest.mark.parametrize("ignored_bit", [False, True])
def test_a_server_lets_no_key_of_two_sites_pass(ignored_bit, tmp_path):
    """Both sites of one key are refused; a key with the ignored bit shows who has changed it.

    Of five sites four must stay, so that the round is void without two.
    """
    row, *_ = rows_of(tmp_path, copy_key(ignored_bit), clients=5, rounds=1)

    assert sorted(row["refused"]) == (["site-2"] if ignored_bit else ["site-1", "site-2"])
    assert row["void"] == (not ignored_bit)


@pytest.mark.parametrize("ignored_bit", [False, True])
def test_a_site_shares_nothing_where_two_have_a_key(ignored_bit, tmp_path, monkeypatch):
    """A site looks at the keys itself: here the server passes them on as they are."""

    def accept(self, answers, number):
        keys = self._unpacked(answers, SIGNED)
        return {site: of_site[site] for site, of_site in keys.items()}

    monkeypatch.setattr(SecureSum, "_true_keys", accept)
    rows = rows_of(tmp_path, copy_key(ignored_bit), rounds=1)

    why = "keys for a sum: one of them occurs twice"
    if ignored_bit:
        why = "keys for a sum: those of site-2 are not valid X25519 keys"
    failed = rows[0]["failed"]

    assert len(failed) == CLIENTS
    for site in ("site-0", "site-1", "site-3"):
        assert why in failed[site]


# -- a site that diverged is lost before its upload -----------------------------------------------
def let_diverge(monkeypatch, *names):
    """Let these sites' uploads be NaN."""
    upload = ClientAlgorithm.upload

    def diverged_upload(self):
        sent = upload(self)
        if self.client.name not in names:
            return sent
        weights = sent.weights() or {}
        return Payload(weights={name: value * torch.nan for name, value in weights.items()})

    monkeypatch.setattr(ClientAlgorithm, "upload", diverged_upload)


def test_a_sum_of_fewer_finite_uploads_than_the_threshold_is_void(tmp_path, monkeypatch):
    """Two of three sites diverge: a sum would be the upload of the one that is left."""
    let_diverge(monkeypatch, "site-0", "site-1")
    rows = rows_of(tmp_path, nodes=real_sites(3, tmp_path / "disk"), algo="fedavg")

    for row in rows[:2]:
        assert row["void"]
        assert not row["accuracy"]
        assert sorted(row["failed"]) == ["site-0", "site-1"]


def test_a_site_that_diverges_in_every_round_costs_only_itself(tmp_path, sites, monkeypatch):
    """Its reply looks like that of any other failure, and it is asked again in the next round.

    It leaves each sum (numbers 2, 4 and 6 for rounds 1 to 3) and keeps no secret of it.
    """
    let_diverge(monkeypatch, "site-1")
    progress = []

    def read_progress(message, reply):
        (file,) = (tmp_path / "disk-1" / "privacy").glob("*.secagg")
        stored = json.loads(file.read_text())
        progress.append((stored["stage"], stored["secret"], stored["sent"]))
        return reply

    tamper = when(read_progress, "train", node=1001)
    rows = rows_of(tmp_path, tamper, sites, algo="fedavg", rounds=3)

    assert progress == [("left", "", 2), ("left", "", 4), ("left", "", 6)]

    reason = "an unexpected error; the log of the site says more"
    # three rounds, and the final evaluation, in which nobody uploads
    assert [row["failed"] for row in rows] == 3 * [{"site-1": reason}] + [{}]
    for row in rows:
        assert row["asked"] == CLIENTS
        assert not row["void"]


# -- shares that are wrong ------------------------------------------------------------------------
def wrong_share_of(owners):
    """Return a change of a reply: other shares of these sites' keys than were dealt."""

    def change(message, reply):
        record = reply.content.config_records[SECAGG]
        for site in owners & record.keys():
            # as long as a share, and another one in each message
            record[site] = bytes([0, *message.metadata.message_id.encode()[:32]])
        return reply

    return change


def rows_of_ten(folder, owners, *liars):
    """Run ten sites for a round, of which the ``liars`` send wrong shares of the owners' keys.

    Return the rows of the round and of the final evaluation.
    """
    lie = by(dict.fromkeys(liars, wrong_share_of(owners)), "query.unmask")
    train, final = run_federation(config_of(folder, rounds=1), clients=10, tamper=lie).rows
    return train, final


@pytest.mark.parametrize("liars", [(1000, 1005), (1000, 1001, 1002)])
def test_liars_about_a_key_are_out_and_its_owner_is_not(liars, tmp_path):
    """Two or three of ten sites lie together about a key of site-3.

    Seven must stay: with three liars no right share is to spare.
    """
    train, final = rows_of_ten(tmp_path, {"site-3"}, *liars)

    assert not train["void"]
    assert sorted(train["refused"]) == [f"site-{node - 1000}" for node in liars]
    for reason in train["refused"].values():
        assert "another share of a key of site-3 than it was dealt" in reason
    assert (final["asked"], final["void"]) == (10 - len(liars), False)


def test_more_liars_than_a_sum_bears_have_no_honest_site_expelled(tmp_path):
    """Five of ten sites lie about a key of site-9: a round is lost, and they are out."""
    train, final = rows_of_ten(tmp_path, {"site-9"}, *range(1000, 1005))

    assert train["void"]
    assert sorted(train["refused"]) == [f"site-{number}" for number in range(5)]
    assert final["asked"] == 5


def without_share_of(owner):
    """Return a change of a reply: it has no share of this site's key."""

    def change(message, reply):
        del reply.content.config_records[SECAGG][owner]
        return reply

    return change


@pytest.mark.parametrize("deniers", [3, 4])
def test_who_is_said_by_many_to_have_dealt_wrong_shares_is_out(deniers, tmp_path):
    """Sites that give no share of site-9's key say with that that it has dealt them a wrong one.

    Three of ten may lie, and seven shares are left, as many as are needed. If four say so, the
    round is void, and site-9 is out.
    """
    denying_nodes = range(1000, 1000 + deniers)
    deny = by(dict.fromkeys(denying_nodes, without_share_of("site-9")), "query.unmask")
    train, final = rows_of(tmp_path, deny, clients=10, rounds=1)

    is_believed = deniers > 3
    assert train["void"] == is_believed
    assert list(train["refused"]) == (["site-9"] if is_believed else [])
    assert final["asked"] == (9 if is_believed else 10)


def test_nobody_is_out_where_few_can_have_lied(tmp_path):
    """Three of ten sites are lost, and of the seven others, all of whom are needed, one denies.

    The round is void, but a single site may have lied about site-3's share.
    """
    deny = by({1000: without_share_of("site-3")}, "query.unmask")
    gone = by(dict.fromkeys((1007, 1008, 1009), silent), "query.unmask")
    train, final = rows_of(tmp_path, both(deny, gone), clients=10, rounds=1)

    assert train["void"]
    assert train["refused"] == {}
    assert final["asked"] == 10

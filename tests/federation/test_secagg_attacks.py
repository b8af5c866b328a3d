"""A server or a few sites that cheat in a secure sum: nothing is read, and no honest site is out.

Each scene worked, or cost an honest site its place, before what it tries was stopped.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message

from client_app.algorithms.base import ClientAlgorithm, Payload
from client_app.protections import secure_sum as client_secagg
from protofl_common.privacy.masks import KEY
from protofl_common.privacy.shares import SHARE
from protofl_common.wire.records import SECAGG
from server_app.network.exchange import MessageExchange
from server_app.network.membership import FederationError
from tests.support.accidents import Killed, on_message
from tests.support.attacks import both, by, silent, when
from tests.support.given import Patch
from tests.support.harness import RUN_ID, Outcome, Tamper, run_config, run_federation
from tests.support.sites import real_sites

CLIENTS = 4
SMALL: dict[str, Any] = {
    "dataset": "digits",
    "partition": "pathological",
    "classes_per_client": 5,
    "models": "htcnn-1",
    "train_samples": 10,
    "test_samples": 10,
}
VICTIM = 1003


def rows_of(folder: Path, nodes: Any = CLIENTS, tamper: Tamper | None = None, **more: Any) -> Any:
    """The rows of a run, also of one that ends early because its rounds are void."""
    config = run_config(folder, **{"rounds": 2, "secagg": True, "run_name": "mine"} | SMALL | more)
    where = {"clients": nodes} if isinstance(nodes, int) else {"nodes": nodes}
    with suppress(FederationError):
        run_federation(config, tamper=tamper, **where)
    return [json.loads(line) for line in (folder / "runs/mine/metrics.jsonl").open()]


# -- masks depend on all that a site was sent
def tell(
    monkeypatch: Patch, node: int | None, number: int, change: Callable[[Message], None]
) -> None:
    """The server changes what it sends to a node, or to all, in a round and after it."""
    honest = MessageExchange._push

    def push(self: Any, messages: Any) -> None:
        for message in messages.values():
            meta = message.metadata
            if node in (None, meta.dst_node_id) and int(meta.group_id) >= number:
                change(message)
        honest(self, messages)

    monkeypatch.setattr(MessageExchange, "_push", push)


def history(text: str) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        message.content.config_records["round"]["run_history"] = text

    return change


NO_STATE_COUNTS = f"999:1,{RUN_ID}"


def test_a_site_does_not_begin_anew_because_the_server_says_that_no_state_counts(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Its peers' models may be dead from a poisoned round: the sum would be its upload alone."""
    tell(monkeypatch, VICTIM, 2, history(NO_STATE_COUNTS))
    rows = rows_of(tmp_path, real_sites(CLIENTS, tmp_path / "disk"))
    (said,) = set(rows[1]["failed"].values())
    assert list(rows[1]["failed"]) == ["site-3"]
    counts = (
        f"in which round 1 of the Flower run {RUN_ID} does not count, but this site has answered"
    )
    assert said == f"round.run_history is '{NO_STATE_COUNTS}', {counts} it"
    assert not rows[1]["void"]  # of the three others


@pytest.mark.parametrize(("algo", "said"), [
    ("fedavg", f"in the Flower run {RUN_ID}, which had '{RUN_ID}'"),
    ("fedproto", "has models of earlier rounds, and begins with no new one"),
])  # fmt: skip
def test_a_site_goes_by_whatever_is_on_record(
    algo: str, said: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Also where its record of answers was lost: by how far it is in the sum, or by its models."""
    disk = tmp_path / "disk"

    def lose(message: Message, reply: Message) -> Message:
        (tmp_path / "disk-3" / "privacy" / "site-3.answered").unlink()
        return reply

    tell(monkeypatch, VICTIM, 2, history(NO_STATE_COUNTS))
    lost = when(lose, "query.unmask", VICTIM, 1)
    rows = rows_of(tmp_path, real_sites(CLIENTS, disk), lost, algo=algo)
    assert said in rows[1]["failed"]["site-3"]


def test_a_site_that_comes_late_begins_with_a_new_model(tmp_path: Path) -> None:
    late = when(silent, "query.advertise", VICTIM, 1)
    rows = rows_of(tmp_path, real_sites(CLIENTS, tmp_path / "disk"), late)
    assert [list(row["failed"]) for row in rows] == [["site-3"], [], []]
    assert not any(row["void"] for row in rows)


def test_sites_go_on_with_their_models_in_a_run_that_is_resumed(tmp_path: Path) -> None:
    nodes = real_sites(CLIENTS, tmp_path / "disk")
    config = run_config(tmp_path, rounds=3, secagg=True, run_name="mine", **SMALL)
    with pytest.raises(Killed):
        run_federation(config, nodes=nodes, tamper=on_message("train", 3))
    rows = run_federation(config | {"resume": True}, nodes=nodes, run_id=RUN_ID + 1).rows
    assert len(rows) == 4
    assert not any(row["failed"] or row["void"] for row in rows)


def test_masks_of_sites_that_were_told_other_histories_do_not_cancel(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Also where no site has a record that contradicts, as in its first round of a Flower run."""
    tell(monkeypatch, VICTIM, 1, history(NO_STATE_COUNTS))
    for row in rows_of(tmp_path):
        assert row["void"]
        assert not row["failed"]


@pytest.mark.parametrize("key", ["run_name", "counted", "part"])
def test_masks_depend_on_every_instruction(key: str, tmp_path: Path, monkeypatch: Patch) -> None:
    told = {"run_name": "other", "counted": 1, "part": 0.5}

    def change(message: Message) -> None:
        message.content.config_records["round"][key] = told[key]

    tell(monkeypatch, VICTIM, 1, change)
    nodes = real_sites(CLIENTS, tmp_path / "disk")
    assert all(row["void"] for row in rows_of(tmp_path, nodes, algo="fedavg"))


def test_masks_depend_on_which_round_was_the_best(tmp_path: Path, monkeypatch: Patch) -> None:
    def change(message: Message) -> None:
        if "best" in message.content:
            message.content["best"] = ConfigRecord({"after": 7, "on": ""})  # the others share one

    tell(monkeypatch, VICTIM, 1, change)
    more: dict[str, Any] = {"keep_best": True, "validation_fraction": 0.3, "rounds": 3}
    assert rows_of(tmp_path, **more)[2]["void"]


# -- every key is one site's
def copied(which: int, twiddle: bool = False) -> Tamper:
    """site-2 advertises one of site-1's three keys, or that with the bit that X25519 ignores."""
    seen: list[bytes] = []

    def note(message: Message, reply: Message) -> Message:
        seen.append(reply.content.config_records[SECAGG]["site-1"])
        return reply

    def copy(message: Message, reply: Message) -> Message:
        record = reply.content.config_records[SECAGG]
        keys, start = record["site-2"], which * KEY
        part = bytearray(seen[-1][start : start + KEY])
        part[-1] |= 0x80 * twiddle
        record["site-2"] = keys[:start] + bytes(part) + keys[start + KEY :]
        return reply

    return by({1001: note, 1002: copy}, "query.advertise")


@pytest.mark.parametrize(("which", "twiddle"), [(0, False), (1, False), (2, False), (1, True)])
def test_a_server_lets_no_key_of_two_sites_pass(which: int, twiddle: bool, tmp_path: Path) -> None:
    row, *_ = rows_of(tmp_path, 5, copied(which, twiddle), rounds=1)
    assert sorted(row["refused"]) == (["site-2"] if twiddle else ["site-1", "site-2"])
    assert row["void"] != twiddle  # fewer than four of five


@pytest.mark.parametrize(("which", "twiddle"), [(0, False), (1, False), (2, False), (1, True)])
def test_a_site_shares_nothing_where_two_have_a_key(
    which: int, twiddle: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Whether or not the server looks."""

    def accept(self: Any, keys: Any, number: int) -> dict[str, bytes]:
        return {site: its[site] for site, its in keys.items()}

    monkeypatch.setattr("server_app.round.SecureSum._true_keys", accept)
    rows = rows_of(tmp_path, CLIENTS, copied(which, twiddle), rounds=1)
    why = "keys of site-2 for a sum, which are none" if twiddle else "two sites' are the same"
    failed = rows[0]["failed"]
    assert len(failed) == CLIENTS
    assert all(why in failed[site] for site in ("site-0", "site-1", "site-3"))


# -- a site that diverged is lost before its upload
def diverging(monkeypatch: Patch, *names: str) -> None:
    """What these sites would send is NaN."""
    honest = ClientAlgorithm.upload

    def upload(self: Any) -> Payload:
        sent = honest(self)
        if self.client.name in names:
            broken = {key: value * torch.nan for key, value in (sent.weights() or {}).items()}
            sent = Payload(weights=broken)
        return sent

    monkeypatch.setattr(ClientAlgorithm, "upload", upload)


def test_a_sum_of_fewer_finite_uploads_than_the_threshold_is_void(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Else it would be the upload of the one that is left."""
    diverging(monkeypatch, "site-0", "site-1")
    for row in rows_of(tmp_path, real_sites(3, tmp_path / "disk"), algo="fedavg")[:2]:
        assert row["void"]
        assert not row["accuracy"]
        assert sorted(row["failed"]) == ["site-0", "site-1"]


def test_a_site_that_diverges_in_every_round_costs_only_itself(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Its reply is that of any failure. No secret of the sum stays; it is asked again in the next."""
    diverging(monkeypatch, "site-1")
    nodes = real_sites(CLIENTS, tmp_path / "disk")
    left: list[dict[str, Any]] = []

    def look(message: Message, reply: Message) -> Message:
        (file,) = (tmp_path / "disk-1" / "privacy").glob("*.secagg")
        left.append(json.loads(file.read_text()))
        return reply

    rows = rows_of(tmp_path, nodes, when(look, "train", 1001), algo="fedavg", rounds=3)
    assert [(one["stage"], one["secret"], one["sent"]) for one in left] == [
        ("left", "", 2 * number) for number in (1, 2, 3)
    ]
    said = "an unexpected error; the log of the site says more"
    assert [row["failed"] for row in rows] == 3 * [{"site-1": said}] + [{}]
    assert [(row["asked"], row["void"]) for row in rows] == 4 * [(4, False)]


# -- shares that are wrong
def wrong_share_of(owners: set[str]) -> Callable[[Message, Message], Message]:
    def change(message: Message, reply: Message) -> Message:
        record = reply.content.config_records[SECAGG]
        for site in owners & record.keys():
            record[site] = bytes([0, *message.metadata.message_id.encode()[:32]])
        return reply

    return change


def outcome_of_ten(folder: Path, owners: set[str], *liars: int, number: int = 10) -> Outcome:
    lie = by(dict.fromkeys(liars, wrong_share_of(owners)), "query.unmask")
    config = run_config(folder, secagg=True, rounds=1, **SMALL)
    return run_federation(config, number, lie)


def test_two_liars_do_not_get_a_third_site_expelled(tmp_path: Path) -> None:
    """Each gives one wrong share of site-3's key. The sum is right; site-3 may have dealt them."""
    outcome = outcome_of_ten(tmp_path, {"site-3"}, 1000, 1005)
    train, final = outcome.rows
    assert not train["void"]
    assert sorted(train["refused"]) == ["site-0", "site-5"]
    assert all(
        "of a key of site-3: one of the two lies" in said for said in train["refused"].values()
    )
    assert (final["asked"], final["void"]) == (10, False)


def test_two_liars_about_all_keys_are_named_and_out(tmp_path: Path) -> None:
    outcome = outcome_of_ten(tmp_path, {f"site-{i}" for i in range(10)}, 1000, 1005)
    train, final = outcome.rows
    assert not train["void"]
    assert sorted(train["refused"]) == ["site-0", "site-5"]
    assert (final["asked"], final["void"]) == (8, False)


def test_as_many_liars_as_a_sum_bears_cost_nothing(tmp_path: Path) -> None:
    """Three of ten, where seven must stay: who they are is not certain, so nobody is named."""
    train, final = outcome_of_ten(tmp_path, {"site-3"}, 1000, 1005, 1006).rows
    assert not train["void"]
    assert train["refused"] == {}
    assert final["asked"] == 10


def test_nobody_is_out_where_a_liar_alone_can_spoil_a_key(tmp_path: Path) -> None:
    """Of seven shares that are left, where seven are needed, one is wrong."""
    lie = by({1000: wrong_share_of({"site-3"})}, "query.unmask")
    gone = by(dict.fromkeys((1007, 1008, 1009), silent), "query.unmask")
    train, final = rows_of(tmp_path, 10, both(lie, gone), rounds=1)
    assert train["void"]
    assert train["refused"] == {}
    assert final["asked"] == 10


def test_two_owners_do_not_get_an_honest_peer_expelled(tmp_path: Path, monkeypatch: Patch) -> None:
    """They seal wrong shares for it, which it then gives back."""
    honest, drawn = client_secagg.masks.new_secret, list[bytes]()
    split = client_secagg.shares.split

    def noted() -> bytes:
        drawn.append(honest())
        return drawn[-1]

    def wrong_for_site_5(secret: bytes, threshold: int, points: Any) -> dict[int, bytes]:
        dealt = split(secret, threshold, points)
        owner = next(n for n, keys in enumerate(drawn) if secret in keys) % 10
        return dealt | {6: bytes(SHARE)} if owner < 2 else dealt

    monkeypatch.setattr(client_secagg.masks, "new_secret", noted)
    monkeypatch.setattr(client_secagg.shares, "split", wrong_for_site_5)
    train, final = outcome_of_ten(tmp_path, set()).rows
    assert not train["void"]
    assert list(train["refused"]) == ["site-5"]
    assert "one of the two lies" in train["refused"]["site-5"]
    assert final["asked"] == 10

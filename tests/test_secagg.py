"""Secure aggregation over whole runs: the sums are right, whoever is lost or lies, and nothing else can be read."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType, RecordDict
from safetensors.torch import load_file
from scipy.stats import chisquare

from client_app.app import app as client_app
from protofl_common.catalog import CATALOG
from protofl_common.config.options import SettingsError
from protofl_common.privacy.masks import KEY, SEALED
from protofl_common.privacy.shamir import SHARE
from protofl_common.settings import Settings, default_run_config
from protofl_common.wire.secagg import RECORD, pack_by_site
from server_app.network.membership import FederationError
from tests.attacks import from_node, silent, values_of
from tests.harness import CACHE, LocalGrid, Outcome, Tamper, run_config, run_federation
from tests.test_resume import Killed, on_message
from tests.test_wire_privacy import bytes_of, read_anew

CLIENTS = 4
DATA: dict[str, Any] = {"dataset": "digits", "partition": "pathological", "classes_per_client": 5, "models": "htcnn-1"}
SMALL: dict[str, Any] = DATA | {"train_samples": 10, "test_samples": 10}
LONG = pytest.mark.long
STAGES = ("query.advertise", "query.share", "train", "query.unmask")


def federation(folder: Path, tamper: Tamper | None = None, **settings: Any) -> Outcome:
    """Four clients with five classes each."""
    return run_federation(run_config(folder, **{"rounds": 1, "secagg": True} | SMALL | settings), CLIENTS, tamper)


def lost(stage: str, *nodes: int, number: int = 1) -> Tamper:
    """These nodes fail in a stage of a round."""

    def tamper(message: Message, reply: Message) -> Message:
        meta = message.metadata
        here = meta.message_type == stage and meta.dst_node_id in nodes and meta.group_id == str(number)
        return silent(message, reply) if here else reply

    return tamper


def tensors(outcome: Outcome) -> dict[str, torch.Tensor]:
    """All global ones."""
    files = [outcome.folder / f"{name}.safetensors" for name in ("prototypes", "weights")]
    return {name: value for file in files if file.exists() for name, value in load_file(file).items()}


def assert_same(found: Outcome, wanted: Outcome) -> None:
    """Up to float32 and the steps of the sums."""
    one, other = tensors(found), tensors(wanted)
    assert one.keys() == other.keys()
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=2e-6, atol=2e-6, msg=name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Runs of FedProto without secure aggregation: with all clients, and without the upload of one."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        "all": federation(folder / "all", secagg=False),
        "without site-1": federation(folder / "three", lost("train", 1001), secagg=False),
    }


# -- the sums ----------------------------------------------------------------------------------------------------------

ABLE = {algo for algo, row in CATALOG.items() if row.exchange.up and not row.needs_single_uploads(row.exchange)}
KINDS: dict[str, dict[str, Any]] = {
    "fedproto": {},
    "fedproto, uniform": {"fedproto__weighting": "uniform"},
    "fedproto-avg": {},
    "fedpcl": {"fedpcl__prototypes": "global"},
}
ALL = [kind for kind in KINDS if kind != "fedpcl"]
ALL += [pytest.param(algo, marks=LONG) for algo in sorted({*ABLE, "fedpcl"} - set(ALL))]


@pytest.mark.parametrize("kind", ALL)
def test_a_run_leaves_what_one_without_masks_leaves(kind: str, tmp_path: Path) -> None:
    algo, more = kind.partition(",")[0], KINDS.get(kind, {})
    plain, summed = (federation(tmp_path / str(secagg), algo=algo, secagg=secagg, **more) for secagg in (False, True))
    assert summed.summary["trouble"] == plain.summary["trouble"]
    assert_same(summed, plain)
    figures = [run.rows[-1]["accuracy"] for run in (summed, plain)]
    assert figures[0] == figures[1]


def test_algorithms_that_send_nothing_take_no_part_in_it(tmp_path: Path) -> None:
    outcome = federation(tmp_path, algo="local")
    assert {message.metadata.message_type for message, _ in outcome.grid.log} == {"query", "train", "evaluate"}
    assert outcome.rows[0]["valid"] == CLIENTS


@pytest.mark.parametrize("stage", STAGES)
def test_who_is_lost_is_missed_in_the_sum_and_nowhere_else(
    stage: str, tmp_path: Path, plain: dict[str, Outcome]
) -> None:
    """After its upload it is not even missed there."""
    found = federation(tmp_path, lost(stage, 1001))
    assert_same(found, plain["all" if stage == "query.unmask" else "without site-1"])
    assert list(found.rows[0]["failed"]) == ["site-1"]
    assert not found.rows[0]["void"]


SENT = ("keys", "shares of their keys", "uploads", "shares to unmask the sum")


@pytest.mark.parametrize(
    ("stage", "what"),
    [
        pytest.param(stage, what, marks=LONG if stage in STAGES[::2] else ())
        for stage, what in zip(STAGES, SENT, strict=True)
    ],
)
def test_below_the_threshold_a_round_changes_nothing(
    stage: str, what: str, tmp_path: Path, plain: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    found = federation(tmp_path, lost(stage, 1001, 1003, number=2), rounds=2)
    assert [row["void"] for row in found.rows] == [False, True, False]
    said = f"void: secure aggregation: 2 of 4 sites sent {what}, fewer than the 3 needed (secagg-threshold)"
    assert said in capsys.readouterr().out
    down = [m.content["prototypes"] for m, _ in found.grid.log if m.metadata.message_type == MessageType.EVALUATE]
    wanted = tensors(plain["all"])["means"].numpy()
    assert len(down) == CLIENTS
    assert all(np.allclose(values_of(one["means"]), wanted, atol=2e-6) for one in down)


def lies_about_shares(node: int) -> Tamper:
    """What it gives back is not what it was given."""

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "query.unmask" and message.metadata.dst_node_id == node:
            record = reply.content.config_records[RECORD]
            for site in record:
                record[site] = bytes(SHARE - 1) + b"\7"
        return reply

    return tamper


@pytest.mark.parametrize("node", [1000, 1002])
def test_one_wrong_share_is_named_and_the_sum_right(node: int, tmp_path: Path, plain: dict[str, Outcome]) -> None:
    found = federation(tmp_path, lies_about_shares(node))
    assert_same(found, plain["all"])
    refused = found.rows[0]["refused"]
    assert list(refused) == [f"site-{node - 1000}"]
    assert "secure aggregation: a wrong share of a key of site-" in refused[f"site-{node - 1000}"]


def test_too_many_wrong_shares_cost_the_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One is lost, one lies: three shares, of which one is wrong, where three are needed."""

    def tamper(message: Message, reply: Message) -> Message:
        return lost("train", 1001)(message, lies_about_shares(1002)(message, reply) or reply) or reply

    found = federation(tmp_path, tamper)
    assert found.rows[0]["void"]
    assert "the shares of site-0's keys do not give them: it, or others that hold them, lie" in capsys.readouterr().out
    assert not tensors(found)


def test_an_upload_that_is_noise_costs_the_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody can tell whose it was."""

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == MessageType.TRAIN and message.metadata.dst_node_id == 1002:
            array = reply.content.array_records["masked"]["sum"]
            array.data = (values_of(array) * 3).tobytes()
        return reply

    assert federation(tmp_path, tamper).rows[0]["void"]
    assert "void: secure aggregation: " in capsys.readouterr().out


RUBBISH: dict[str, tuple[str, Callable[[RecordDict], Any]]] = {
    "keys of another length": ("query.advertise", lambda c: c[RECORD].update({"site-1": bytes(5)})),
    "keys that are none": ("query.advertise", lambda c: c[RECORD].update({"site-1": bytes(3 * KEY)})),
    "another's keys": ("query.advertise", lambda c: c[RECORD].update({"site-2": bytes(3 * KEY)})),
    "no record": ("query.advertise", lambda c: c.__delitem__(RECORD)),
    "shares of another length": ("query.share", lambda c: c[RECORD].update({"site-2": b""})),
    "shares for strangers": ("query.share", lambda c: c[RECORD].update({"nobody": bytes(SEALED)})),
    "a name that is none": ("query.share", lambda c: c[RECORD].update({"../x": bytes(SEALED)})),
    "a masked upload of another length": ("train", lambda c: cut(c)),
    "an upload in the clear": ("train", lambda c: c.update({"prototypes": c.pop("masked")})),
    "words for shares": ("query.unmask", lambda c: c[RECORD].update({"site-2": "word"})),
}


def cut(content: RecordDict) -> None:
    array = content.array_records["masked"]["sum"]
    array.data, array.shape = array.data[:-8], (array.shape[0] - 1,)


def test_rubbish_costs_only_its_sender(tmp_path: Path) -> None:
    """A kind of it in every round."""
    kinds = list(RUBBISH)

    def tamper(message: Message, reply: Message) -> Message:
        meta = message.metadata
        stage, change = RUBBISH[kinds[max(0, int(meta.group_id) - 1)]]
        if meta.message_type == stage and meta.dst_node_id == 1001:
            change(reply.content)
        return from_node(message, reply)

    outcome = federation(tmp_path, tamper, rounds=len(kinds), evaluate_every=100, train_samples=5, test_samples=5)
    for kind, row in zip(kinds, outcome.rows, strict=False):
        assert list(row["refused"]) == ["site-1"], kind
        assert not row["void"], kind
        assert len(row["refused"]["site-1"]) < 600


@pytest.mark.parametrize("stage", ["train", *(pytest.param(one, marks=LONG) for one in STAGES[1::2])])
def test_a_run_that_is_resumed_leaves_what_an_undisturbed_one_leaves(stage: str, tmp_path: Path) -> None:
    """Bit for bit: sums of whole numbers do not depend on masks. In each round three of the four clients take part."""
    more: dict[str, Any] = {"rounds": 2, "run_name": "mine", "participation": 0.75}
    wanted = federation(tmp_path / "whole", **more)
    with pytest.raises(Killed):
        federation(tmp_path / "stopped", on_message(stage, 2), **more)
    config = run_config(tmp_path / "stopped", secagg=True, resume=True, **SMALL | more)
    found = tensors(run_federation(config, CLIENTS, run_id=4712))
    assert all(torch.equal(found[name], value) for name, value in tensors(wanted).items())


# -- what can be read --------------------------------------------------------------------------------------------------


def test_every_byte_of_every_reply_is_declared_and_tells_no_counts_and_no_classes(tmp_path: Path) -> None:
    """`tests/test_wire_privacy.py` says how the bytes are read; four clients, each with five of ten classes."""
    outcome = federation(tmp_path, rounds=2)
    uploads = []
    for message, reply in outcome.grid.log:
        kind = message.metadata.message_type
        names, arrays = read_anew("fedproto", kind, bytes_of(reply.content))
        wanted = {"query": {"site"}, "train": {"masked", "report"}, "evaluate": {"report"}}
        assert names == wanted.get(kind, {RECORD})
        if "report" in names:
            assert reply.content.metric_records["report"]["train_samples"] == 0
        if "masked" in names:
            assert {key: value.shape for key, value in arrays["masked"].items()} == {"sum": (1 + 10 * (64 + 1),)}
            uploads.append(arrays["masked"]["sum"])
        if kind == MessageType.QUERY:
            card = reply.content.config_records["site"]
            assert (card["holds"], card["train_samples"], card["found"]) == ([], 0, 0)
    assert len(uploads) == 2 * CLIENTS
    numbers = np.frombuffer(b"".join(one.tobytes() for one in uploads), np.uint8)
    assert chisquare(np.bincount(numbers, minlength=256)).pvalue > 1e-6  # the masks are drawn anew each time


@pytest.mark.parametrize(("dp", "told"), [("none", set()), ("sample", {"train-samples"})])
def test_what_the_run_leaves_tells_nothing_of_single_uploads(dp: str, told: set[str], tmp_path: Path) -> None:
    """A budget of differential privacy needs the numbers of training samples."""
    outcome = federation(tmp_path, dp=dp)
    sites = json.loads((outcome.folder / "sites.json").read_text())["sites"]
    assert all(facts.keys() == {"arch", "domain", "parameters", "test-samples"} | told for facts in sites.values())
    assert not (outcome.folder / "client-prototypes.safetensors").exists()
    assert all(("train-samples" in row) == bool(told) for row in outcome.rows[0]["clients"].values())
    assert ("total" in outcome.rows[0]["losses"]) == (dp == "none")


# -- a server that asks for more ---------------------------------------------------------------------------------------


BySite = dict[str, bytes]


def own_keys(reply: Message) -> BySite:
    return dict(reply.content.config_records[RECORD])  # type: ignore[arg-type]


def strangers(number: int) -> BySite:
    return {f"x{i}": bytes([i + 1]) * 3 * KEY for i in range(number)}


def sites(*numbers: int) -> Callable[[Message, Message], BySite]:
    return lambda message, reply: {f"site-{number}": b"" for number in numbers}


def as_it_was(message: Message, reply: Message) -> BySite:
    return dict(message.content.config_records.get(RECORD, {}))  # type: ignore[arg-type]


TRICKS: dict[str, tuple[str, str, Callable[[Message, Message], BySite], str]] = {
    "a second upload": ("train", "train", as_it_was, "does not follow 'share'"),
    "keys for a second upload": ("train", "query.advertise", as_it_was, "keys asked for round 1, after the upload"),
    "a second unmasking": ("query.unmask", "query.unmask", sites(0, 1, 2), "does not follow 'mask'"),
    "unmasking without itself": ("train", "query.unmask", sites(1, 2, 3), "an unmasking for 3 sites"),
    "unmasking too few": ("train", "query.unmask", sites(0, 1), "an unmasking for 2 sites"),
    "unmasking strangers": ("train", "query.unmask", sites(0, 1, 2, 9), "an unmasking for 4 sites"),
    "an unmasking before its upload": ("query.share", "query.unmask", sites(0, 1, 2), "does not follow 'mask'"),
    "an upload to the sum of two": (
        "query.share",
        "train",
        lambda message, reply: {"site-1": bytes(SEALED)},
        "shares of 2 sites, fewer than 3",
    ),
    "a sum of two": (
        "query.advertise",
        "query.share",
        lambda message, reply: own_keys(reply) | strangers(1),
        "2 sites for a sum, fewer than 3",
    ),
    "its own keys changed": (
        "query.advertise",
        "query.share",
        lambda message, reply: strangers(2) | {"site-0": bytes(3 * KEY)},
        "keys of which this site's are not its own",
    ),
    "one site under two names": (
        "query.advertise",
        "query.share",
        lambda message, reply: own_keys(reply) | strangers(2) | {"x2": strangers(1)["x0"]},
        "or two sites' are the same",
    ),
}


def test_a_client_reveals_no_more_to_a_server_that_tries(tmp_path: Path) -> None:
    """After its answer to one message it gets others, and refuses; the round goes on."""
    grids: list[LocalGrid] = []
    answers: dict[str, str] = {}

    def tamper(message: Message, reply: Message) -> Message:
        for trick, (at, stage, told, _) in TRICKS.items():
            if message.metadata.message_type == at and message.metadata.dst_node_id == 1000:
                records = {name: record for name, record in message.content.items() if name != RECORD}
                more = told(message, reply)
                content = RecordDict({**records, **(pack_by_site(more) if more else {})})
                context = Context(4711, 1000, grids[0].nodes[1000], RecordDict(), grids[0].run_config)
                again = client_app(Message(content, 1000, stage, group_id="1"), context)
                answers[trick] = str(again.error.reason)
        return reply

    outcome = run_federation(
        run_config(tmp_path, rounds=1, secagg=True, **SMALL), CLIENTS, tamper, on_grid=grids.append
    )
    assert answers.keys() == TRICKS.keys()
    for trick, (_, _, _, said) in TRICKS.items():
        assert said in answers[trick], trick
    assert not outcome.rows[0]["void"]


def test_the_secret_lies_in_a_file_of_this_user_and_is_forgotten(tmp_path: Path) -> None:
    seen: dict[str, dict[str, Any]] = {}

    def tamper(message: Message, reply: Message) -> Message:
        for file in (tmp_path / "runs").rglob("site-0/secagg.json"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            seen[message.metadata.message_type] = json.loads(file.read_text())
        return reply

    outcome = federation(tmp_path, tamper)
    assert [len(bytes.fromhex(seen[stage]["secret"])) for stage in STAGES] == [96, 96, 0, 0]
    assert [len(seen[stage]["shares"]) for stage in STAGES] == [0, 1, 4, 0]
    assert not list(outcome.folder.rglob("secagg.json"))


def test_another_name_of_the_run_does_not_make_a_round_a_new_one(tmp_path: Path) -> None:
    """At a site with an operator; nor does the end of the run."""
    nodes: dict[int, dict[str, Any]] = {
        1000 + i: {"site-name": f"n{i}", "partition-id": i, "num-partitions": 4, "state-dir": str(tmp_path / f"n{i}")}
        for i in range(CLIENTS)
    }
    config = run_config(tmp_path, rounds=1, secagg=True, **SMALL)
    outcome = run_federation(config, CLIENTS, nodes=nodes)
    assert not outcome.rows[0]["void"]
    message = next(m for m, _ in outcome.grid.log if m.metadata.message_type == "query.advertise")
    message.content.config_records["round"]["run_name"] = "another"
    again = Message(message.content, 1000, "query.advertise", group_id="1")
    answer = client_app(again, Context(4711, 1000, CACHE | nodes[1000], RecordDict(), config))
    assert "keys asked for round 1, after the upload of round 1" in str(answer.error.reason)
    (file,) = (tmp_path / "n0" / "privacy").iterdir()
    assert (stat.S_IMODE(file.stat().st_mode), json.loads(file.read_text())["secret"]) == (0o600, "")


# -- settings ----------------------------------------------------------------------------------------------------------


def refusal(config: dict[str, Any], node: dict[str, Any] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config(default_run_config() | config, node)
    return str(caught.value)


WHY = {
    "fedtgp": "its server does more with the clients' prototypes than average them",
    "fedpcl": "its clients receive one another's prototypes",
    "mpft": "its server does more with the clients' prototypes than average them",
    "fedplvm": "its server does more with the clients' prototypes than average them",
    "fpl": "its server does more with the clients' prototypes than average them",
    "fedorgp": "its server does more with the clients' prototypes than average them",
    "fedgh": "its server does more with the clients' prototypes than average them",
    "fednh": "its server scales every client's prototypes to length 1",
    "feddistill": "what teaches a client is the mean of the others' outputs",
    "fesem": "its server groups the clients by their models",
    "fedkd": "its updates travel as factors, which cannot be added",
    "fedfa": "its server takes the variance over the clients",
}
"""By hand, from the papers: what no sum can give."""


@pytest.mark.parametrize("algo", CATALOG)
def test_what_needs_single_uploads_is_refused_by_name(algo: str) -> None:
    if algo not in WHY:
        Settings.from_run_config(default_run_config() | {"algo": algo, "secagg": True})
        return
    said = refusal({"algo": algo, "secagg": True})
    assert said.startswith(
        f"secagg = true: {algo} needs single uploads, for {WHY[algo]}; choose an algo of local, fedavg"
    )
    assert said.endswith(", or fedpcl with fedpcl.prototypes = 'global'")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "merging",
            "median",
            "merging = 'median': secagg = true hides the single uploads that it needs; choose 'mean'",
        ),
        ("max-update-ratio", 2.0, "max-update-ratio = 2.0: secagg = true hides the single uploads that it needs"),
        ("insight", "summary", "insight = 'summary': secagg = true hides"),
        ("metrics", "auc,recall", "metrics = 'recall': it tells which classes a client has"),
        ("baselines", "fedtgp", ""),
        ("secagg-threshold", 0.5, "secagg-threshold = 0.5: must be a number above 0.5 and at most 1"),
    ],
)
def test_what_would_tell_what_it_hides_is_refused(key: str, value: Any, said: str, tmp_path: Path) -> None:
    if key != "baselines":
        assert refusal({"secagg": True, key: value}).startswith(said)
        return
    with pytest.raises(SettingsError, match="fedtgp needs single uploads"):
        federation(tmp_path, baselines=value)


def test_a_site_may_take_part_in_nothing_else() -> None:
    node: dict[str, Any] = {"site-name": "north", "require-secagg": True}
    said = "secagg = false: this site takes part with secure aggregation only (node config: require-secagg)"
    assert refusal({}, node) == said
    Settings.from_run_config(default_run_config() | {"secagg": True}, node)
    assert "require-secagg = 'yes' must be true or false" in refusal({"secagg": True}, node | {"require-secagg": "yes"})


def test_two_clients_are_too_few(tmp_path: Path) -> None:
    with pytest.raises(
        FederationError, match=r"secagg = true: a round asks 2 sites \(participation = 0\.5\); 3 are the"
    ):
        federation(tmp_path, participation=0.5)


def test_a_stage_that_the_settings_do_not_ask_for_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path, **SMALL)
    grid = LocalGrid(config, {7: {"partition-id": 0, "num-partitions": 4}})
    grid.push_messages([Message(RecordDict(), 7, "query.advertise", group_id="1")])
    assert "which the run's settings do not ask for" in str(grid.log[0][1].error.reason)

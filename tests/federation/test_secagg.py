"""Secure aggregation over whole runs: the sums are right, whoever is lost or lies, and nothing else can be read."""

import json
import re
import stat
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from html import unescape
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from safetensors.torch import load_file
from scipy.stats import chisquare

from client_app.algorithms.base import ClientAlgorithm, Payload
from client_app.answers import UNEXPECTED
from client_app.app import app as client_app
from client_app.introduction import card_of
from client_app.protections import secure_sum as client_secagg
from protofl_common.basics.run_history import RunHistory
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.privacy.masks import KEY, PUBLIC, SEALED, SIGNATURE, new_secret, public_of
from protofl_common.privacy.shares import SHARE
from protofl_common.runs.figures import HIDDEN
from protofl_common.tools.tables.figure import Figure, NoFigure
from protofl_common.wire.records import (
    NEXT_SUM,
    SECAGG,
    Instructions,
    pack_by_site,
    pack_instructions,
)
from protofl_common.wire.schema import RefusedMessage
from server_app import round as server_round
from server_app.network.membership import FederationError
from server_app.protections.secure_sum import SecureSum
from tests.support import harness
from tests.support.accidents import Killed, on_message
from tests.support.anew import bytes_of, read_anew
from tests.support.attacks import both, by, raw, silent, values_of, when
from tests.support.commands import output
from tests.support.given import Patch, Printed
from tests.support.harness import (
    CACHE,
    LocalGrid,
    Outcome,
    Tamper,
    client_of,
    refusal,
    run_config,
    run_federation,
    settings_of,
)
from tests.support.sites import real_sites

CLIENTS = 4
DATA: dict[str, Any] = {
    "dataset": "digits",
    "partition": "pathological",
    "classes_per_client": 5,
    "models": "htcnn-1",
}
SMALL: dict[str, Any] = DATA | {"train_samples": 10, "test_samples": 10}
LONG = pytest.mark.long
STAGES = ("query.advertise", "query.share", "train", "query.unmask")


def federation(folder: Path, tamper: Tamper | None = None, **settings: Any) -> Outcome:
    """Four clients with five classes each."""
    return run_federation(
        run_config(folder, **{"rounds": 1, "secagg": True} | SMALL | settings), CLIENTS, tamper
    )


def lost(stage: str, *nodes: int, number: int = 1) -> Tamper:
    """These nodes fail in a stage of a round."""
    return when(by(dict.fromkeys(nodes, silent), stage), number=number)


def begun_anew(tamper: Tamper) -> Tamper:
    """Every sum takes all its stages, for site-1 begins none with the end of the one before."""
    return both(
        when(lambda _, reply: reply.content.pop(NEXT_SUM) and reply, "query.unmask", 1001), tamper
    )


def tensors(outcome: Outcome) -> dict[str, torch.Tensor]:
    """All global ones."""
    files = [outcome.folder / f"{name}.safetensors" for name in ("prototypes", "weights")]
    return {
        name: value for file in files if file.exists() for name, value in load_file(file).items()
    }


def assert_same(found: Outcome, wanted: Outcome) -> None:
    """Up to float32 and the steps of the sums."""
    torch.testing.assert_close(tensors(found), tensors(wanted), rtol=2e-6, atol=2e-6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Runs of FedProto without secure aggregation: with all clients, and without the upload of one."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        "all": federation(folder / "all", secagg=False),
        "without site-1": federation(folder / "three", lost("train", 1001), secagg=False),
    }


# -- the sums ----------------------------------------------------------------------------------------------------------

ABLE = {
    algo
    for algo, row in CATALOG.items()
    if row.exchange.up and not row.needs_single_uploads(row.exchange)
}
KINDS: dict[str, dict[str, Any]] = {"fedproto": {}, "fedproto, uniform": {"fedproto__weighting": "uniform"},
    "fedproto-avg": {}, "fedpcl": {"fedpcl__prototypes": "global"}}  # fmt: skip
ALL = [kind for kind in KINDS if kind != "fedpcl"]
ALL += [pytest.param(algo, marks=LONG) for algo in sorted({*ABLE, "fedpcl"} - set(ALL))]


@pytest.mark.parametrize("kind", ALL)
def test_a_run_leaves_what_one_without_masks_leaves(kind: str, tmp_path: Path) -> None:
    algo, more = kind.partition(",")[0], KINDS.get(kind, {})
    plain, summed = (
        federation(tmp_path / str(secagg), algo=algo, secagg=secagg, **more)
        for secagg in (False, True)
    )
    assert summed.summary["trouble"] == plain.summary["trouble"]
    assert_same(summed, plain)
    assert_figures_of_all(summed, plain)


def assert_figures_of_all(summed: Outcome, plain: Outcome) -> None:
    """The same over all samples, and no figure that only single clients give."""
    for found, wanted in zip(summed.rows, plain.rows, strict=True):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        for group in ("accuracy", "metrics", "validation"):
            assert found.get(group, {}).keys() == wanted.get(group, {}).keys(), group
            for name, figures in found.get(group, {}).items():
                by_samples = wanted[group][name]["weighted"]
                assert figures == pytest.approx(
                    {"mean": by_samples, "weighted": by_samples}, rel=1e-6
                ), name


@pytest.mark.parametrize("algo", ["fedproto", "local", "protofed"])
def test_figures_are_of_all_samples_and_of_no_single_client(algo: str, tmp_path: Path) -> None:
    """Of clients of different sizes; also where nothing is sent but figures, and in rounds without prototypes."""
    data = {
        "partition": "dirichlet",
        "total_samples": 300,
        "train_samples": 0,
        "test_samples": 0,
        "rounds": 2,
    }
    asked: dict[str, Any] = {
        "validation_fraction": 0.3,
        "metrics": "auc, balanced-accuracy",
        "algo": algo,
        **data,
    }
    plain, summed = (
        federation(tmp_path / str(secagg), secagg=secagg, **asked) for secagg in (False, True)
    )
    assert {"head/auc", "head/balanced-accuracy", "head"} <= summed.rows[0]["validation"].keys()
    assert all(row["accuracy"] and row["metrics"] for row in summed.rows)
    assert_figures_of_all(summed, plain)
    for row in summed.rows:
        assert all(
            one == {"accuracy": {}, "losses": {}, "seconds": one["seconds"]}
            for one in row["clients"].values()
        )
    for message, reply in summed.grid.log:
        if "report" in reply.content:
            report = reply.content.metric_records["report"]
            wanted = {
                "train_samples": 0,
                "test_samples": 0,
                "validation_samples": 0,
                "round": report["round"],
            }
            assert {
                name: value for name, value in report.items() if not name.startswith("seconds.")
            } == wanted
            assert "masked" in reply.content
        if message.metadata.message_type == MessageType.QUERY:
            card = reply.content.config_records["site"]
            assert not any(
                card[key]
                for key in ("train_samples", "test_samples", "validation_samples", "found")
            )


def test_whoever_shows_the_figures_shows_those_of_all_sites(
    tmp_path: Path, capsys: Printed
) -> None:
    """Console, page, comparison and tables, with baselines, the best model and metrics."""
    more: dict[str, Any] = {
        "baselines": "local",
        "keep_best": True,
        "metrics": "auc",
        "validation_fraction": 0.3,
    }
    config = run_config(
        tmp_path,
        rounds=2,
        secagg=True,
        report=True,
        run_name="mine",
        **SMALL | {"train_samples": 20},
    )
    run_federation(config | {key.replace("_", "-"): value for key, value in more.items()}, CLIENTS)
    console, folder = " ".join(capsys.readouterr().out.split()), tmp_path / "runs" / "mine"
    assert "worst" not in console.replace("worst 10 %", "")
    assert console.count(HIDDEN) == 2  # of the run, and beside its baseline
    page = (folder / "report.html").read_text()
    there = (
        HIDDEN,
        'id="accuracy-curves"',
        "Test accuracy over all samples",
        "means over all samples",
    )
    assert [text for text in there if text not in unescape(page)] == []
    assert "nan" not in page.partition("<svg")[0].lower()
    assert [
        text for text in ("could not be drawn", 'id="accuracy-of-clients') if text in page
    ] == []
    (clients,) = re.findall(r'id="clients".*?</section>', page, re.S)
    assert clients.count("<td>–</td>") >= CLIENTS
    assert Figure().read(folder) == Figure(over="by-samples").read(folder)
    for hidden in ({"over": "std"}, {"over": "worst-10%"}, {"domain": "digits"}):
        with pytest.raises(NoFigure, match="secure aggregation hides single clients"):
            Figure(**hidden).read(folder)
    assert Figure(what="validation/head").read(folder) >= 0
    assert f"Without a std: {HIDDEN}" in " ".join(
        output(capsys, "compare", folder, f"{folder}-local").out.split()
    )
    assert "final head over all samples." in " ".join(
        output(capsys, "compare", folder, "--what", "head").out.split()
    )


@pytest.mark.parametrize("stage", STAGES)
def test_who_is_lost_is_missed_in_the_sum_alone(
    stage: str, tmp_path: Path, plain: dict[str, Outcome]
) -> None:
    """After its upload it is not even missed there."""
    found = federation(tmp_path, lost(stage, 1001))
    assert_same(found, plain["all" if stage == "query.unmask" else "without site-1"])
    assert list(found.rows[0]["failed"]) == ["site-1"]
    assert not found.rows[0]["void"]


SENT = ("keys", "shares of their keys", "uploads", "shares to unmask the sum")


@pytest.mark.parametrize(("stage", "what"), [
    pytest.param(stage, what, marks=LONG if stage in STAGES[::2] else ())
    for stage, what in zip(STAGES, SENT, strict=True)
])  # fmt: skip
def test_too_few_sites_change_nothing(
    stage: str, what: str, tmp_path: Path, plain: Any, capsys: Printed
) -> None:
    found = federation(tmp_path, begun_anew(lost(stage, 1001, 1003, number=2)), rounds=3)
    assert [row["void"] for row in found.rows] == [False, True, False, False]
    assert [bool(row["accuracy"]) for row in found.rows] == [True, False, True, True]
    said = f"void: secure aggregation: 2 of 4 sites sent {what}, fewer than the 3 needed (secagg-threshold)"
    assert said in capsys.readouterr().out
    down = [message.content["prototypes"] for message, _ in found.exchanged(number=3)]
    wanted = tensors(plain["all"])["means"].numpy()
    assert len(down) == CLIENTS
    assert all(np.allclose(values_of(one["means"]), wanted, atol=2e-6) for one in down)


def lies_about_shares(node: int) -> Tamper:
    """What it gives back is not what it was given."""

    def change(message: Message, reply: Message) -> Message:
        record = reply.content.config_records[SECAGG]
        record.update(dict.fromkeys(record, bytes(SHARE - 1) + b"\7"))
        return reply

    return when(change, "query.unmask", node)


@pytest.mark.parametrize(("node", "rounds"), [(1000, 1), (1002, 1), (1002, 3)])
def test_one_wrong_share_is_named_and_its_liar_out(
    node: int, rounds: int, tmp_path: Path, plain: Any
) -> None:
    """The sum is right."""
    found = federation(tmp_path, lies_about_shares(node), rounds=rounds)
    if rounds == 1:
        assert_same(found, plain["all"])
    said = "secure aggregation: wrong shares of keys; it takes no further part in this run"
    assert [row["refused"] for row in found.rows] == [{f"site-{node - 1000}": said}, *rounds * [{}]]
    assert [(row["asked"], row["void"]) for row in found.rows] == [
        (4, False),
        *rounds * [(3, False)],
    ]


@pytest.mark.parametrize(("stage", "record"), [("train", NEXT_SUM), ("query.advertise", SECAGG)])
def test_two_sites_with_the_same_keys_are_out_and_cost_a_round_at_most(
    stage: str, record: str, tmp_path: Path
) -> None:
    """No other goes on with these, so that each round would be void, and nobody named."""
    keys: list[Any] = []

    def same(message: Message, reply: Message) -> Message:
        own = reply.content.config_records[record]
        keys.append(next(iter(own.values())))
        own.update(dict.fromkeys(own, keys[0]))
        return reply

    found = run_federation(
        run_config(tmp_path, secagg=True, rounds=3, **SMALL), 5, by({1001: same, 1002: same}, stage)
    )
    assert [sorted(row["refused"]) for row in found.rows] == [["site-1", "site-2"], *3 * [[]]]
    assert [row["void"] for row in found.rows] == [stage != "train", False, False, False]


def test_a_site_that_seals_wrong_shares_for_one_does_not_get_it_expelled(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Nobody can tell which of the two lies: both stay."""
    honest = client_secagg.shares.split

    def wrong_for_one(secret: bytes, threshold: int, points: Any) -> dict[int, bytes]:
        shares = honest(secret, threshold, points)
        return shares | {3: bytes(SHARE)} if secret in lying else shares

    lying: set[bytes] = set()
    own = client_secagg.masks.new_secret

    def noted() -> bytes:
        secret = own()
        if len(drawn) % CLIENTS == 0:  # site-0 is asked first
            lying.update(secret[start : start + KEY] for start in range(0, 3 * KEY, KEY))
        drawn.append(secret)
        return secret

    drawn: list[bytes] = []
    monkeypatch.setattr(client_secagg.shares, "split", wrong_for_one)
    monkeypatch.setattr(client_secagg.masks, "new_secret", noted)
    found = federation(tmp_path, rounds=2)
    assert [list(row["refused"]) for row in found.rows] == 3 * [["site-2"]]
    assert (
        "a wrong share of a key of site-0: one of the two lies"
        in found.rows[0]["refused"]["site-2"]
    )
    assert [row["asked"] for row in found.rows] == 3 * [4]
    assert not any(row["void"] for row in found.rows)


def test_a_site_whose_shares_fit_for_nobody_is_out(tmp_path: Path, monkeypatch: Patch) -> None:
    honest, first = (
        client_secagg.shares.split,
        iter([True, True]),
    )  # the two keys of site-0 in the first round

    def wrong(secret: bytes, threshold: int, points: Any) -> dict[int, bytes]:
        shares = honest(secret, threshold, points)
        return (
            {point: bytes([0, point]) * 16 + b"x" for point in shares}
            if next(first, False)
            else shares
        )

    monkeypatch.setattr(client_secagg.shares, "split", wrong)
    found = federation(tmp_path, rounds=3)
    assert [row["void"] for row in found.rows] == [True, False, False, False]
    assert list(found.rows[0]["refused"]) == ["site-0"]
    assert [row["asked"] for row in found.rows] == [4, 3, 3, 3]


def noise(message: Message, reply: Message) -> Message:
    array = reply.content.array_records["masked"]["sum"]
    array.data = (values_of(array) * 3).tobytes()
    return reply


@pytest.mark.parametrize(("tamper", "said"), [
    (both(lies_about_shares(1002), lost("train", 1001)), "the shares of site-0's keys do not give them: it, or others"),
    (by({1002: noise}), "void: secure aggregation: "),
])  # fmt: skip
def test_what_nobody_can_mend_costs_the_round(
    tamper: Tamper, said: str, tmp_path: Path, capsys: Printed
) -> None:
    """Of three shares, where three are needed, one is wrong; or an upload is noise, and nobody can tell whose."""
    found = federation(tmp_path, tamper)
    assert found.rows[0]["void"]
    assert said in capsys.readouterr().out
    assert not tensors(found)


RUBBISH: dict[str, tuple[str, Callable[[RecordDict], Any]]] = {
    "keys of another length": ("query.advertise", lambda c: c[SECAGG].update({"site-1": bytes(5)})),
    "keys that are none": (
        "query.advertise",
        lambda c: c[SECAGG].update({"site-1": bytes(PUBLIC + SIGNATURE)}),
    ),
    "another's keys": (
        "query.advertise",
        lambda c: c[SECAGG].update({"site-2": bytes(PUBLIC + SIGNATURE)}),
    ),
    "no record": ("query.advertise", lambda c: c.__delitem__(SECAGG)),
    "shares of another length": ("query.share", lambda c: c[SECAGG].update({"site-2": b""})),
    "shares for strangers": ("query.share", lambda c: c[SECAGG].update({"nobody": bytes(SEALED)})),
    "a name that is none": ("query.share", lambda c: c[SECAGG].update({"../x": bytes(SEALED)})),
    "a masked upload of another length": ("train", lambda c: cut(c)),
    "an upload in the clear": ("train", lambda c: c.update({"prototypes": c.pop("masked")})),
    "next keys of another length": ("train", lambda c: c[NEXT_SUM].update({"site-1": bytes(5)})),
    "another's next keys": (
        "train",
        lambda c: c[NEXT_SUM].update({"site-2": bytes(PUBLIC + SIGNATURE)}),
    ),
    "next shares for strangers": (
        "query.unmask",
        lambda c: c[NEXT_SUM].update({"nobody": bytes(SEALED)}),
    ),
    "words for shares": ("query.unmask", lambda c: c[SECAGG].update({"site-2": "word"})),
}
IN_UPLOADS = (
    "a masked upload of another length",
    "an upload in the clear",
)  # which cost the round only


def cut(content: RecordDict) -> None:
    array = content.array_records["masked"]["sum"]
    array.data, array.shape = array.data[:-8], (array.shape[0] - 1,)


def test_rubbish_costs_only_its_sender(tmp_path: Path) -> None:
    """A kind of it in every run; in the stages of keys and shares it is no accident, and the sender is out."""
    for kind, (stage, change) in RUBBISH.items():
        tamper = when(lambda _, reply, change=change: change(reply.content) or reply, stage, 1001)
        outcome = federation(
            tmp_path / kind.replace("/", "-"), tamper, rounds=2, train_samples=5, test_samples=5
        )
        assert list(outcome.rows[0]["refused"]) == ["site-1"], kind
        assert len(outcome.rows[0]["refused"]["site-1"]) < 600
        assert [row["asked"] for row in outcome.rows] == (
            [4, 4, 4] if kind in IN_UPLOADS else [4, 3, 3]
        ), kind
        assert not any(row["void"] for row in outcome.rows), kind


@pytest.mark.parametrize(
    "stage", ["train", *(pytest.param(one, marks=LONG) for one in STAGES[1::2])]
)
def test_a_run_that_is_resumed_leaves_what_an_undisturbed_one_leaves(
    stage: str, tmp_path: Path
) -> None:
    """Bit for bit: sums of whole numbers do not depend on masks."""
    more: dict[str, Any] = {"rounds": 2, "run_name": "mine"}
    wanted = federation(tmp_path / "whole", **more)
    with pytest.raises(Killed):
        federation(tmp_path / "stopped", begun_anew(on_message(stage, 2)), **more)
    config = run_config(tmp_path / "stopped", secagg=True, resume=True, **SMALL | more)
    found = tensors(run_federation(config, CLIENTS, run_id=4712))
    assert all(torch.equal(found[name], value) for name, value in tensors(wanted).items())


def test_a_sum_begins_while_the_one_before_ends(tmp_path: Path, capsys: Printed) -> None:
    """Unless a site is missing: then all begin anew, and as well for the final evaluation of a run that stops early."""

    def tamper(message: Message, reply: Message) -> Message:
        kind, number, node = (
            message.metadata.message_type,
            message.metadata.group_id,
            message.metadata.dst_node_id,
        )
        if number == "1":
            begun_anew(lambda _, same: same)(message, reply)
        if (kind, number, node) == ("query.unmask", "2", 1003):
            next((tmp_path / "runs").rglob("site-2/secagg.json")).unlink()
        return reply

    def asked(outcome: Outcome, kind: str, number: int) -> list[int]:
        return [message.metadata.dst_node_id for message, _ in outcome.exchanged(kind, number)]

    everyone = [1000, 1001, 1002, 1003]
    outcome = federation(tmp_path, tamper, rounds=5)
    for kind in ("query.advertise", "query.share"):
        assert [asked(outcome, kind, number) for number in (1, 2, 3, 4, 5)] == [
            everyone,
            everyone,
            [],
            everyone,
            [],
        ]
    assert [list(row["failed"]) for row in outcome.rows] == [[], [], ["site-2"], [], [], []]
    early: dict[str, Any] = {"rounds": 9, "early_stopping": 1, "lr": 1e-6}
    stopped = federation(tmp_path / "stopped", validation_fraction=0.4, **early)
    assert "stopped early after round" in capsys.readouterr().out  # by the figures of all sites
    with pytest.raises(SettingsError, match="early-stopping = 1: no client has validation samples"):
        federation(tmp_path / "without", **early)
    assert (rounds := len(stopped.rows) - 1) < 9
    assert asked(stopped, "query.advertise_final", rounds) == everyone
    assert not asked(outcome, "query.advertise_final", 5)
    assert not any(row["void"] for row in outcome.rows + stopped.rows)


# -- what can be read --------------------------------------------------------------------------------------------------
def test_every_byte_of_every_reply_is_declared_and_tells_no_counts_and_no_classes(
    tmp_path: Path,
) -> None:
    """`test_wire_privacy.py` says how the bytes are read; four clients, each with five of ten classes."""
    outcome = federation(tmp_path, rounds=2)
    uploads = []
    for message, reply in outcome.grid.log:
        kind = message.metadata.message_type
        names, arrays = read_anew("fedproto", kind, bytes_of(reply.content))
        wanted = {
            "query": {"site"},
            "train": {"masked", "report"},
            "evaluate": {"masked", "report"},
        }
        assert names == wanted.get(kind, {SECAGG}) | (
            {NEXT_SUM} if kind in ("train", "query.unmask") else set()
        )
        if (
            "masked" in names
        ):  # a sum and its samples of: two accuracies, on two kinds of data, and four losses
            size = 2 * (2 * 2 + 4) + 1 + (10 * (64 + 1) if kind == MessageType.TRAIN else 0)
            assert {key: value.shape for key, value in arrays["masked"].items()} == {"sum": (size,)}
            uploads.append(arrays["masked"]["sum"])
        if kind == MessageType.QUERY:
            card = reply.content.config_records["site"]
            assert (card["present"], card["train_samples"], card["found"]) == ([], 0, 0)
    assert len(uploads) == 3 * CLIENTS
    moments = {
        "algo": "gaussian",
        "rounds": 1,
        "backbones": "glyphs",
    }  # which are refused without a class
    assert card_of(harness.client_of(outcome.grid.run_config | moments), 0, "").present == ()
    numbers = np.frombuffer(b"".join(one.tobytes() for one in uploads), np.uint8)
    assert (
        chisquare(np.bincount(numbers, minlength=256)).pvalue > 1e-6
    )  # the masks are drawn anew each time


@pytest.mark.parametrize(("dp", "told"), [("none", set()), ("sample", {"train-samples"})])
def test_what_the_run_leaves_tells_nothing_of_single_uploads(
    dp: str, told: set[str], tmp_path: Path
) -> None:
    """A budget of differential privacy needs the numbers of training samples."""
    outcome = federation(tmp_path, dp=dp)
    sites = json.loads((outcome.folder / "sites.json").read_text())["sites"]
    assert all(facts.keys() == {"arch", "domain", "parameters"} | told for facts in sites.values())
    assert not (outcome.folder / "client-prototypes.safetensors").exists()
    assert all(
        row.keys() == {"accuracy", "losses", "seconds"}
        for row in outcome.rows[0]["clients"].values()
    )
    assert outcome.summary["accuracy-of-clients"] == {f"site-{i}": {} for i in range(CLIENTS)}
    assert ("total" in outcome.rows[0]["losses"]) == (dp == "none")


# -- a server that asks for more ---------------------------------------------------------------------------------------
BySite = dict[str, bytes]


def own_keys(reply: Message) -> BySite:
    return dict(reply.content.config_records[SECAGG])  # type: ignore[arg-type]


def strangers(number: int) -> BySite:
    return {f"x{i}": public_of(new_secret()) + bytes(SIGNATURE) for i in range(number)}


def sites(*numbers: int) -> Callable[[Message, Message], BySite]:
    return lambda message, reply: {f"site-{number}": b"" for number in numbers}


def as_it_was(message: Message, reply: Message) -> BySite:
    return dict(message.content.config_records.get(SECAGG, {}))  # type: ignore[arg-type]


TRICKS: dict[str, tuple[str, str, Callable[[Message, Message], BySite] | None, str]] = {
    "a second upload": ("train", "train", as_it_was, "does not follow 'share'"),
    "keys for a second upload": ("train", "query.advertise", as_it_was, "keys asked for round 1, after the upload"),
    "keys once more when the next sum has begun": ("query.unmask", "query.advertise", as_it_was,
        "keys asked for round 1, after the upload of round 1"),
    "a second unmasking": ("query.unmask", "query.unmask", sites(0, 1, 2), "does not follow 'mask'"),
    "a second sum of the round": ("query.unmask", "query.share", lambda message, reply:
        own_keys(reply) | strangers(3), "does not follow 'advertise' of round 1"),
    "unmasking without itself": ("train", "query.unmask", sites(1, 2, 3), "an unmasking for 3 sites"),
    "unmasking too few": ("train", "query.unmask", sites(0, 1), "an unmasking for 2 sites"),
    "unmasking strangers": ("train", "query.unmask", sites(0, 1, 2, 9), "an unmasking for 4 sites"),
    "an unmasking before its upload": ("query.share", "query.unmask", sites(0, 1, 2), "does not follow 'mask'"),
    "an upload to the sum of two": ("query.share", "train", lambda message, reply: {"site-1": bytes(SEALED)},
        "shares of 2 sites, fewer than 3"),
    "an upload to the sum with strangers": ("query.share", "train", lambda message, reply:
        dict.fromkeys(strangers(3), bytes(SEALED)), "shares of 4 sites, fewer than 3, or of unknown ones"),
    "a sum of two": ("query.advertise", "query.share", lambda message, reply: own_keys(reply) | strangers(1),
        "2 sites for a sum, fewer than 3"),
    "its own keys changed": ("query.advertise", "query.share", lambda message,
        reply: strangers(2) | {"site-0": bytes(PUBLIC + SIGNATURE)}, "keys of which this site's are not its own"),
    "one site under two names": ("query.advertise", "query.share", lambda message,
        reply: own_keys(reply) | strangers(2) | {"x2": own_keys(reply)["site-0"]}, "or two sites' are the same"),
    "the final evaluation under a round's keys": ("query.share", "evaluate", None,
        "does not follow 'share' of the final evaluation after round 1"),
    "training under the final evaluation's keys": ("query.unmask", "train", None, "does not follow 'share' of round 1"),
    "a round's unmasking in the final evaluation": ("evaluate", "query.unmask", None,
        "does not follow 'mask' of round 1"),
    "a second final evaluation": ("evaluate", "evaluate", None, "does not follow 'share'"),
    "keys for a second final evaluation": ("evaluate", "query.advertise_final", None,
        "keys asked for the final evaluation after round 1, after the upload of the final evaluation"),
    "keys for training after the final evaluation": ("evaluate", "query.advertise", None,
        "keys asked for round 1, after the upload of the final evaluation after round 1"),
}  # fmt: skip
"""After which stage which message comes, with which record (None: as before), and what the client says of it."""


def test_a_client_reveals_no_more_to_a_server_that_tries(tmp_path: Path) -> None:
    """After its answer to one message it gets others, or the same under another name, and refuses; the run goes on."""
    grids: list[LocalGrid] = []
    answers: dict[str, str] = {}

    def tamper(message: Message, reply: Message) -> Message:
        for trick, (at, stage, told, _) in TRICKS.items():
            if message.metadata.message_type == at and message.metadata.dst_node_id == 1000:
                content = message.content
                if told is not None:
                    records = {name: record for name, record in content.items() if name != SECAGG}
                    more = told(message, reply)
                    content = RecordDict({**records, **(pack_by_site(more) if more else {})})
                context = Context(
                    4711, 1000, grids[0].nodes[1000], RecordDict(), grids[0].run_config
                )
                answers[trick] = str(
                    client_app(Message(content, 1000, stage, group_id="1"), context).error.reason
                )
        return reply

    config = run_config(tmp_path, rounds=1, secagg=True, **SMALL)
    outcome = run_federation(config, CLIENTS, tamper, on_grid=grids.append)
    assert {
        trick: reason for trick, (*_, reason) in TRICKS.items() if reason not in answers[trick]
    } == {}
    assert not outcome.rows[0]["void"]
    assert outcome.summary["accuracy"]


def test_a_site_without_shares_is_not_unmasked(tmp_path: Path) -> None:
    """It advertised keys and was lost before it shared, so its masks are in no upload of the sum."""
    client = client_of(run_config(tmp_path, rounds=1, secagg=True, **SMALL), 0, CLIENTS)
    every = [f"site-{number}" for number in range(CLIENTS)]
    secure_sum_of = partial(client_secagg.SecureSum, client, final=False)

    def asked_for(*sites: str) -> RecordDict:
        asked = pack_instructions(Instructions(1, "run", RunHistory(client.run_id)))
        return RecordDict({"round": asked, **pack_by_site(dict.fromkeys(sites, b""))})

    client.content = asked_for(*every)
    progress = client_secagg._Progress(
        client.run_id,
        sum=2,
        sent=2,
        stage="mask",
        keys=dict.fromkeys(every, bytes(PUBLIC + SIGNATURE)),
        shares=dict.fromkeys(every[:3], bytes(2 * SHARE)),
    )
    secure_sum_of()._write(progress)
    with pytest.raises(RefusedMessage, match="an unmasking for 4 sites"):
        secure_sum_of().unmask()
    client.content = asked_for(*every[:3])
    assert {*secure_sum_of().unmask()[SECAGG]} == {*every[:3]}


@pytest.mark.parametrize("during", ["pack", "_remember"])
def test_what_comes_twice_at_once_shows_one_share_of_each_peer(
    during: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A site trains and unmasks while the same training ends, or it unmasks: one unmasking of the sum is answered."""
    answers, waiting, nodes = list[Message](), list[Thread](), real_sites(7, tmp_path / "disk")
    names = [str(node["site-name"]) for node in nodes.values()]
    config = run_config(tmp_path, rounds=1, secagg=True, secagg_threshold=0.51, **SMALL)
    honest = getattr(client_secagg.SecureSum, during)

    def ask(stage: str, content: RecordDict, sites: list[str]) -> None:
        records = {**content, **pack_by_site(dict.fromkeys(sites, b""))} if sites else {**content}
        message = Message(RecordDict(records), 1000, stage, group_id="1")
        answers.append(client_app(message, Context(4711, 1000, nodes[1000], RecordDict(), config)))

    def twice(self: Any, *details: Any) -> Any:
        if self.name != "site-0" or answers or waiting:
            return honest(self, *details)
        content = RecordDict({**self.client.content})
        waiting.append(Thread(target=ask, args=("query.unmask", content, names[:4])))
        if during == "_remember":
            waiting[0].start()
            waiting[0].join(2)
            return honest(self, *details)
        ask("train", content, [])
        ask("query.unmask", content, names)
        assert not any(answer.has_error() for answer in answers)
        try:
            return honest(self, *details)
        finally:
            waiting[0].start()
            waiting[0].join()

    monkeypatch.setattr(client_secagg.SecureSum, during, twice)
    run_federation(config, len(names), nodes=nodes)
    waiting[0].join()
    assert "does not follow 'mask' of round 1" in str(answers[-1].error.reason)


@pytest.mark.parametrize("algo", ["fedavg", "fedproto", "protofed"])
def test_what_a_server_chooses_to_send_shows_no_single_site(
    algo: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """To all sites but one a model that no data change; to all a prototype that breaks the training of its class.

    Or to one the keys of five sites, to the others of four: its numbers would have another scale, and be odd.
    """
    honest, asked, broken = server_round._contents, SecureSum._ask, list[str]()

    def chosen(strategy: Any, *about: Any) -> Any:
        if strategy.prototypes is not None:
            strategy.prototypes.means[3] = 1e30
        contents = honest(strategy, *about)
        for records in list(contents.values())[1:] if algo == "fedavg" else ():
            zeros = {name: raw(0 * values_of(array)) for name, array in records["weights"].items()}
            records["weights"] = ArrayRecord(zeros)  # type: ignore[index]
        return contents

    def fewer(self: Any, stage: str, records: Any) -> Any:
        if stage == "share":
            self.keys = {site: key for site, key in self.keys.items() if site != "site-4"}
            records = {site: pack_by_site(self.keys) for site in self.keys} | {
                "site-0": records["site-0"]
            }
        return asked(self, stage, records)

    if algo == "protofed":
        monkeypatch.setattr(SecureSum, "_ask", fewer)
        monkeypatch.setattr(SecureSum, "_true_shares", lambda self, sealed, keys: sealed)
    monkeypatch.setattr(server_round, "_contents", chosen)
    for room in ("app", "answers"):
        monkeypatch.setattr(
            f"client_app.{room}.log", lambda level, text: broken.extend([text] * (level == "ERROR"))
        )
    config = run_config(tmp_path, algo=algo, rounds=3, secagg=True, secagg_threshold=0.6, **SMALL)
    nodes = real_sites(CLIENTS + (algo == "protofed"), tmp_path / "d")
    if algo != "fedproto":
        with pytest.raises(
            FederationError, match=r"secure aggregation: sums of (?!35 )"
        ):  # of three sites and a half
            run_federation(config, nodes=nodes)
        return
    outcome = run_federation(config, nodes=nodes)
    assert not any(row["void"] for row in outcome.rows)
    lost = [list(row["failed"].values()) for row in outcome.rows]
    assert lost == [[], [f"{UNEXPECTED}; the log of the site says more"], lost[1], []]
    wanted = ("losses.", "the state has NaN", "losses.")  # of one site, in two rounds
    said = [text.partition(": ")[2] for text in broken]
    assert [text.startswith(begins) for text, begins in zip(said, wanted, strict=True)] == 3 * [True]
    saved = [load_file(file) for file in tmp_path.rglob("d-*/**/000003-*.safetensors")]
    assert len(saved) == CLIENTS
    assert all(bool(value.isfinite().all()) for tensors in saved for value in tensors.values())


def test_a_site_that_was_lost_in_one_sum_is_in_no_other(tmp_path: Path) -> None:
    """Of ten sites each may be told other lost ones, so that one is missing in the sum; or h is, beside i and j."""
    for sums in (
        "abcdefghij abcdefg abcdefg-h-i-j abcdefghi-j",
        "abcdefgh-i-j abcdefgh-i-j abcdefg",
    ):
        client = SimpleNamespace(
            settings=settings_of({"secagg": True, "rounds": 1}), study="any", root=tmp_path / sums
        )
        site: Any = SimpleNamespace(client=client, name="a", sum_number=2)
        for place, now in enumerate(sums.split()):
            with (
                pytest.raises(RefusedMessage, match=r"what h and i and j|what j")
                if place > 1
                else nullcontext()
            ):
                client_secagg.SecureSum._remember(site, {*re.findall("-?[a-j]", now)})


def test_the_secret_lies_in_a_file_of_this_user_and_is_forgotten(tmp_path: Path) -> None:
    seen: dict[str, dict[str, Any]] = {}

    def tamper(message: Message, reply: Message) -> Message:
        for file in (tmp_path / "runs").rglob("site-0/secagg.json"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            seen[message.metadata.message_type] = json.loads(file.read_text())
        return reply

    outcome = federation(tmp_path, tamper)
    assert [len(bytes.fromhex(seen[stage]["secret"])) for stage in STAGES] == [96, 96, 0, 96]
    assert (
        seen["query.advertise"]["secret"]
        == seen["query.share"]["secret"]
        != seen["query.unmask"]["secret"]
    )
    assert [seen[stage]["following"] for stage in STAGES] == [
        "",
        "",
        seen["query.unmask"]["secret"],
        "",
    ]
    assert [len(seen[stage]["shares"]) for stage in STAGES] == [0, 1, 4, 1]
    assert not list(outcome.folder.rglob("secagg.json"))


def test_another_name_of_the_run_does_not_make_a_round_a_new_one(tmp_path: Path) -> None:
    """At a site with an operator; nor does the end of the run."""
    nodes = real_sites(CLIENTS, tmp_path / "disk")
    config = run_config(tmp_path, rounds=1, secagg=True, **SMALL)
    outcome = run_federation(config, CLIENTS, nodes=nodes)
    assert not outcome.rows[0]["void"]
    message = outcome.exchanged("query.advertise")[0][0]
    message.content.config_records["round"]["run_name"] = "another"
    again = Message(message.content, 1000, "query.advertise", group_id="1")
    answer = client_app(again, Context(4711, 1000, nodes[1000], RecordDict(), config))
    assert "keys asked for round 1, after the upload of the final evaluation after round 1" in str(
        answer.error.reason
    )
    (file,) = (tmp_path / "disk-0" / "privacy").glob("*.secagg")
    assert (stat.S_IMODE(file.stat().st_mode), json.loads(file.read_text())["secret"]) == (
        0o600,
        "",
    )
    for damaged in ('{"run_id": 1, "secret": "deadbe', '{"secret": "deadbeefzz"}'):
        file.write_text(damaged)
        with pytest.raises(ValueError, match="secagg") as refused:
            client_secagg.SecureSum._read(SimpleNamespace(path=file))
        assert "deadbe" not in "".join(traceback.format_exception(refused.value))


# -- settings ----------------------------------------------------------------------------------------------------------
OF_PROTOTYPES = ("fedtgp", "mpft", "fedplvm", "fpl", "fedorgp", "fedgh")
WHY = {
    **dict.fromkeys(
        OF_PROTOTYPES, "its server does more with the clients' prototypes than average them"
    ),
    "fedpcl": "its clients receive one another's prototypes",
    "fednh": "its server scales every client's prototypes to length 1",
    "feddistill": "what teaches a client is the mean of the others' outputs",
    "fesem": "its server groups the clients by their models",
    "fedkd": "its updates travel as factors, which cannot be added",
    "scaffold": "its server gives every client the same weight",
    "fedfa": "its server takes the variance over the clients",
}
"""By hand, from the papers: what no sum can give."""


@pytest.mark.parametrize("algo", CATALOG)
def test_what_needs_single_uploads_is_refused_by_name(algo: str) -> None:
    if algo not in WHY:
        settings_of({"algo": algo, "secagg": True, "rounds": 1})
        return
    said = refusal({"algo": algo, "secagg": True})
    why = f"secagg = true: {algo} needs single uploads, for {WHY[algo]}; choose an algo of local, fedavg"
    assert said.startswith(why)
    assert said.endswith(", or fedpcl with fedpcl.prototypes = 'global'")
    with_dp = refusal({"algo": algo, "secagg": True, "dp": "sample", "norm": "group"}).splitlines()
    assert not re.search("ditto|fedrep|per-fedavg|pfedme", with_dp[0].partition("choose")[2]), (
        with_dp[0]
    )


@pytest.mark.parametrize(("key", "value", "said"), [
    ("merging", "median", "merging = 'median': secagg = true hides the single uploads that it needs; choose 'mean'"),
    ("max-update-ratio", 2.0, "max-update-ratio = 2.0: secagg = true hides the single uploads that it needs"),
    ("metrics", "auc,recall", "metrics = 'recall': it tells which classes a client has"),
    ("participation", 0.75, "participation = 0.75: secagg = true forbids sums over different clients"),
    ("local-epochs", 0, "local-epochs = 0: without training a client sends the same in every round"),
    ("lr", 1e-38, "lr = 1e-38: in steps of 1e-38 a client sends the same in every round"),
    ("secagg-threshold", 0.5, "secagg-threshold = 0.5: must be a number above 0.5 and at most 1"),
])  # fmt: skip
def test_what_would_tell_what_it_hides_is_refused(key: str, value: Any, said: str) -> None:
    assert refusal({"secagg": True, key: value}).startswith(said)


STEP, COSINE = (
    {"lr-schedule": "step", "lr-decay": 1e-9, "lr-step": 1},
    {"lr-schedule": "cosine", "lr": 2e-7},
)


@pytest.mark.parametrize(
    "more", [{"participation": 0.75}, {"local-epochs": 0}, STEP, COSINE, {"algo": "gaussian"}]
)
def test_a_site_refuses_sums_whose_difference_is_an_upload(
    more: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever its server does with the settings of the run."""
    node = {"site-name": "north", "require-secagg": True, "state-dir": str(tmp_path), **CACHE}
    grid = LocalGrid(run_config(tmp_path, secagg=True, **SMALL) | more, {7: node})
    assert "single uploads" in str(
        grid.asked(Message(RecordDict(), 7, MessageType.QUERY, group_id="0")).error.reason
    )


def test_a_site_may_take_part_in_nothing_else_and_one_round_without_training_is_one_sum() -> None:
    node: dict[str, Any] = {"site-name": "north", "require-secagg": True}
    said = "secagg = false: this site takes part with secure aggregation only (node config: require-secagg)"
    assert refusal({}, node) == f"{said}; set secagg = true"
    settings_of({"secagg": True}, node)
    assert "require-secagg = 'yes' must be true or false" in refusal(
        {"secagg": True}, node | {"require-secagg": "yes"}
    )
    for more in ({"rounds": 1}, {"local-steps": 5}):
        settings_of({"secagg": True, "local-epochs": 0} | more)


def test_two_clients_are_too_few_and_what_is_undeclared_is_refused(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    with pytest.raises(
        FederationError, match=r"secure aggregation: a round asks 2 sites; 3 are the"
    ):
        run_federation(run_config(tmp_path, secagg=True, **SMALL), 2)
    grid = LocalGrid(run_config(tmp_path, **SMALL), {7: {"partition-id": 0, "num-partitions": 4}})
    reply = grid.asked(Message(RecordDict(), 7, "query.advertise", group_id="1"))
    assert "which the run's settings do not ask for" in str(reply.error.reason)
    honest, more = ClientAlgorithm.upload, {"weights": {"w": torch.zeros(1)}}
    monkeypatch.setattr(
        ClientAlgorithm, "upload", lambda self: Payload(**honest(self).entries, **more)
    )
    with pytest.raises(
        FederationError, match="uploaded: prototypes, weights; declared for this sum: prototypes"
    ):
        federation(tmp_path / "entries")
    monkeypatch.setattr("server_app.strategies.fedproto.FedProto.payload_for", lambda *_: Payload())
    with pytest.raises(FederationError, match="FedProto sends site-0 a payload of its own"):
        federation(tmp_path / "own")

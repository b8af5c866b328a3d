"""Secure aggregation over whole runs.

The sums are right, whoever is lost or lies, and nothing else can be read.
"""

import json
import re
import stat
import traceback
from dataclasses import dataclass, replace
from html import unescape
from threading import Thread
from types import SimpleNamespace

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
from protofl_common.privacy.masks import (
    COMMITMENT,
    PUBLIC,
    SEALED,
    SIGNATURE,
    new_secret,
    public_of,
)
from protofl_common.privacy.shares import SHARE
from protofl_common.runs.figures import HIDDEN
from protofl_common.tools.tables.figure import Figure, NoFigure
from protofl_common.wire.records import (
    NEXT_SUM,
    SECAGG,
    Instructions,
    pack_by_site,
)
from protofl_common.wire.schema import RefusedMessage
from server_app import round as server_round
from server_app.network.membership import FederationError
from server_app.protections.secure_sum import SecureSum
from tests.support.accidents import Killed, on_message
from tests.support.anew import bytes_of, read_anew
from tests.support.attacks import both, by, change_sent, raw, silent, values_of, when
from tests.support.commands import output
from tests.support.harness import (
    CACHE,
    RUN_ID,
    LocalGrid,
    client_of,
    federate,
    instructions,
    reason_in,
    refusal,
    run_config,
    run_federation,
    settings_of,
)
from tests.support.plain import assert_equal
from tests.support.sites import real_sites

CLIENTS = 4
DATA = {
    "dataset": "digits",
    "partition": "pathological",
    "classes_per_client": 5,
    "models": "htcnn-1",
}
SMALL = DATA | {"train_samples": 10, "test_samples": 10}
NODE = 7
"""Flower's number of a site that is asked alone."""
LONG = pytest.mark.long
STAGES = ("query.advertise", "query.share", "train", "query.unmask")


def small_config(folder, **settings):
    """Return the settings of one round with secure aggregation, unless ``settings`` differ."""
    return run_config(folder, **{"rounds": 1, "secagg": True} | SMALL | settings)


def federation(folder, tamper=None, **settings):
    """Run four clients with five classes each."""
    return run_federation(small_config(folder, **settings), clients=CLIENTS, tamper=tamper)


def lose(stage, *nodes, number=1):
    """Let these nodes fail in a stage of round ``number``."""
    return when(by(dict.fromkeys(nodes, silent), stage), number=number)


def with_all_stages(tamper):
    """Let every sum take all its stages, and make the changes of ``tamper``.

    A sum usually begins while the one before ends; here site-1 sends nothing for the next sum.
    """

    def without_next_sum(message, reply):
        reply.content.pop(NEXT_SUM)
        return reply

    return both(when(without_next_sum, "query.unmask", node=1001), tamper)


def ask_site_0(node, config, stage, content):
    """Send a message to site-0 aside from the run's grid, and return its answer.

    So may a hostile server do at any time.
    """
    message = Message(content, 1000, stage, group_id="1")
    return client_app(message, Context(RUN_ID, 1000, node, RecordDict(), config))


def tensors(outcome):
    """Return all global tensors that a run has stored."""
    stored = {}
    for name in ("prototypes", "weights"):
        file = outcome.folder / f"{name}.safetensors"
        if file.exists():
            stored |= load_file(file)
    return stored


def assert_same(found, wanted):
    """The tensors are the same up to rounding, of float32 and to the whole numbers of the sums."""
    torch.testing.assert_close(tensors(found), tensors(wanted), rtol=2e-6, atol=2e-6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Make runs of FedProto without secure aggregation to compare sums with.

    One has all clients, the other lacks the upload of one.
    """
    folder = tmp_path_factory.mktemp("plain")
    return {
        "all": federation(folder / "all", secagg=False),
        "without site-1": federation(folder / "three", lose("train", 1001), secagg=False),
    }


# -- the sums --------------------------------------------------------------------------------------
ABLE = {  # the algorithms that secure aggregation can run
    algo
    for algo, row in CATALOG.items()
    if row.exchange.up and not row.needs_single_uploads(row.exchange)
}
SETTINGS_OF_KINDS = {
    "fedproto": {},
    "fedproto, uniform": {"fedproto__weighting": "uniform"},
    "fedproto-avg": {},
    "fedpcl": {"fedpcl__prototypes": "global"},
}
SHORT_KINDS = ["fedproto", "fedproto, uniform", "fedproto-avg"]
LONG_KINDS = sorted({*ABLE, "fedpcl"} - set(SHORT_KINDS))


@pytest.mark.parametrize(
    "kind", [*SHORT_KINDS, *(pytest.param(kind, marks=LONG) for kind in LONG_KINDS)]
)
def test_a_run_leaves_what_one_without_masks_leaves(kind, tmp_path):
    """The same global tensors and figures over all samples, with each algorithm that can."""
    algo = kind.partition(",")[0]
    settings = SETTINGS_OF_KINDS.get(kind, {})

    plain = federation(tmp_path / "plain", algo=algo, secagg=False, **settings)
    summed = federation(tmp_path / "summed", algo=algo, **settings)

    assert summed.summary["trouble"] == plain.summary["trouble"]
    assert_same(summed, plain)
    assert_figures_of_all(summed, plain)


def assert_figures_of_all(summed, plain):
    """Figures over all samples are the same, and ``summed`` has no others.

    Without figures of single clients, the mean over clients is that over samples.
    """
    for found, wanted in zip(summed.rows, plain.rows, strict=True):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        for group in ("accuracy", "metrics", "validation"):
            assert found.get(group, {}).keys() == wanted.get(group, {}).keys(), group
            for name, figures in found.get(group, {}).items():
                by_samples = wanted[group][name]["weighted"]
                expected = {"mean": by_samples, "weighted": by_samples}
                assert figures == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("algo", ["fedproto", "local", "protofed"])
def test_figures_are_of_all_samples_and_of_no_single_client(algo, tmp_path):
    """Clients have different sizes. A run of local sends figures only.

    One of protofed sends prototypes in its last round only.
    """
    settings = {
        "algo": algo,
        "partition": "dirichlet",
        "total_samples": 300,
        "train_samples": 0,
        "test_samples": 0,
        "rounds": 2,
        "validation_fraction": 0.3,
        "metrics": "auc, balanced-accuracy",
    }

    plain = federation(tmp_path / "plain", secagg=False, **settings)
    summed = federation(tmp_path / "summed", **settings)

    assert {"head/auc", "head/balanced-accuracy", "head"} <= summed.rows[0]["validation"].keys()
    assert all(row["accuracy"] and row["metrics"] for row in summed.rows)
    assert_figures_of_all(summed, plain)
    for row in summed.rows:
        for figures in row["clients"].values():
            assert figures == {"accuracy": {}, "losses": {}, "seconds": figures["seconds"]}

    sizes = ("train_samples", "test_samples", "validation_samples")
    for message, reply in summed.grid.log:
        if "report" in reply.content:
            report = dict(reply.content.metric_records["report"])
            assert "masked" in reply.content
            del report["round"]
            without_times = {}
            for name, value in report.items():
                if not name.startswith("seconds."):
                    without_times[name] = value
            assert without_times == dict.fromkeys(sizes, 0)
        if message.metadata.message_type == MessageType.QUERY:
            card = reply.content.config_records["site"]
            assert not any(card[key] for key in (*sizes, "found"))


def test_whoever_shows_the_figures_shows_those_of_all_sites(tmp_path, capsys):
    """Console, page, comparison and tables, with baselines, the best model and metrics."""
    config = small_config(
        tmp_path,
        rounds=2,
        report=True,
        run_name="mine",
        train_samples=20,
        baselines="local",
        keep_best=True,
        metrics="auc",
        validation_fraction=0.3,
    )
    run_federation(config, clients=CLIENTS)
    folder = tmp_path / "runs" / "mine"

    console = " ".join(capsys.readouterr().out.split())
    assert "worst" not in console.replace("worst 10 %", "")
    assert console.count(HIDDEN) == 2  # once of the run, and once beside its baseline

    page = (folder / "report.html").read_text()
    assert HIDDEN in unescape(page)
    assert 'id="accuracy-curves"' in unescape(page)
    assert "Test accuracy over all samples" in unescape(page)
    assert "means over all samples" in unescape(page)
    assert "nan" not in page.partition("<svg")[0].lower()
    assert "could not be drawn" not in page
    assert 'id="accuracy-of-clients' not in page

    (clients,) = re.findall(r'id="clients".*?</section>', page, re.S)
    assert clients.count("<td>–</td>") >= CLIENTS  # a dash in the place of each one's accuracy

    assert Figure().read(folder) == Figure(over="by-samples").read(folder)
    for hidden in ({"over": "std"}, {"over": "worst-10%"}, {"domain": "digits"}):
        with pytest.raises(NoFigure, match="secure aggregation hides single clients"):
            Figure(**hidden).read(folder)
    assert Figure(what="validation/head").read(folder) >= 0

    compared = output(capsys, "compare", folder, f"{folder}-local").out
    assert "final head over all samples." in " ".join(compared.split())


@pytest.mark.parametrize("stage", STAGES)
def test_who_is_lost_is_missed_in_the_sum_alone(stage, tmp_path, plain):
    """The sum is that of the other sites; one that is lost after its upload counts in it."""
    found = federation(tmp_path, lose(stage, 1001))

    assert_same(found, plain["all" if stage == "query.unmask" else "without site-1"])
    assert list(found.rows[0]["failed"]) == ["site-1"]
    assert not found.rows[0]["void"]


@pytest.mark.parametrize(("stage", "what"), [
    pytest.param("query.advertise", "keys", marks=LONG),
    ("query.share", "shares of their keys"),
    pytest.param("train", "uploads", marks=LONG),
    ("query.unmask", "shares to unmask the sum"),
])  # fmt: skip
def test_too_few_sites_change_nothing(stage, what, tmp_path, plain, capsys):
    """Two of four are lost in round 2, which is void: round 3 starts from round 1's prototypes."""
    tamper = with_all_stages(lose(stage, 1001, 1003, number=2))
    found = federation(tmp_path, tamper, rounds=3)

    assert found.per_row("void") == [False, True, False, False]
    assert [bool(row["accuracy"]) for row in found.rows] == [True, False, True, True]

    void = found.rows[1]
    assert void["valid"] == 0
    assert void["failed"].keys() == {"site-1", "site-3"}
    assert void["unused"] == ["site-0", "site-2"]  # these are not to blame

    reason = f"2 of 4 sites sent {what}, fewer than the 3 needed (secagg-threshold)"
    assert f"void: secure aggregation: {reason}" in capsys.readouterr().out

    wanted = tensors(plain["all"])["means"].numpy()
    sent = found.exchanged(number=3)

    assert len(sent) == CLIENTS

    for message, _ in sent:
        means = values_of(message.content["prototypes"]["means"])
        assert np.allclose(means, wanted, atol=2e-6)


def test_a_sum_of_fewer_than_min_replies_is_not_unmasked(tmp_path, capsys):
    """Of four sites one is lost: three are enough for a sum, but not for min-replies = 4."""
    found = federation(tmp_path, lose("train", 1001), min_replies=4)

    assert "3 of 4 sites sent uploads, fewer than the 4 needed (min-replies)" in (
        capsys.readouterr().out
    )
    assert found.per_row("void") == [True, False]
    assert not found.exchanged("query.unmask", 1)


def lies_about_shares(node):
    """Let a node give back other shares of its peers' secrets than it was given."""

    def change(message, reply):
        record = reply.content.config_records[SECAGG]
        others = record.keys() - {f"site-{node - 1000}"}
        record.update(dict.fromkeys(others, bytes(SHARE - 1) + b"\7"))
        return reply

    return when(change, "query.unmask", node=node)


@pytest.mark.parametrize(("node", "rounds"), [(1000, 1), (1002, 3)])
def test_one_wrong_share_is_named_and_its_liar_out(node, rounds, tmp_path, plain):
    """The others' shares are enough, so the sum is right; the liar is asked nothing more."""
    found = federation(tmp_path, lies_about_shares(node), rounds=rounds)

    if rounds == 1:
        assert_same(found, plain["all"])
    (reason,) = found.rows[0]["refused"].values()
    assert "than it was dealt; it takes no further part in this run" in reason
    # it is refused in round 1, and out of all rows after it, of which the final evaluation is one
    assert [[*row["refused"]] for row in found.rows] == [[f"site-{node - 1000}"], *rounds * [[]]]
    assert found.per_row("asked") == [4, *rounds * [3]]
    assert not any(found.per_row("void"))


@pytest.mark.parametrize(("stage", "record"), [("train", NEXT_SUM), ("query.advertise", SECAGG)])
def test_two_sites_with_the_same_keys_are_out_and_cost_a_round_at_most(stage, record, tmp_path):
    """Else no other site would go on with these, and each round would be void with nobody named.

    Keys of the next sum that come with an upload leave time to begin that sum without the two.
    """
    keys = []

    def send_same_keys(message, reply):
        """Send the keys of whichever of the two sites has sent its own first."""
        own = reply.content.config_records[record]
        (own_keys,) = own.values()
        keys.append(own_keys)
        own.update(dict.fromkeys(own, keys[0]))
        return reply

    tamper = by({1001: send_same_keys, 1002: send_same_keys}, stage)
    found = run_federation(small_config(tmp_path, rounds=3), clients=5, tamper=tamper)

    assert [sorted(row["refused"]) for row in found.rows] == [["site-1", "site-2"], *3 * [[]]]
    assert found.per_row("void") == [stage != "train", False, False, False]


@pytest.mark.parametrize("commits_to_it", [True, False])
def test_a_site_that_seals_a_wrong_share_does_not_get_its_peer_expelled(
    commits_to_it, tmp_path, monkeypatch
):
    """Site-0 deals a wrong share to site-2, and commits itself to that share or to the right one.

    In the first case site-0 is out. In the second site-2 sees that the share is not what site-0
    has committed itself to, and does not keep it; the others' shares are enough.
    """
    seal = client_secagg.masks.seal
    wrong_shares = bytes(2 * SHARE)  # of its two keys

    def seal_wrong_for_one(*given):
        *about, sender, receiver, _right_shares = given
        sealed = seal(*given)
        if (sender, receiver) != ("site-0", "site-2"):
            return sealed
        sealed_wrong = seal(*about, sender, receiver, wrong_shares)
        if commits_to_it:
            return sealed_wrong
        return sealed_wrong[:-COMMITMENT] + sealed[-COMMITMENT:]

    monkeypatch.setattr(client_secagg.masks, "seal", seal_wrong_for_one)
    found = federation(tmp_path, rounds=2)

    assert not any("site-2" in row["refused"] for row in found.rows)
    assert found.per_row("void") == [commits_to_it, False, False]
    assert found.per_row("asked") == ([4, 3, 3] if commits_to_it else [4, 4, 4])


def test_a_site_whose_shares_fit_for_nobody_is_out(tmp_path, monkeypatch):
    """Site-0 splits its two keys into shares that do not belong together.

    So round 1 cannot be unmasked, and site-0 is asked no more.
    """
    split = client_secagg.shares.split
    secrets_split = 0

    def split_wrong(secret, threshold, points):
        nonlocal secrets_split
        secrets_split += 1
        shares = split(secret, threshold, points)
        if secrets_split > 2:  # site-0 splits first: its two keys of the first round
            return shares
        # as long as a share, and another one for each point
        return {point: bytes([0, point]) * 16 + b"x" for point in shares}

    monkeypatch.setattr(client_secagg.shares, "split", split_wrong)
    found = federation(tmp_path, rounds=3)

    assert found.per_row("void") == [True, False, False, False]
    assert list(found.rows[0]["refused"]) == ["site-0"]
    assert found.per_row("asked") == [4, 3, 3, 3]


def noise(message, reply):
    """Send three times the masked vector, from which no masks can be taken off."""
    array = reply.content.array_records["masked"]["sum"]
    array.data = (values_of(array) * 3).tobytes()
    return reply


TOO_FEW = "2 right shares of a key of site-0, fewer than the 3 needed"


@pytest.mark.parametrize(("tamper", "reason"), [
    (both(lies_about_shares(1002), lose("train", 1001)), TOO_FEW),
    (by({1002: noise}), "void: secure aggregation: "),
], ids=["one of three shares is wrong, and three are needed", "an upload is noise"])  # fmt: skip
def test_what_nobody_can_mend_costs_the_round(tamper, reason, tmp_path, capsys):
    """The only round of a run is void, so no global prototypes are left."""
    found = federation(tmp_path, tamper)

    assert found.rows[0]["void"]
    assert reason in capsys.readouterr().out
    assert not tensors(found)


# -- rubbish: each is a change of a reply, of its content and its sender's name
def put(record, site, value):
    """Put a value for a site into a record of the reply; "" stands for the sender itself."""
    return lambda content, sender: content.config_records[record].update({site or sender: value})


def cut(content, sender):
    """Leave out the last number, of 8 bytes, of the masked vector."""
    array = content.array_records["masked"]["sum"]
    array.data = array.data[:-8]
    array.shape = (array.shape[0] - 1,)


def unmasked(content, sender):
    content["prototypes"] = content.pop("masked")


NO_KEYS = bytes(PUBLIC + SIGNATURE)
RUBBISH = {
    "keys of another length": ("query.advertise", put(SECAGG, "", bytes(5))),
    "keys that are not valid": ("query.advertise", put(SECAGG, "", NO_KEYS)),
    "another's keys": ("query.advertise", put(SECAGG, "site-0", NO_KEYS)),
    "no record": ("query.advertise", lambda content, sender: content.pop(SECAGG)),
    "shares of another length": ("query.share", put(SECAGG, "site-0", b"")),
    "shares for strangers": ("query.share", put(SECAGG, "nobody", bytes(SEALED))),
    "a name that no site can have": ("query.share", put(SECAGG, "../x", bytes(SEALED))),
    "a masked upload of another length": ("train", cut),
    "an upload in the clear": ("train", unmasked),
    "next keys of another length": ("train", put(NEXT_SUM, "", bytes(5))),
    "another's next keys": ("train", put(NEXT_SUM, "site-0", NO_KEYS)),
    "next shares for strangers": ("query.unmask", put(NEXT_SUM, "nobody", bytes(SEALED))),
    "words for shares": ("query.unmask", put(SECAGG, "site-0", "word")),
}


def test_rubbish_costs_only_its_sender(tmp_path):
    """Whose keys or shares are rubbish is out for the rest of the run, since that is no accident.

    An upload may be rubbish by accident, so its sender is asked again: there are two of these.
    """
    honest = len(RUBBISH) + 2  # with a threshold of 0.51 as many as must stay
    senders = dict(enumerate(RUBBISH.values(), start=honest))

    def send_rubbish(message, reply):
        number = message.metadata.dst_node_id - 1000
        if number in senders:
            stage, change = senders[number]
            if message.metadata.message_type == stage:
                change(reply.content, f"site-{number}")
        return reply

    sites = honest + len(senders)
    settings = {"rounds": 2, "train_samples": 5, "test_samples": 5, "secagg_threshold": 0.51}
    outcome = run_federation(small_config(tmp_path, **settings), clients=sites, tamper=send_rubbish)

    refused = outcome.rows[0]["refused"]
    assert refused.keys() == {f"site-{number}" for number in senders}
    assert all(len(reason) < 600 for reason in refused.values())
    bad_uploads = set()
    for site, (_, change) in enumerate(RUBBISH.values(), start=honest):
        if change in (cut, unmasked):
            bad_uploads.add(f"site-{site}")
    assert outcome.rows[1]["refused"].keys() == bad_uploads
    assert outcome.per_row("asked") == [sites, honest + 2, honest + 2]
    assert not any(outcome.per_row("void"))


@pytest.mark.parametrize("stage", [
    "train",
    pytest.param("query.share", marks=LONG),
    pytest.param("query.unmask", marks=LONG),
])  # fmt: skip
def test_a_run_that_is_resumed_leaves_what_an_undisturbed_one_leaves(stage, tmp_path):
    """The server dies in a stage of round 2; the tensors left are the same to the last bit.

    The masks are others, but sums of whole numbers do not depend on them.
    """
    settings = {"rounds": 2, "run_name": "mine"}
    wanted = tensors(federation(tmp_path / "whole", **settings))

    with pytest.raises(Killed):
        federation(tmp_path / "stopped", with_all_stages(on_message(stage, 2)), **settings)

    config = small_config(tmp_path / "stopped", resume=True, **settings)
    found = tensors(run_federation(config, clients=CLIENTS, run_id=RUN_ID + 1))

    assert_equal(found, wanted)


def nodes_asked(outcome, kind, number):
    return [message.metadata.dst_node_id for message, _ in outcome.exchanged(kind, number)]


EVERYONE = [1000, 1001, 1002, 1003]


def test_a_sum_begins_while_the_one_before_ends(tmp_path):
    """The messages that end a sum also begin the next one, so that it needs no stages of its own.

    If a site's part of that is missing, the next sum begins with its first stage instead. Here
    site-1 sends none at the end of round 1, and site-2 loses its secret at the end of round 2, so
    it fails in round 3.
    """

    def tamper(message, reply):
        meta = message.metadata
        question = (meta.message_type, meta.group_id, meta.dst_node_id)  # kind, round, node
        if question == ("query.unmask", "1", 1001):
            reply.content.pop(NEXT_SUM)
        if question == ("query.unmask", "2", 1003):
            next((tmp_path / "runs").rglob("site-2/secagg.json")).unlink()
        return reply

    outcome = federation(tmp_path, tamper, rounds=5)

    for kind in ("query.advertise", "query.share"):
        asked = {number: nodes_asked(outcome, kind, number) for number in (1, 2, 3, 4, 5)}
        # rounds 3 and 5 were begun by the one before
        assert asked == {1: EVERYONE, 2: EVERYONE, 3: [], 4: EVERYONE, 5: []}

    assert not nodes_asked(outcome, "query.advertise_final", 5)
    assert [list(row["failed"]) for row in outcome.rows] == [[], [], ["site-2"], [], [], []]
    assert not any(outcome.per_row("void"))


def test_the_final_sum_of_a_run_that_stops_early_begins_anew(tmp_path, capsys):
    """With the last messages of a round its sites have begun a sum of the next, which never comes.

    A run that stops early needs validation samples, and is refused without.
    """
    settings = {"rounds": 9, "early_stopping": 1, "lr": 1e-6}
    stopped = federation(tmp_path / "stopped", validation_fraction=0.4, **settings)

    assert "stopped early after round" in capsys.readouterr().out  # by the figures of all sites

    rounds = len(stopped.rows) - 1
    assert rounds < 9
    assert nodes_asked(stopped, "query.advertise_final", rounds) == EVERYONE
    assert not any(stopped.per_row("void"))

    with pytest.raises(SettingsError, match="early-stopping = 1: no client has validation samples"):
        federation(tmp_path / "without", **settings)


# -- what can be read ------------------------------------------------------------------------------
def test_every_byte_of_every_reply_is_declared_and_tells_no_counts_and_no_classes(tmp_path):
    """Each of the four clients has five of ten classes; `read_anew` says how the bytes are read."""
    records_of_kinds = {
        "query": {"site"},
        "train": {"masked", "report", NEXT_SUM},
        "evaluate": {"masked", "report"},
        "query.unmask": {SECAGG, NEXT_SUM},
    }
    num_figures = 2 * 2 + 4  # two accuracies, on test and validation data, and four losses
    size_of_figures = 2 * num_figures  # the sum and the number of samples of each
    size_of_samples = 1  # the number of training samples
    size_of_prototypes = 10 * (64 + 1)  # the sum and the number of samples of each class

    outcome = federation(tmp_path, rounds=2)

    sums = []
    for message, reply in outcome.grid.log:
        kind = message.metadata.message_type
        names, arrays = read_anew("fedproto", kind, bytes_of(reply.content))
        assert names == records_of_kinds.get(kind, {SECAGG})
        if "masked" in names:
            size = size_of_figures + size_of_samples
            if kind == MessageType.TRAIN:
                size += size_of_prototypes
            assert {key: value.shape for key, value in arrays["masked"].items()} == {"sum": (size,)}
            sums.append(arrays["masked"]["sum"].tobytes())
        if kind == MessageType.QUERY:
            card = reply.content.config_records["site"]
            assert (card["present"], card["train_samples"], card["found"]) == ([], 0, 0)

    assert len(sums) == 3 * CLIENTS  # two rounds and the final evaluation

    # all byte values are equally frequent, since the masks are drawn anew each time
    frequencies = np.bincount(np.frombuffer(b"".join(sums), np.uint8), minlength=256)
    assert chisquare(frequencies).pvalue > 1e-6

    # nor does an introduction tell them for gaussian, whose clients else say which they have
    gaussian = {"algo": "gaussian", "rounds": 1, "backbones": "glyphs"}
    client = client_of(outcome.grid.run_config | gaussian)

    assert card_of(client, 0, "").present == ()


@pytest.mark.parametrize(("dp", "more_facts"), [("none", set()), ("sample", {"train-samples"})])
def test_what_the_run_leaves_tells_nothing_of_single_uploads(dp, more_facts, tmp_path):
    """With dp the number of a site's training samples is left: the budget depends on it."""
    outcome = federation(tmp_path, dp=dp)

    sites = json.loads((outcome.folder / "sites.json").read_text())["sites"]
    for facts in sites.values():
        assert facts.keys() == {"arch", "domain", "parameters"} | more_facts
    assert not (outcome.folder / "client-prototypes.safetensors").exists()

    row = outcome.rows[0]
    for figures in row["clients"].values():
        assert figures.keys() == {"accuracy", "losses", "seconds"}
    assert outcome.summary["accuracy-of-clients"] == {f"site-{i}": {} for i in range(CLIENTS)}
    assert ("total" in row["losses"]) == (dp == "none")


# -- a server that asks for more -------------------------------------------------------------------


def keys_in(reply):
    return dict(reply.content.config_records[SECAGG])


def strangers(number):
    """Return valid keys of sites that the server has made up, with signatures of zeros."""
    return {f"x{i}": public_of(new_secret()) + bytes(SIGNATURE) for i in range(number)}


def sites(*numbers):
    return lambda message, reply: {f"site-{number}": b"" for number in numbers}


def same_record(message, reply):
    return dict(message.content.config_records.get(SECAGG, {}))


def keys_and_strangers(number):
    return lambda message, reply: keys_in(reply) | strangers(number)


def shares_of_one(message, reply):
    return {"site-1": bytes(SEALED)}


def shares_of_strangers(message, reply):
    return dict.fromkeys(strangers(3), bytes(SEALED))


def strangers_and_other_keys(message, reply):
    return strangers(2) | {"site-0": NO_KEYS}


def keys_under_two_names(message, reply):
    keys = keys_in(reply)
    return keys | strangers(2) | {"x2": keys["site-0"]}


@dataclass(frozen=True)
class Trick:
    """After the answer of site-0 in the stage ``after``, the server sends a message of ``stage``.

    ``record`` makes its content for secure aggregation; None: the content is that of the message
    before. ``refusal`` is part of what the site must answer.
    """

    after: str
    stage: str
    record: object
    refusal: str


ADVERTISE, SHARE_KEYS, TRAIN, UNMASK = STAGES
AGAIN = "keys asked for round 1, after the upload"
TRICKS = {
    "a second upload": Trick(TRAIN, TRAIN, same_record, "does not follow 'share'"),
    "keys for a second upload": Trick(TRAIN, ADVERTISE, same_record, AGAIN),
    "keys once more when the next sum has begun":
        Trick(UNMASK, ADVERTISE, same_record, f"{AGAIN} of round 1"),
    "a second unmasking": Trick(UNMASK, UNMASK, sites(0, 1, 2), "does not follow 'mask'"),
    "a second sum of the round":
        Trick(UNMASK, SHARE_KEYS, keys_and_strangers(3), "does not follow 'advertise' of round 1"),
    "unmasking without itself": Trick(TRAIN, UNMASK, sites(1, 2, 3), "an unmasking for 3 sites"),
    "unmasking too few": Trick(TRAIN, UNMASK, sites(0, 1), "an unmasking for 2 sites"),
    "unmasking strangers": Trick(TRAIN, UNMASK, sites(0, 1, 2, 9), "an unmasking for 4 sites"),
    "an unmasking before its upload":
        Trick(SHARE_KEYS, UNMASK, sites(0, 1, 2), "does not follow 'mask'"),
    "an upload to the sum of two":
        Trick(SHARE_KEYS, TRAIN, shares_of_one, "shares of 2 sites, fewer than 3"),
    "an upload to the sum with strangers": Trick(
        SHARE_KEYS, TRAIN, shares_of_strangers,
        "shares of 4 sites, fewer than 3, or of unknown ones"),
    "a sum of two":
        Trick(ADVERTISE, SHARE_KEYS, keys_and_strangers(1), "a sum of 2 sites, fewer than 3"),
    "its own keys changed": Trick(
        ADVERTISE, SHARE_KEYS, strangers_and_other_keys,
        "keys for a sum: those of this site are not the ones it sent"),
    "one site under two names":
        Trick(ADVERTISE, SHARE_KEYS, keys_under_two_names, "one of them occurs twice"),
    "the final evaluation under a round's keys": Trick(
        SHARE_KEYS, "evaluate", None,
        "does not follow 'share' of the final evaluation after round 1"),
    "training under the final evaluation's keys":
        Trick(UNMASK, TRAIN, None, "does not follow 'share' of round 1"),
    "a round's unmasking in the final evaluation":
        Trick("evaluate", UNMASK, None, "does not follow 'mask' of round 1"),
    "a second final evaluation": Trick("evaluate", "evaluate", None, "does not follow 'share'"),
    "keys for a second final evaluation": Trick(
        "evaluate", "query.advertise_final", None,
        "keys asked for the final evaluation after round 1, after the upload of the final "
        "evaluation"),
    "keys for training after the final evaluation": Trick(
        "evaluate", ADVERTISE, None, f"{AGAIN} of the final evaluation after round 1"),
}  # fmt: skip


def test_a_client_reveals_no_more_to_a_server_that_tries(tmp_path):
    """The client refuses every trick, and so answers each stage of a sum once; the run goes on."""
    grids = []
    refusals = {}

    def try_tricks(message, reply):
        if message.metadata.dst_node_id != 1000:
            return reply
        for name, trick in TRICKS.items():
            if message.metadata.message_type != trick.after:
                continue
            content = message.content
            if trick.record is not None:
                records = {key: record for key, record in content.items() if key != SECAGG}
                by_site = trick.record(message, reply)
                if by_site:
                    records |= pack_by_site(by_site)
                content = RecordDict(records)
            answer = ask_site_0(grids[0].nodes[1000], config, trick.stage, content)
            refusals[name] = reason_in(answer)
        return reply

    config = small_config(tmp_path)
    outcome = run_federation(config, clients=CLIENTS, tamper=try_tricks, on_grid=grids.append)

    for name, trick in TRICKS.items():
        assert trick.refusal in refusals[name], name
    assert not outcome.rows[0]["void"]
    assert outcome.summary["accuracy"]


def test_a_site_without_shares_is_not_unmasked(tmp_path):
    """A site that sent its keys and was lost before it shared them is in no site's masks.

    Here that is site-3: a server that asks to unmask it as well is refused.
    """
    client = client_of(small_config(tmp_path), partition=0, clients=CLIENTS).client
    every = [f"site-{number}" for number in range(CLIENTS)]

    def sum_asked_for(sites):
        content = RecordDict({**pack_by_site(dict.fromkeys(sites, b""))})
        instructions = Instructions(1, "run", RunHistory(client.run_id))
        asked = replace(client, content=content, instructions=instructions)
        return client_secagg.SecureSum(asked, final=False)

    progress = client_secagg._Progress(
        client.run_id,
        sum=2,  # the number of round 1's sum
        sent=2,
        stage="mask",
        keys=dict.fromkeys(every, NO_KEYS),
        shares=dict.fromkeys(every[:3], bytes(2 * SHARE)),
    )
    sum_asked_for(every)._write(progress)

    with pytest.raises(RefusedMessage, match="an unmasking for 4 sites"):
        sum_asked_for(every).unmask()

    assert {*sum_asked_for(every[:3]).unmask()[SECAGG]} == {*every[:3]}


@pytest.mark.parametrize("during", ["mask", "_begun"])
def test_what_comes_twice_at_once_shows_one_share_of_each_peer(during, tmp_path, monkeypatch):
    """While a site masks its upload (`mask`) or unmasks (`_begun`), a server asks once more.

    It asks to unmask the sum of four sites, with a threshold that four of seven reach. Two answers
    for different sites would show two shares of one peer, so only one is given.
    """
    nodes = real_sites(7, tmp_path / "disk")
    names = [str(node["site-name"]) for node in nodes.values()]
    config = small_config(tmp_path, secagg_threshold=0.51)
    honest = getattr(client_secagg.SecureSum, during)
    answers = []
    threads = []

    def ask(stage, content, sites):
        records = {**content}
        if sites:
            records |= pack_by_site(dict.fromkeys(sites, b""))
        answers.append(ask_site_0(nodes[1000], config, stage, RecordDict(records)))

    def disturbed(self, *details):
        # _begun(2, …) begins the run's first sum, with which no unmasking ends
        is_first_sum = during == "_begun" and details[0] == 2
        has_asked = bool(answers or threads)
        if self.name != "site-0" or has_asked or is_first_sum:
            return honest(self, *details)
        content = RecordDict({**self.client.content})
        unmasking = Thread(target=ask, args=("query.unmask", content, names[:4]))
        threads.append(unmasking)
        if during == "_begun":
            unmasking.start()
            unmasking.join(2)
            return honest(self, *details)
        ask("train", content, [])
        ask("query.unmask", content, names)
        assert not any(answer.has_error() for answer in answers)
        try:
            return honest(self, *details)
        finally:
            unmasking.start()
            unmasking.join()

    monkeypatch.setattr(client_secagg.SecureSum, during, disturbed)
    run_federation(config, clients=len(names), nodes=nodes)
    threads[0].join()

    assert "does not follow 'mask' of round 1" in reason_in(answers[-1])


NOISE_AS_SUM = r"secure aggregation: sums of (?!35 )"
"""A sum whose masks are left is noise, and so is its number of training samples.

Without noise it would be 35: three sites add their 10 samples, and one, whose numbers have half the
scale, adds 5.
"""


def test_a_server_that_sends_one_site_its_model_and_the_others_zeros_gets_no_sum(
    tmp_path, monkeypatch
):
    """Zeros stay zeros whatever data train them, so the sum would show the one site."""

    def send_zeros(message):
        if message.metadata.message_type == "train" and message.metadata.dst_node_id != 1000:
            arrays = message.content["weights"].items()
            zeros = {name: raw(0 * values_of(array)) for name, array in arrays}
            message.content["weights"] = ArrayRecord(zeros)

    change_sent(monkeypatch, node=None, number=1, change=send_zeros)
    config = small_config(tmp_path, algo="fedavg", rounds=3, secagg_threshold=0.6)

    with pytest.raises(FederationError, match=NOISE_AS_SUM):
        run_federation(config, nodes=real_sites(CLIENTS, tmp_path / "d"))


def test_keys_that_a_server_chooses_to_send_to_one_site_alone_give_no_sum(tmp_path, monkeypatch):
    """One is told the keys of five sites, the others of four: its numbers would have another scale.

    Two such scales would make that site's numbers odd, and so readable in the sum.
    """
    true_keys = SecureSum._true_keys
    all_keys = {}

    def keys_of_four(self, *details):
        all_keys.update(true_keys(self, *details))
        return {site: keys for site, keys in all_keys.items() if site != "site-4"}

    def show_all_keys(message):
        if message.metadata.message_type == "query.share":
            message.content.update(pack_by_site(all_keys))

    def any_shares(self, answers, keys, record=SECAGG):
        return self._unpacked(answers, SEALED, record)

    monkeypatch.setattr(SecureSum, "_true_keys", keys_of_four)
    monkeypatch.setattr(SecureSum, "_true_shares", any_shares)
    change_sent(monkeypatch, node=1000, number=1, change=show_all_keys)
    config = small_config(tmp_path, algo="protofed", rounds=3, secagg_threshold=0.6)

    with pytest.raises(FederationError, match=NOISE_AS_SUM):
        run_federation(config, nodes=real_sites(CLIENTS + 1, tmp_path / "d"))


def test_a_prototype_that_a_server_chooses_to_send_breaks_a_training_and_tells_nothing(
    tmp_path, monkeypatch
):
    """Training with a huge prototype of class 3 diverges at every site that has this class.

    The server hears no more than that an error came up. The sites keep their states of before.
    """
    contents_of = server_round._contents
    errors = []

    def contents_with_a_broken_prototype(strategy, *details):
        if strategy.prototypes is not None:
            strategy.prototypes.means[3] = 1e30
        return contents_of(strategy, *details)

    def note_error(level, text):
        if level == "ERROR":
            errors.append(text.partition(": ")[2])

    monkeypatch.setattr(server_round, "_contents", contents_with_a_broken_prototype)
    monkeypatch.setattr("client_app.app.log", note_error)
    monkeypatch.setattr("client_app.answers.log", note_error)
    config = small_config(tmp_path, rounds=3, secagg_threshold=0.6)
    outcome = run_federation(config, nodes=real_sites(CLIENTS, tmp_path / "d"))

    assert not any(outcome.per_row("void"))

    failed = [list(row["failed"].values()) for row in outcome.rows]
    assert failed == [[], [f"{UNEXPECTED}; the log of the site says more"], failed[1], []]
    in_round_2, of_its_state, in_round_3 = errors  # of one site
    assert in_round_2.startswith("losses.")
    assert of_its_state.startswith("the state has NaN")
    assert in_round_3.startswith("losses.")

    saved = list(tmp_path.rglob("d-*/**/000003-*.safetensors"))
    assert len(saved) == CLIENTS
    for file in saved:
        assert all(bool(value.isfinite().all()) for value in load_file(file).values())


def test_the_secret_lies_in_a_file_of_this_user_and_is_forgotten(tmp_path):
    """It is kept from the keys until the upload, with which the next sum's secret is drawn."""
    stored_after = {}  # kind of message -> what the file has once site-0 has replied to it

    def read_secret(message, reply):
        for file in (tmp_path / "runs").rglob("site-0/secagg.json"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            stored_after[message.metadata.message_type] = json.loads(file.read_text())
        return reply

    outcome = federation(tmp_path, read_secret)

    progress = [stored_after[stage] for stage in STAGES]
    at_keys, at_shares, at_upload, at_unmasking = [stored["secret"] for stored in progress]

    assert len(bytes.fromhex(at_keys)) == len(bytes.fromhex(at_unmasking)) == 96
    assert at_shares == at_keys
    assert at_upload == ""
    assert at_unmasking != at_keys  # is the next sum's
    assert [stored["following"] for stored in progress] == ["", "", at_unmasking, ""]
    # its own share of its secret, and after the upload those of all four sites
    assert [len(stored["shares"]) for stored in progress] == [0, 1, 4, 1]
    assert not list(outcome.folder.rglob("secagg.json"))


def test_another_name_of_the_run_does_not_make_a_round_a_new_one(tmp_path):
    """Nor does the end of the run: a site with an operator remembers it in its state."""
    nodes = real_sites(CLIENTS, tmp_path / "disk")
    config = small_config(tmp_path)
    outcome = run_federation(config, clients=CLIENTS, nodes=nodes)

    assert not outcome.rows[0]["void"]

    (message, _reply), *_to_others = outcome.exchanged("query.advertise")
    message.content.config_records["round"]["run_name"] = "another"
    answer = ask_site_0(nodes[1000], config, "query.advertise", message.content)

    reason = "keys asked for round 1, after the upload of the final evaluation after round 1"
    assert reason in reason_in(answer)

    (file,) = (tmp_path / "disk-0" / "privacy").glob("*.secagg")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["secret"] == ""


@pytest.mark.parametrize("damaged", ['{"run_id": 1, "secret": "deadbe', '{"secret": "deadbeefzz"}'])
def test_the_error_about_a_damaged_secret_does_not_show_it(damaged, tmp_path):
    file = tmp_path / "any.secagg"
    file.write_text(damaged)

    with pytest.raises(ValueError, match="secagg") as refused:
        client_secagg.SecureSum._read(SimpleNamespace(path=file))

    assert "deadbe" not in "".join(traceback.format_exception(refused.value))


# -- settings --------------------------------------------------------------------------------------
OF_PROTOTYPES = ("fedtgp", "mpft", "fedplvm", "fpl", "fedorgp", "fedgh", "feddap")
WHY = {
    **dict.fromkeys(
        OF_PROTOTYPES, "its server does more with the clients' prototypes than average them"
    ),
    "fedpcl": "its clients receive one another's prototypes",
    "fednh": "its server scales every client's prototypes to length 1",
    "feddistill": "what teaches a client is the mean of the others' outputs",
    "fesem": "its server groups the clients by their models",
    "fedkd": "its updates travel as factors, which cannot be added",
    **dict.fromkeys(("scaffold", "feddyn"), "its server gives every client the same weight"),
    "fedfa": "its server takes the variance over the clients",
}
"""By hand, from the papers: what no sum can give."""


@pytest.mark.parametrize("algo", CATALOG)
def test_what_needs_single_uploads_is_refused_by_name(algo):
    """The error says why the algorithm needs single uploads (`WHY`), and names others."""
    if algo not in WHY:
        settings_of({"algo": algo, "secagg": True, "rounds": 1})
        return

    refused = refusal({"algo": algo, "secagg": True})
    begins = f"secagg = true: {algo} needs single uploads, for {WHY[algo]}; "

    assert refused.startswith(f"{begins}choose an algo of ditto, fedavg")
    assert refused.endswith(", or fedpcl with fedpcl.prototypes = 'global'")

    # under dp the error offers none of the algorithms that dp does not cover
    with_dp = refusal({"algo": algo, "secagg": True, "dp": "sample", "norm": "group"})
    first_line, *_ = with_dp.splitlines()
    _why, _, choices = first_line.partition("choose")

    assert not re.search("ditto|fedrep|per-fedavg|pfedme", choices), first_line


HIDES = "secagg = true hides the single uploads that it needs"


@pytest.mark.parametrize(("key", "value", "begins"), [
    ("merging", "median", f"merging = 'median': {HIDES}; choose 'mean'"),
    ("max-update-ratio", 2.0, f"max-update-ratio = 2.0: {HIDES}"),
    ("metrics", "auc,recall", "metrics = 'recall': it tells which classes a client has"),
    ("participation", 0.75,
        "participation = 0.75: secagg = true forbids sums over different clients"),
    ("local-epochs", 0,
        "local-epochs = 0: without training a client sends the same in every round"),
    ("lr", 1e-38, "lr = 1e-38: in steps of 1e-38 a client sends the same in every round"),
    ("secagg-threshold", 0.5, "secagg-threshold = 0.5: must be a number above 0.5 and at most 1"),
])  # fmt: skip
def test_what_would_tell_what_it_hides_is_refused(key, value, begins):
    assert refusal({"secagg": True, key: value}).startswith(begins)


@pytest.mark.parametrize("settings", [
    {"participation": 0.75},
    {"local-epochs": 0},
    {"lr-schedule": "step", "lr-decay": 1e-9, "lr-step": 1},
    {"lr-schedule": "cosine", "lr": 2e-7},
    {"algo": "gaussian"},
])  # fmt: skip
def test_a_site_refuses_sums_whose_difference_is_an_upload(settings, tmp_path):
    """A site refuses settings under which the server could compare two sums, or see one upload.

    It does so whether or not its server has checked them.
    """
    node = {"site-name": "north", "require-secagg": True, "state-dir": str(tmp_path), **CACHE}
    node["peers"] = f"south:{'s' * 43}"
    config = run_config(tmp_path, secagg=True, **SMALL) | settings
    grid = LocalGrid(config, {NODE: node})

    reply = grid.ask(Message(RecordDict(), NODE, MessageType.QUERY, group_id="0"))

    assert "single uploads" in reason_in(reply)


def test_a_site_may_demand_secure_aggregation():
    node = {"site-name": "north", "require-secagg": True}
    settings_of({"secagg": True}, node)

    demand = "this site takes part with secure aggregation only (node config: require-secagg)"
    assert refusal({}, node) == f"secagg = false: {demand}; set secagg = true"

    no_boolean = refusal({"secagg": True}, node | {"require-secagg": "yes"})
    assert "require-secagg = 'yes' must be true or false" in no_boolean


@pytest.mark.parametrize("settings", [{"rounds": 1}, {"local-steps": 5}])
def test_one_round_without_epochs_or_training_in_steps_makes_no_two_equal_sums(settings):
    settings_of({"secagg": True, "local-epochs": 0} | settings)


def test_two_clients_are_too_few(tmp_path):
    too_few = r"secure aggregation: a round asks 2 sites; 3 are the"
    with pytest.raises(FederationError, match=too_few):
        federate(tmp_path, clients=2, secagg=True, **SMALL)


def test_keys_are_refused_in_a_run_without_secure_aggregation(tmp_path):
    node = {"partition-id": 0, "num-partitions": 4}
    grid = LocalGrid(run_config(tmp_path, **SMALL), {NODE: node})

    reply = grid.ask(Message(instructions(), NODE, "query.advertise", group_id="1"))

    assert "which the run's settings do not ask for" in reason_in(reply)


def test_what_is_undeclared_or_for_one_site_alone_is_refused(tmp_path, monkeypatch):
    """A half may upload only what its row declares, and send all sites the same payload."""
    upload = ClientAlgorithm.upload
    weights = {"weights": {"w": torch.zeros(1)}}

    def upload_with_weights(self):
        return Payload(**upload(self).entries, **weights)

    monkeypatch.setattr(ClientAlgorithm, "upload", upload_with_weights)
    undeclared = "uploaded: prototypes, weights; declared for this sum: prototypes"

    with pytest.raises(FederationError, match=undeclared):
        federation(tmp_path / "entries")

    monkeypatch.setattr("server_app.strategies.fedproto.FedProto.payload_for", lambda *_: Payload())
    own = "secagg = true: FedProto sends sites payloads of their own"

    with pytest.raises(SettingsError, match=own):
        federation(tmp_path / "own")

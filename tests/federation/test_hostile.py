"""Hostile and broken clients in a federation.

Their replies are refused with a reason and counted, and what the others learn is the same as
without them.
"""

import re
import tracemalloc
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MessageType
from safetensors.torch import load_file

from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG
from server_app.strategies.fedavg import FedAvg
from tests.support import attacks
from tests.support.attacks import (
    both,
    by,
    card_with,
    extra,
    failing,
    in_place,
    raw,
    report_with,
    scaled,
    silent,
    values_of,
    when,
)
from tests.support.declared import DECLARED
from tests.support.harness import (
    LocalGrid,
    federate,
    run_config,
    run_federation,
)
from tests.support.hostile import ATTACKS
from tests.support.plain import assert_equal
from tests.support.sites import EAST, SOUTH, Three, real_sites

CLIENTS, ROUNDS = 4, 2
HOSTILE = 1003
"""The node of the fourth client, which is called site-3."""
HONEST = ("site-0", "site-1", "site-2")
NODES = {}
"""Kind of message and attack in the reply to it -> the node of a site that does nothing else."""
for _kind, _attacks in ATTACKS.items():
    for _attack in _attacks:
        NODES[_kind, _attack] = HOSTILE + len(NODES)

DIGITS = {
    "dataset": "digits",
    "partition": "iid",
    "train_samples": 20,
    "test_samples": 20,
}
HALF_OF_THE_DIGITS = {
    "dataset": "digits",
    "partition": "pathological",
    "classes_per_client": 5,
    "train_samples": 30,
    "test_samples": 60,
}


def fedavg(folder, **settings):
    """The settings of a run in which all sites have the same model."""
    facts = {"algo": "fedavg", "models": "htcnn-1", **DIGITS}
    return run_config(folder, **facts | settings)


def federation(folder, change, algo="fedproto", **settings):
    """Run four clients with half of the ten digits each; change the fourth's training replies."""
    config = run_config(folder, algo=algo, rounds=ROUNDS, **HALF_OF_THE_DIGITS, **settings)
    return run_federation(config, clients=CLIENTS, tamper=by({HOSTILE: change}))


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Return a function: algorithm -> the same run without the fourth client's replies."""
    return cache(lambda algo: federation(tmp_path_factory.mktemp(algo), silent, algo))


def assert_unharmed(outcome, reference):
    """Global results, and the honest clients' figures of every round, are the same to the bit."""
    for name in ("prototypes.safetensors", "weights.safetensors"):
        assert (outcome.folder / name).exists() == (reference.folder / name).exists()
        if (reference.folder / name).exists():
            assert_equal(load_file(outcome.folder / name), load_file(reference.folder / name))

    for row, wanted in zip(outcome.rows, reference.rows, strict=True):
        for site in HONEST:
            assert row["clients"][site]["accuracy"] == wanted["clients"][site]["accuracy"]
            assert row["clients"][site]["losses"] == wanted["clients"][site]["losses"]


# -- the table of attacks ------------------------------------------------------------------------


def nodes_of(kind):
    """Return the nodes that attack in their replies to messages of this kind."""
    return {node for (kind_of_node, _), node in NODES.items() if kind_of_node == kind}


def site_of(node):
    return f"site-{node - 1000}"


def with_hostile_sites(folder, hostile, tamper):
    """Run three honest sites and these hostile ones, which all have the data of the fourth client.

    With ``liars = 0`` nothing protects the honest but that replies are refused. The run waits for
    all but those that attack in their introduction.
    """
    nodes = real_sites(len(HONEST) + len(NODES))
    for number, node in enumerate(nodes.values()):
        node |= {"partition-id": min(number, 3), "num-partitions": 4}
    for node in {*NODES.values()} - {*hostile}:
        del nodes[node]
    joining = len(nodes) - len(nodes.keys() & nodes_of(MessageType.QUERY))
    facts = HALF_OF_THE_DIGITS | {"rounds": ROUNDS, "num_clients": joining, "liars": 0}
    return federate(folder, nodes=nodes, tamper=tamper, **facts)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """Make a run with every attack of the table; return it, and what the server prints."""

    def attack(message, reply):
        for (kind, name), node in NODES.items():
            if kind == message.metadata.message_type and node == message.metadata.dst_node_id:
                change, _ = ATTACKS[kind][name]
                return change(message, reply)
        return reply

    with redirect_stdout(StringIO()) as said:
        folder = tmp_path_factory.mktemp("attacked")
        outcome = with_hostile_sites(folder, NODES.values(), attack)
    return outcome, said.getvalue()


@pytest.mark.parametrize(("kind", "attack"), NODES)
def test_an_attack_is_refused_for_a_reason(kind, attack, attacked):
    """The server says why, in a short line: of an introduction on its console, else in the rows."""
    outcome, said = attacked
    _, line = ATTACKS[kind][attack]
    site = site_of(NODES[kind, attack])

    if kind == MessageType.QUERY:
        left_out = (
            r"(?:1 client|site-[\d, site-]+) cannot take part: its introduction is not valid: "
        )
        reasons = re.findall(rf"(?m)^{left_out}({re.escape(line)}.*)$", said)
    elif kind == MessageType.TRAIN:
        reasons = [row["refused"][site] for row in outcome.rows[:ROUNDS]]
    else:
        reasons = [outcome.rows[-1]["refused"][site]]

    # an attack on training is made in every round, any other once
    assert len(reasons) == (ROUNDS if kind == MessageType.TRAIN else 1)

    for reason in reasons:
        assert line in reason
        assert len(reason) < 600


def test_whoever_is_refused_is_counted_and_nobody_else(attacked):
    """In each row, in the summary's trouble, and among those whose accuracy is reported."""
    outcome, _ = attacked
    training = {site_of(node) for node in nodes_of(MessageType.TRAIN)}
    evaluating = {site_of(node) for node in nodes_of(MessageType.EVALUATE)}
    *rounds, final = outcome.rows

    for row in rounds:
        assert row["refused"].keys() == training
    assert final["refused"].keys() == evaluating
    refused = ROUNDS * len(training) + len(evaluating)
    assert outcome.summary["trouble"] == {"failed": 0, "refused": refused, "missing": 0, "late": 0}

    assert outcome.summary["clients"].keys() == {*HONEST} | training | evaluating
    assert outcome.summary["accuracy-of-clients"].keys() == {*HONEST} | training


def test_the_others_learn_what_they_learn_without_the_hostile(attacked, tmp_path):
    """Sites that attack in the final evaluation alone have trained honestly, so they stay."""
    outcome, _ = attacked
    honest_until_the_end = nodes_of(MessageType.EVALUATE)
    without_the_others = with_hostile_sites(tmp_path, honest_until_the_end, None)

    assert_unharmed(outcome, without_the_others)


# -- attacks of one run each ---------------------------------------------------------------------


def test_a_gigabyte_is_refused_before_anything_of_it_is_copied(tmp_path):
    """One client sends a gigabyte of prototypes in every round, and no memory is taken for it."""
    change, _ = ATTACKS[MessageType.TRAIN]["a gigabyte in the prototypes"]

    tracemalloc.start()
    try:
        federation(tmp_path, change)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 50e6  # a twentieth of the gigabyte


@in_place
def negative_variances(message, reply):
    """Send running variances of batch normalisation below 0."""
    record = reply.content.array_records["weights"]
    for name, array in record.items():
        if name.endswith("running_var"):
            array.data = (-30 * values_of(array)).astype("<f4").tobytes()


def test_a_negative_variance_is_refused(tmp_path):
    """Such weights have an ordinary norm, but would make every honest client's features NaN."""
    outcome = federation(tmp_path, negative_variances(), "fedavg", models="resnet4-imagenet-stem")

    for row in outcome.rows[:ROUNDS]:
        assert row["refused"].keys() == {"site-3"}
        assert "running_var: below 0" in row["refused"]["site-3"]
    assert outcome.rows[-1]["valid"] == CLIENTS


def test_a_round_without_an_evaluation_has_no_figures_of_one(tmp_path):
    """In round 2 nobody evaluates (evaluate-every = 2), but two sites send figures.

    They would decide the figures of the round, and are refused.
    """
    lies = {
        1002: report_with(correct__head=60),
        HOSTILE: report_with(**{"metrics__head/auc": 1.0}),
    }
    config = run_config(tmp_path, rounds=2, evaluate_every=2, metrics="auc", **HALF_OF_THE_DIGITS)

    evaluated, unevaluated, _ = run_federation(config, clients=CLIENTS, tamper=by(lies)).rows

    assert evaluated["accuracy"]
    assert not evaluated["refused"]
    assert not unevaluated["accuracy"]
    assert not unevaluated.get("metrics")
    assert unevaluated["refused"].keys() == {"site-2", "site-3"}
    for reason in unevaluated["refused"].values():
        assert "a round without one (evaluate-every)" in reason


ONE_OF_EACH_UPLOAD = {}
"""Declaration of an upload, which is all that decides what is refused -> an algorithm with it."""
for _algo, _declared in DECLARED.items():
    if _declared.records:
        ONE_OF_EACH_UPLOAD.setdefault(repr(CATALOG[_algo].exchange.up), _algo)


@pytest.mark.parametrize("algo", ONE_OF_EACH_UPLOAD.values())
def test_bad_uploads_of_every_kind_are_refused_and_harm_nobody(algo, tmp_path, without):
    """One client sends NaN in the first round, and in the second what is 10⁶ times too long."""
    declared = DECLARED[algo]
    # ProtoFed sends prototypes in its last round alone, and weights in all
    if declared.prototypes and algo != "protofed":
        longer = partial(scaled, record_name=declared.record)
    elif declared.weights:
        longer = partial(attacks.weights_scaled, entry="weights")
    else:  # the first of its further records of weights
        longer = partial(attacks.weights_scaled, entry=next(iter(declared.beside)))

    bad = both(when(longer(float("nan")), number=1), when(longer(1e6), number=2))
    outcome = federation(tmp_path, bad, algo)

    assert outcome.summary["trouble"]["refused"] == 2  # one reply in each of the two rounds
    assert_unharmed(outcome, without(algo))


def test_what_is_written_down_is_short_and_plain_json(tmp_path):
    """One client's error has a reason of a million letters in round 1, which also clears screens.

    Its report has huge figures in round 2.
    """
    long_error = failing(2, "\x1b[2J" + "x" * 10**6)
    huge_figures = report_with(losses__total=1e30, seconds__train=1e30)

    lies = both(when(long_error, number=1), when(huge_figures, number=2))
    outcome = federation(tmp_path, lies)

    reason = outcome.rows[0]["failed"]["site-3"]
    assert reason.startswith("\\x1b[2Jxxx")
    assert reason.endswith("(1000004 characters)")
    assert len(reason) < 600

    for name in ("metrics.jsonl", "summary.json"):
        text = (outcome.folder / name).read_text()
        assert "NaN" not in text
        assert "Infinity" not in text

    assert outcome.summary["trouble"] == {"failed": 1, "refused": 0, "missing": 0, "late": 0}


# -- what Flower cannot read ---------------------------------------------------------------------


@pytest.fixture
def _decoding_grid(monkeypatch):
    """Let the grid decode arrays as they are pulled, as Flower's does."""
    pull = LocalGrid.pull_messages

    def pull_messages(self, message_ids):
        replies = pull(self, message_ids)
        for reply in replies:
            if reply.has_error():
                continue
            for record in reply.content.array_records.values():
                for array in record.values():
                    Array.inflate(array.deflate(), dict(array.children))
        return replies

    monkeypatch.setattr(LocalGrid, "pull_messages", pull_messages)


def garbled(message, reply):
    """Add an array with words for its shape: Flower encodes it, and decoding raises a TypeError."""
    record = ArrayRecord({"x": raw(np.zeros(3, np.float32))})
    record["x"].shape = ("5", "64")
    return extra("more", record)(message, reply)


@pytest.mark.usefixtures("_decoding_grid")
def test_a_reply_that_flower_cannot_read_harms_nobody(tmp_path, without):
    """One client's training replies cannot be decoded: they count as failed."""
    outcome = federation(tmp_path, garbled)

    for row in outcome.rows[:ROUNDS]:
        assert "a reply that Flower cannot read" in row["failed"]["site-3"]
    assert_unharmed(outcome, without("fedproto"))


@pytest.mark.usefixtures("_decoding_grid")
def test_an_introduction_that_flower_cannot_read_harms_nobody(tmp_path):
    config = run_config(tmp_path, rounds=1, num_clients=3, **DIGITS)

    outcome = run_federation(
        config, clients=CLIENTS, tamper=by({HOSTILE: garbled}, MessageType.QUERY)
    )

    assert sorted(outcome.summary["clients"]) == sorted(HONEST)


# -- a step of the server's own that fails -------------------------------------------------------


def overflow(server):
    server.weights = {name: value * float("inf") for name, value in server.weights.items()}


def raise_error(server):
    raise RuntimeError("value cannot be converted to type int64_t without overflow")


def break_round_2(monkeypatch, fault):
    """Let a fault strike the server after FedAvg's merging of round 2."""
    honest = FedAvg.merge

    def merge(self, uploads):
        figures = honest(self, uploads)
        if uploads[0].report.round == 2:
            fault(self)
        return figures

    monkeypatch.setattr(FedAvg, "merge", merge)


@pytest.mark.parametrize(
    ("fault", "nodes"),
    [
        (overflow, real_sites(3)),
        (raise_error, real_sites(3)),
        (overflow, None),  # a simulation; in it an error ends the run (the next test)
    ],
)
def test_a_server_step_that_fails_costs_a_round(fault, nodes, tmp_path, monkeypatch):
    """Round 2 is void, and round 3 goes on from the weights that round 2 began with."""
    break_round_2(monkeypatch, fault)

    outcome = run_federation(fedavg(tmp_path, rounds=3), nodes=nodes)

    assert outcome.per_row("void") == [False, True, False, False]

    if fault is raise_error:
        said = outcome.rows[1]["void-because"]
        assert said.startswith("the server's step failed: RuntimeError: value cannot be")

    for value in load_file(outcome.folder / "weights.safetensors").values():
        assert torch.isfinite(value).all()

    (second, _), *_ = outcome.exchanged(number=2)  # the message to the first client
    (third, _), *_ = outcome.exchanged(number=3)
    for name, array in second.content["weights"].items():
        assert array.data == third.content["weights"][name].data


def test_in_a_simulation_an_error_of_the_servers_step_ends_the_run(tmp_path, monkeypatch):
    """All is one person's own there, who sees the traceback at once."""
    break_round_2(monkeypatch, raise_error)

    with pytest.raises(RuntimeError, match="without overflow"):
        run_federation(fedavg(tmp_path, rounds=3), clients=2)


# -- claims of many samples ----------------------------------------------------------------------


def test_a_claim_of_samples_owns_no_mean(tmp_path, capsys):
    """With max-samples-ratio = 1 a client that claims 10¹⁵ samples weighs as much as the others."""
    data = {"dataset": "digits", "partition": "iid", "train_samples": 30, "rounds": 1}
    learnt = []
    for samples in (30, 10**15):
        config = run_config(tmp_path / str(samples), max_samples_ratio=1.0, **data)
        outcome = run_federation(config, clients=CLIENTS, tamper=attacks.claims(samples))
        learnt.append(load_file(outcome.folder / "prototypes.safetensors")["means"])

    said = capsys.readouterr().out
    warning = "warning: site-3: 1e+15 training samples weigh as 30 (max-samples-ratio)"

    assert said.count(warning) == 1
    assert "shares of the training samples: site-3 100.0 %, site-0 0.0 %" in said
    assert torch.allclose(*learnt)


def test_a_late_claim_is_bounded_too(tmp_path, capsys):
    """A site that joins after the first round cannot gain weight by claiming 10¹² samples."""
    config = run_config(tmp_path, algo="fedproto", num_clients=3, **DIGITS)
    nodes = real_sites(CLIENTS)
    late = nodes.pop(HOSTILE)

    def joins(message, reply):
        if message.metadata.group_id == "1":
            nodes.setdefault(HOSTILE, late)
        return reply

    tamper = both(joins, attacks.claims(10**12))
    run_federation(config, nodes=nodes, tamper=tamper)

    # twice the 20 samples of the next (max-samples-lead is 2 where sites have operators)
    warning = "warning: site-3: 1e+12 training samples weigh as 40 (max-samples-lead)"
    assert warning in capsys.readouterr().out


# -- introductions -------------------------------------------------------------------------------

FALSE_CLAIMS = {
    "fedavg": [
        ({"arch": "htcnn-1"}, "the sites differ in arch"),
        ({"input_shape": [1, 4096, 4096]}, "the sites differ in the shape of their inputs"),
        ({"input_shape": [7]}, "the sites differ in the shape of their inputs"),
        ({"weights": "0123456789abcdef"}, "the sites differ in weights"),
    ],
    "fedproto": [
        ({"classes": ["x", "y"], "present": [0, 1]}, "the sites differ in classes"),
        ({"num_partitions": 9}, "the sites differ in num-partitions"),
    ],
    "lg-fedavg": [
        ({"arch": "zzz"}, "arch is 'zzz'"),
        (
            {"arch": "resnet34-imagenet-stem+fc512"},
            "its arch and input_shape do not give the weights",
        ),
    ],
    "fedgh": [({"arch": "zzz"}, "arch is 'zzz'")],
}
"""Algorithm -> what a site claims to be, and what the server says of it."""
FIVE_MODELS = "cnn4,htcnn-1,htcnn-3,mnist-cnn,htcnn-2"


@pytest.mark.parametrize("algo", FALSE_CLAIMS)
def test_the_first_sites_decide_nothing(algo, tmp_path, capsys):
    """The first sites claim another model, classes or division than the four honest ones.

    They are left out, and the four suffice. Where all architectures share their heads, the claim of
    a false one has the right digest of weights: only a model that is built from it shows the lie.
    """
    claims = FALSE_CLAIMS[algo]
    models = "cnn4" if algo == "fedavg" else FIVE_MODELS
    config = run_config(tmp_path, algo=algo, rounds=1, min_clients=4, models=models, **DIGITS)
    lies = {1000 + number: card_with(**claim) for number, (claim, _) in enumerate(claims)}

    nodes = real_sites(len(claims) + 4)
    outcome = run_federation(config, nodes=nodes, tamper=by(lies, MessageType.QUERY))

    honest = [f"site-{number}" for number in range(len(claims), len(nodes))]
    assert sorted(outcome.summary["clients"]) == honest
    assert outcome.per_row("valid") == [4, 4]
    said = capsys.readouterr().out
    for number, (_, line) in enumerate(claims):
        assert f"site-{number}: {line}" in said


def test_of_two_nodes_with_one_name_neither_takes_part(tmp_path, capsys):
    """Node 1000 takes site-3's name, and a third node comes with it later.

    Before round 1 nobody knows which of them is right, so the other sites go on without the name.
    """
    config = run_config(tmp_path, rounds=2, min_clients=3, **DIGITS)
    nodes = real_sites(5)
    takes_name = by({1000: card_with(name="site-3")}, MessageType.QUERY)

    def third_comes(message, reply):
        nodes[9] = nodes[1003]
        return takes_name(message, reply)

    outcome = run_federation(config, nodes=nodes, tamper=third_comes)

    assert sorted(outcome.summary["clients"]) == ["site-1", "site-2", "site-4"]

    said = capsys.readouterr().out
    assert "two clients call themselves site-3, nodes 1000 and 1003" in said

    whose = "site-3: two clients began with this name, so it is nobody's until you end one of them"
    assert f"{whose}, stop the run" in said


def test_no_site_says_how_many_must_take_part_where_data_are_their_own(tmp_path):
    """East claims that data are divided in three; south has no data, and the others go on."""
    sites = Three(tmp_path)
    sites.nodes[SOUTH]["data-dir"] = str(tmp_path)

    outcome = sites.run(by({EAST: card_with(num_partitions=3)}, MessageType.QUERY))

    assert sorted(outcome.summary["clients"]) == ["east", "north"]


# -- figures that would decide for everybody -----------------------------------------------------


def test_one_site_does_not_stop_a_run_early(tmp_path):
    """One of five claims 100 % on validation data before the first round, and 0 % from then on.

    It also sends figures of prototypes, which FedAvg does not have.
    """

    def lies(message, reply):
        accuracy = 1.0 if message.metadata.group_id == "1" else 0.0
        figures = {
            "validation__head": accuracy,
            "validation__prototype": 0.0,
            "correct__prototype": 20,
        }
        return report_with(**figures)(message, reply)

    config = fedavg(
        tmp_path,
        train_samples=60,
        validation_fraction=0.3,
        early_stopping=2,
        rounds=6,
        lr=0.1,
    )
    outcome = run_federation(config, nodes=real_sites(5), tamper=by({1004: lies}))

    assert outcome.summary["rounds"] == 6
    for row in outcome.rows:
        assert "trimmed" in row["validation"]["head"]
        assert list(row["accuracy"]) == ["head"]


def test_a_site_that_alone_has_validation_samples_does_not_choose_the_round(tmp_path):
    """Nobody could outvote its figures, which would stop the run and name the best round."""

    def lies(message, reply):
        if message.metadata.dst_node_id != 1004:
            return reply
        if message.metadata.message_type == MessageType.QUERY:
            return card_with(validation_samples=9)(message, reply)
        accuracy = 1.0 if message.metadata.group_id == "1" else 0.0
        return report_with(validation_samples=9, validation__head=accuracy)(message, reply)

    config = fedavg(tmp_path)
    outcome = run_federation(config, nodes=real_sites(5), tamper=lies)

    assert outcome.summary["best-accuracy"]["head"]["chosen-on"] == "test"

    config |= {"early-stopping": 2, "run-name": "stopping"}
    line = "early-stopping = 2: only 1 of 5 clients with validation samples, too few for"

    with pytest.raises(SettingsError, match=line):
        run_federation(config, nodes=real_sites(5), tamper=lies)


def test_a_site_that_sends_no_accuracy_hides_its_own_only_and_the_others_choose_no_round(tmp_path):
    """Site-2 sends no accuracy, as if it had too few test samples; site-1 sends no AUC.

    The means are over the others. Two that are left cannot outvote a liar, so no best round is
    named.
    """
    hidden = {1002: ("correct.", "metrics."), 1001: ("metrics.head/auc",)}

    def hides(message, reply):
        report = reply.content.metric_records.get("report", {})
        for name in list(report):
            if name.startswith(hidden.get(message.metadata.dst_node_id, ())):
                del report[name]
        return reply

    config = fedavg(tmp_path, metrics="auc,macro-f1")
    outcome = run_federation(config, nodes=real_sites(3), tamper=hides)

    for row in outcome.rows:
        shares = [row["clients"][site]["accuracy"]["head"] for site in ("site-0", "site-1")]
        assert row["accuracy"]["head"]["mean"] == pytest.approx(np.mean(shares))
        assert "trimmed" not in row["accuracy"]["head"]

    assert outcome.summary["best-accuracy"] == {}

    said = str(outcome.summary)
    assert (
        "no accuracy of site-2 (too few test samples): the others' alone are in the means" in said
    )
    assert "no auc of site-1 (too few test samples of each class" in said

"""One hostile or broken client in a federation of four.

Its reply is refused with a reason and counted, and what the others learn is the same as without it.
"""

import re
import tracemalloc
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MessageType
from safetensors.torch import load_file

from protofl_common.config.options import SettingsError
from server_app.network.membership import FederationError
from server_app.run.replies import Upload
from server_app.strategies.fedavg import FedAvg
from tests.support import attacks
from tests.support.attacks import (
    Change,
    both,
    by,
    card_with,
    extra,
    failing,
    in_place,
    raw,
    replayed,
    report_with,
    scaled,
    silent,
    values_of,
)
from tests.support.declared import DECLARED
from tests.support.given import Patch, Printed
from tests.support.harness import LocalGrid, Outcome, run_config, run_federation
from tests.support.hostile_replies import HOSTILE_REPLIES
from tests.support.sites import Three, real_sites

CLIENTS, ROUNDS = 4, 2
HOSTILE = 1003
"""The node of the fourth client, which is called site-3."""
HONEST = ("site-0", "site-1", "site-2")

DIGITS: dict[str, Any] = {
    "dataset": "digits",
    "partition": "iid",
    "train_samples": 20,
    "test_samples": 20,
}


def fedavg(folder: Path, **settings: Any) -> dict[str, Any]:
    """The settings of a run in which all sites have the same model."""
    facts = {"algo": "fedavg", "models": "htcnn-1", **DIGITS}
    return run_config(folder, **facts | settings)


def federation(folder: Path, change: Change, algo: str = "fedproto", **settings: Any) -> Outcome:
    """Run four clients with half of the ten digits each; change the fourth's training replies."""
    data = {
        "dataset": "digits",
        "partition": "pathological",
        "classes_per_client": 5,
        "train_samples": 30,
        "test_samples": 60,
    }
    config = run_config(folder, algo=algo, rounds=ROUNDS, **data, **settings)
    return run_federation(config, CLIENTS, tamper=by({HOSTILE: change}))


Reference = Callable[[str], Outcome]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """For an algorithm, the same run without the fourth client's replies."""
    return cache(lambda algo: federation(tmp_path_factory.mktemp(algo), silent, algo))


def assert_refused(outcome: Outcome, line: str, rounds: Iterable[int] = (1, 2)) -> None:
    """The hostile client alone is refused in these rounds, for this reason, which is short."""
    for number in rounds:
        refused = outcome.rows[number - 1]["refused"]
        assert list(refused) == ["site-3"]
        assert line in refused["site-3"]
        assert len(refused["site-3"]) < 600
    assert outcome.summary["trouble"]["refused"] == len(list(rounds))


def assert_unharmed(outcome: Outcome, reference: Outcome) -> None:
    """What was learnt, and the honest clients' figures in every round, are the same to the bit."""
    for name in ("prototypes.safetensors", "weights.safetensors"):
        assert (outcome.folder / name).exists() == (reference.folder / name).exists()
        if (reference.folder / name).exists():
            learnt = load_file(outcome.folder / name)
            for key, value in load_file(reference.folder / name).items():
                assert torch.equal(learnt[key], value)

    for row, wanted in zip(outcome.rows, reference.rows, strict=True):
        for site in HONEST:
            assert row["clients"][site]["accuracy"] == wanted["clients"][site]["accuracy"]
            assert row["clients"][site]["losses"] == wanted["clients"][site]["losses"]


# -- training replies ----------------------------------------------------------------------------


@pytest.mark.parametrize("attack", HOSTILE_REPLIES)
def test_a_hostile_reply_is_refused_counted_and_harmless(
    attack: str, tmp_path: Path, without: Reference
) -> None:
    change, line = HOSTILE_REPLIES[attack]

    outcome = federation(tmp_path, change)

    assert_refused(outcome, line)
    assert_unharmed(outcome, without("fedproto"))


def test_a_gigabyte_is_refused_before_anything_of_it_is_copied(tmp_path: Path) -> None:
    change, _ = HOSTILE_REPLIES["a gigabyte in the prototypes"]

    tracemalloc.start()
    try:
        federation(tmp_path, change)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 50e6


def test_a_replayed_reply_is_refused(tmp_path: Path) -> None:
    """Only the first one was honest."""
    outcome = federation(tmp_path, replayed())

    assert_refused(outcome, "a reply to round 1 in round", rounds=[2])


@in_place
def negative_variances(message: Message, reply: Message) -> None:
    record = reply.content.array_records["weights"]
    for name, array in record.items():
        if name.endswith("running_var"):
            array.data = (-30 * values_of(array)).astype("<f4").tobytes()


def test_a_negative_variance_is_refused(tmp_path: Path) -> None:
    """It has an ordinary norm, and would make every honest client's next features NaN."""
    outcome = federation(tmp_path, negative_variances(), "fedavg", models="resnet4-imagenet-stem")

    assert_refused(outcome, "running_var: below 0")
    assert outcome.rows[-1]["valid"] == CLIENTS


@pytest.mark.parametrize("figure", [{"correct__head": 60}, {"metrics__head/auc": 1.0}])
def test_a_round_without_an_evaluation_has_no_figures_of_one(
    figure: dict[str, Any], tmp_path: Path
) -> None:
    """They would be those of the round, for nobody else has any."""
    outcome = federation(tmp_path, report_with(**figure), evaluate_every=2, metrics="auc")

    evaluated, unevaluated = outcome.rows[:2]
    assert evaluated["accuracy"]
    assert not unevaluated["accuracy"]
    assert not unevaluated.get("metrics")
    assert_refused(outcome, "a round without one (evaluate-every)", rounds=[2])


@pytest.mark.parametrize("algo", [algo for algo, declared in DECLARED.items() if declared.records])
def test_the_same_holds_for_other_algorithms(algo: str, tmp_path: Path, without: Reference) -> None:
    """NaN is refused in the first round, and in the second what is too long."""
    declared = DECLARED[algo]
    sends_prototypes = bool(declared.prototypes) and algo != "protofed"  # its last round alone
    entry = "weights" if declared.weights else next(iter(declared.beside), "")

    def change(message: Message, reply: Message) -> Message:
        factor = float("nan") if message.metadata.group_id == "1" else 1e6
        if sends_prototypes:
            return scaled(factor, declared.record)(message, reply)
        return attacks.weights_scaled(factor, entry)(message, reply)

    outcome = federation(tmp_path, change, algo)

    assert outcome.summary["trouble"]["refused"] == ROUNDS
    assert_unharmed(outcome, without(algo))


def test_what_is_written_down_is_short_and_plain_json(tmp_path: Path) -> None:
    """An error has a long reason in the first round, a report huge figures in the second."""
    long_error = failing(2, "\x1b[2J" + "x" * 10**6)
    huge_figures = report_with(losses__total=1e30, seconds__train=1e30)

    def change(message: Message, reply: Message) -> Message:
        lie = long_error if message.metadata.group_id == "1" else huge_figures
        return lie(message, reply)

    outcome = federation(tmp_path, change)

    reason = outcome.rows[0]["failed"]["site-3"]
    assert reason.startswith("\\x1b[2Jxxx")
    assert reason.endswith("(1000004 characters)")
    assert len(reason) < 600

    for name in ("metrics.jsonl", "summary.json"):
        text = (outcome.folder / name).read_text()
        assert "NaN" not in text
        assert "Infinity" not in text

    assert outcome.summary["trouble"] == {"failed": 1, "refused": 0, "missing": 0, "late": 0}


def test_a_rubbish_final_evaluation_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path, rounds=1, **DIGITS)
    counts = extra("label_counts", ArrayRecord({"counts": raw(np.zeros(0, np.int64))}))
    report = report_with(losses__total=1.0, train_samples=0)

    tamper = by({1002: counts, HOSTILE: report}, MessageType.EVALUATE)
    outcome = run_federation(config, CLIENTS, tamper)

    assert outcome.rows[-1]["refused"] == {
        "site-2": "an undeclared array record 'label_counts'",
        "site-3": "report.losses.total is 1.0: the name is not declared, or the value out of range",
    }
    assert set(outcome.summary["accuracy-of-clients"]) == {"site-0", "site-1"}


# -- what Flower cannot read ---------------------------------------------------------------------


@pytest.fixture
def _decoding_grid(monkeypatch: Patch) -> None:
    """A grid whose ``pull_messages`` decodes arrays, as Flower's does."""
    pull = LocalGrid.pull_messages

    def pull_messages(self: LocalGrid, message_ids: Iterable[str]) -> list[Message]:
        replies = pull(self, message_ids)
        for reply in replies:
            if reply.has_error():
                continue
            for record in reply.content.array_records.values():
                for array in record.values():
                    Array.inflate(array.deflate(), dict(array.children))
        return replies

    monkeypatch.setattr(LocalGrid, "pull_messages", pull_messages)


def garbled(message: Message, reply: Message) -> Message:
    """Add an array whose shape are words: Flower encodes it, and decoding raises a TypeError."""
    record = ArrayRecord({"x": raw(np.zeros(3, np.float32))})
    record["x"].shape = ("5", "64")  # type: ignore[assignment]
    return extra("more", record)(message, reply)


@pytest.mark.usefixtures("_decoding_grid")
def test_a_reply_that_flower_cannot_read_harms_nobody(tmp_path: Path, without: Reference) -> None:
    outcome = federation(tmp_path, garbled)

    for row in outcome.rows[:ROUNDS]:
        assert "a reply that Flower cannot read" in row["failed"]["site-3"]
    assert_unharmed(outcome, without("fedproto"))


@pytest.mark.usefixtures("_decoding_grid")
def test_an_introduction_that_flower_cannot_read_harms_nobody(tmp_path: Path) -> None:
    config = run_config(tmp_path, rounds=1, num_clients=3, **DIGITS)

    outcome = run_federation(config, CLIENTS, by({HOSTILE: garbled}, MessageType.QUERY))

    assert sorted(outcome.summary["clients"]) == sorted(HONEST)


# -- a step of the server's own that fails -------------------------------------------------------


def overflow(server: FedAvg[Any]) -> None:
    server.weights = {name: value * float("inf") for name, value in server.weights.items()}


def raise_error(server: FedAvg[Any]) -> None:
    raise RuntimeError("value cannot be converted to type int64_t without overflow")


def break_round_2(monkeypatch: Patch, fault: Callable[[FedAvg[Any]], None]) -> None:
    """Let this happen to the server after FedAvg's merging of round 2."""
    honest = FedAvg.merge

    def merge(self: FedAvg[Any], uploads: list[Upload]) -> dict[str, float]:
        figures = honest(self, uploads)
        if uploads[0].report.round == 2:
            fault(self)
        return figures

    monkeypatch.setattr(FedAvg, "merge", merge)


@pytest.mark.parametrize("fault", [overflow, raise_error])
def test_a_server_step_that_fails_costs_sites_a_round(
    fault: Callable[[FedAvg[Any]], None], tmp_path: Path, monkeypatch: Patch
) -> None:
    break_round_2(monkeypatch, fault)

    outcome = run_federation(fedavg(tmp_path, rounds=3), nodes=real_sites(3))

    assert [row["void"] for row in outcome.rows] == [False, True, False, False]

    if fault is raise_error:
        said = outcome.rows[1]["void-because"]
        assert said.startswith("the server's step failed: RuntimeError: value cannot be")

    for value in load_file(outcome.folder / "weights.safetensors").values():
        assert torch.isfinite(value).all()

    second, third = (outcome.exchanged(number=number)[0][0] for number in (2, 3))
    for name, array in second.content["weights"].items():
        assert array.data == third.content["weights"][name].data


def test_in_a_simulation_a_step_that_leaves_nan_is_void_as_well(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    break_round_2(monkeypatch, overflow)

    outcome = run_federation(fedavg(tmp_path, rounds=3), clients=2)

    assert [row["void"] for row in outcome.rows] == [False, True, False, False]


def test_in_a_simulation_an_error_of_the_servers_step_ends_the_run(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    break_round_2(monkeypatch, raise_error)

    with pytest.raises(RuntimeError, match="without overflow"):
        run_federation(fedavg(tmp_path, rounds=3), clients=2)


# -- claims of many samples ----------------------------------------------------------------------


def test_a_claim_of_samples_owns_no_mean(tmp_path: Path, capsys: Printed) -> None:
    """10^15 samples weigh as much as one client's share of 30, where the setting says so."""
    data = {"dataset": "digits", "partition": "iid", "train_samples": 30, "rounds": 1}
    learnt = []
    for samples in (30, 10**15):
        config = run_config(tmp_path / str(samples), max_samples_ratio=1.0, **data)
        outcome = run_federation(config, CLIENTS, attacks.claims(samples))
        learnt.append(load_file(outcome.folder / "prototypes.safetensors")["means"])

    said = capsys.readouterr().out
    warning = "warning: site-3: 1e+15 training samples weigh as 30 (max-samples-ratio)"

    assert said.count(warning) == 1
    assert "shares of the training samples: site-3 100.0 %, site-0 0.0 %" in said
    assert torch.allclose(*learnt)


def test_a_late_claim_is_bounded_too(tmp_path: Path, capsys: Printed) -> None:
    """A site that joins after the first round cannot gain weight by claiming 10¹² samples."""
    config = run_config(tmp_path, algo="fedproto", num_clients=3, **DIGITS)
    nodes = real_sites(CLIENTS)
    late = nodes.pop(HOSTILE)

    def joins(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "1":
            nodes.setdefault(HOSTILE, late)
        return reply

    tamper = both(joins, attacks.claims(10**12))
    run_federation(config, nodes=nodes, tamper=tamper)

    warning = "warning: site-3: 1e+12 training samples weigh as 40 (max-samples-lead)"
    assert warning in capsys.readouterr().out


# -- introductions -------------------------------------------------------------------------------

NO_COMPLETE_RECORD = "no complete record 'site'; is the other side's ProtoFL of"


@in_place
def card_without(message: Message, reply: Message, entry: str) -> None:
    del reply.content.config_records["site"][entry]


HOSTILE_INTRODUCTIONS: list[tuple[Change, str]] = [
    (card_with(name="../../etc"), "site.name is '../../etc', not a name of ASCII letters"),
    (card_with(name=""), "site.name is ''"),
    (
        card_with(name="x" * 10**6),
        "site.name with a name that is too long or not printable (1000000 characters)",
    ),
    (
        card_with(name="\x1b[2J"),
        "site.name with a name that is too long or not printable (4 characters)",
    ),
    (card_with(partition=-1), "site.partition is -1"),
    (card_with(train_samples="30"), "site.train_samples is '30'"),
    (card_with(train_samples=2**62), "site.train_samples is 4611686018427387904"),
    (card_with(classes=[1, 2, 3]), "site.classes is [1, 2, 3], not a list of names"),
    (card_with(classes=[b"zero"]), "site.classes is [b'zero'], not a list of names"),
    (card_with(present=[0, 0]), "site.present is [0, 0]"),
    (
        card_with(present=[3, 1]),
        "site.present is [3, 1], not labels of its classes in ascending order",
    ),
    (card_with(present=[10]), "site.present is [10]"),
    (card_with(present=["0"]), "site.present is ['0']"),
    (card_with(secret=[0.5] * 64), NO_COMPLETE_RECORD),
    (card_without("found"), NO_COMPLETE_RECORD),  # as of an older version
]


def test_a_rubbish_introduction_keeps_its_site_out(tmp_path: Path) -> None:
    """With ``num-clients`` the others go on without it."""
    changes = [change for change, _ in HOSTILE_INTRODUCTIONS]
    tamper = by({HOSTILE + n: change for n, change in enumerate(changes)}, MessageType.QUERY)
    clients = len(HONEST) + len(changes)
    config = run_config(tmp_path, rounds=1, num_clients=3, **DIGITS)

    outcome = run_federation(config, clients, tamper)
    assert sorted(outcome.summary["clients"]) == sorted(HONEST)

    config |= {"num-clients": 4, "out-dir": str(tmp_path / "all")}
    with pytest.raises(FederationError) as caught:
        run_federation(config, clients, tamper)

    said = str(caught.value)
    expected = {line for _, line in HOSTILE_INTRODUCTIONS}

    for line in expected:
        assert f" cannot take part: its introduction is not valid: {line}" in said

    shape = re.compile(
        r"(1 client|site-[\d, site-]+) cannot take part: its introduction is not valid: .{,700}"
    )

    assert [bool(shape.fullmatch(line)) for line in said.splitlines()] == [True] * len(expected)


FIVE_MODELS = "cnn4,htcnn-1,htcnn-3,mnist-cnn,htcnn-2"


@pytest.mark.parametrize(
    ("algo", "claim", "line"),
    [
        ("fedavg", {"arch": "htcnn-1"}, "the sites differ in arch"),
        (
            "fedavg",
            {"input_shape": [1, 4096, 4096]},
            "the sites differ in the shape of their inputs",
        ),
        ("fedavg", {"input_shape": [7]}, "the sites differ in the shape of their inputs"),
        ("fedavg", {"weights": "0123456789abcdef"}, "the sites differ in weights"),
        ("fedproto", {"classes": ["x", "y"], "present": [0, 1]}, "the sites differ in classes"),
        ("fedproto", {"num_partitions": 7}, "the sites differ in num-partitions"),
        ("lg-fedavg", {"arch": "zzz"}, "arch is 'zzz'"),
        (
            "lg-fedavg",
            {"arch": "resnet34-imagenet-stem+fc512"},
            "its arch and input_shape do not give the weights",
        ),
        ("fedgh", {"arch": "zzz"}, "arch is 'zzz'"),
    ],
)
def test_the_first_decides_nothing(
    algo: str, claim: dict[str, Any], line: str, tmp_path: Path, capsys: Printed
) -> None:
    """Of five sites four suffice; one claims the others' digest, and another model or division.

    All architectures share their heads: only what is built from a claim shows that its digest is
    false.
    """
    models = "cnn4" if algo == "fedavg" else FIVE_MODELS
    config = run_config(tmp_path, algo=algo, rounds=1, min_clients=4, models=models, **DIGITS)

    tamper = by({1000: card_with(**claim)}, MessageType.QUERY)
    outcome = run_federation(config, nodes=real_sites(5), tamper=tamper)

    assert sorted(outcome.summary["clients"]) == ["site-1", "site-2", "site-3", "site-4"]
    assert [row["valid"] for row in outcome.rows] == [4, 4]
    assert f"site-0: {line}" in capsys.readouterr().out


def test_of_two_nodes_with_one_name_neither_takes_part(tmp_path: Path, capsys: Printed) -> None:
    """Before round 1 nobody knows which is right, nor which of three; the others go on."""
    config = run_config(tmp_path, rounds=2, min_clients=3, **DIGITS)
    nodes = real_sites(5)
    takes_name = by({1000: card_with(name="site-3")}, MessageType.QUERY)

    def third_comes(message: Message, reply: Message) -> Message | None:
        nodes[9] = nodes[1003]
        return takes_name(message, reply)

    outcome = run_federation(config, nodes=nodes, tamper=third_comes)

    assert sorted(outcome.summary["clients"]) == ["site-1", "site-2", "site-4"]

    said = capsys.readouterr().out
    assert "two clients call themselves site-3, nodes 1000 and 1003" in said

    whose = "site-3: two clients began with this name, so it is nobody's until you end one of them"
    assert f"{whose}, stop the run" in said


def test_no_site_says_how_many_must_take_part_where_data_are_their_own(tmp_path: Path) -> None:
    sites = Three(tmp_path)
    sites.nodes[3]["data-dir"] = str(tmp_path)

    outcome = sites.run(by({1: card_with(num_partitions=3)}, MessageType.QUERY))

    assert sorted(outcome.summary["clients"]) == ["east", "north"]


# -- figures that would decide for everybody -----------------------------------------------------


def test_one_site_does_not_stop_a_run_early(tmp_path: Path) -> None:
    """It validates with 100 % before the first round, and with 0 % from then on."""

    def lies(message: Message, reply: Message) -> Message:
        accuracy = 1.0 if message.metadata.group_id == "1" else 0.0
        figures = {
            "validation__head": accuracy,
            "validation__prototype": 0.0,  # FedAvg has no prototypes
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


def test_a_site_that_alone_has_validation_samples_does_not_choose_the_round(tmp_path: Path) -> None:
    """Nobody could outvote it: its figures would stop the run, and name the best round."""

    def lies(message: Message, reply: Message) -> Message:
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


def test_a_site_that_sends_no_accuracy_hides_its_own_only_and_the_others_choose_no_round(
    tmp_path: Path,
) -> None:
    """It has fewer test samples than it may tell of; the other two cannot outvote one of them."""
    hidden = {1002: ("correct.", "metrics."), 1001: ("metrics.head/auc",)}

    def hides(message: Message, reply: Message) -> Message:
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

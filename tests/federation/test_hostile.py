"""One hostile or broken client in a federation: refused with a reason, counted, and the others' run as without it."""

import re
import tracemalloc
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from safetensors.torch import load_file

from protofl_common.config.options import SettingsError
from protofl_common.wire.payloads import RAW
from server_app.network.membership import FederationError
from server_app.replies import Upload
from server_app.strategies.fedavg import FedAvg
from tests.support import attacks
from tests.support.attacks import (
    Change,
    by,
    card_with,
    extra,
    from_node,
    prototypes_with,
    raw,
    report_with,
    scaled,
)
from tests.support.declared import DECLARED
from tests.support.given import Patch, Printed
from tests.support.harness import LocalGrid, Outcome, run_config, run_federation
from tests.support.sites import Three, real_sites

HOSTILE, CLIENTS, ROUNDS = 1003, 4, 2
GIGABYTE = 2**30
Runs = Callable[[str], Outcome]
DIGITS: dict[str, Any] = {
    "dataset": "digits",
    "partition": "iid",
    "train_samples": 20,
    "test_samples": 20,
}


def federation(folder: Path, change: Change, algo: str = "fedproto", **settings: Any) -> Outcome:
    """Four clients with half of the ten digits each; the fourth one's training replies are changed."""
    small = {
        "dataset": "digits",
        "partition": "pathological",
        "classes_per_client": 5,
        "train_samples": 30,
    }
    config = run_config(folder, algo=algo, rounds=ROUNDS, test_samples=60, **small, **settings)
    return run_federation(config, CLIENTS, tamper=by({HOSTILE: change}))


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Algorithm -> the same run without the fourth client's replies."""
    return cache(lambda algo: federation(tmp_path_factory.mktemp(algo), attacks.silent, algo))


def assert_unharmed(outcome: Outcome, reference: Outcome) -> None:
    """What was learnt, and the honest clients' accuracies and losses in every round, are the same to the last bit."""
    for name in ("prototypes.safetensors", "weights.safetensors"):
        assert (outcome.folder / name).exists() == (reference.folder / name).exists()
        if (outcome.folder / name).exists():
            found, wanted = load_file(outcome.folder / name), load_file(reference.folder / name)
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    honest = [f"site-{index}" for index in range(CLIENTS - 1)]
    for row, other in zip(outcome.rows, reference.rows, strict=True):
        for site in honest:
            for what in ("accuracy", "losses"):
                assert row["clients"][site][what] == other["clients"][site][what]


def many(rows: int) -> Change:
    """So many prototypes, in proper order."""
    whole = {
        "labels": lambda _: np.zeros(rows, np.int64),
        "counts": lambda _: np.ones(rows, np.int64),
    }
    return prototypes_with(means=lambda means: np.ones((rows, means.shape[1]), np.float32), **whole)


def lacking_class(labels: np.ndarray) -> np.ndarray:
    """Its labels, the last one replaced by a class that it does not hold."""
    return np.append(labels[:-1], min(set(range(10)) - set(labels.tolist())))


huge = bytes(GIGABYTE)  # the pages of zeros are never touched: no memory
ATTACKS: dict[str, tuple[Change, str]] = {
    "wrong dimension": (prototypes_with(means=lambda m: m[:, :-1].copy()), "means: shape 5×63 instead of 5×64"),
    "wrong dtype": (prototypes_with(means=lambda m: m.astype(np.float16)), "float16 instead of"),
    "labels of another dtype": (prototypes_with(labels=lambda y: y.astype(np.int32)), "int32 instead of"),
    "a pickle": (prototypes_with(means=lambda m: Array("float32", m.shape, "pickle", b"cos\nsystem")), "pickle"),
    "label out of range": (prototypes_with(labels=lambda y: y + 10), "label outside 0..9"),
    "negative label": (prototypes_with(labels=lambda y: y - 10), "label outside 0..9"),
    "duplicate labels": (prototypes_with(labels=lambda y: y * 0 + y[0]), "with the same label, not at most 1"),
    "NaN": (prototypes_with(means=lambda m: m * np.float32(np.nan)), "prototypes means: NaN or infinity"),
    "infinity": (prototypes_with(means=lambda m: m + np.float32(np.inf)), "NaN or infinity"),
    "a million prototypes": (many(10**6), "bytes of arrays, where a valid reply has at most 2720"),
    "a million said, few sent": (prototypes_with(means=lambda m: Array("float32", (10**6, 64), RAW, m.tobytes())),
        "1000000 prototypes, not from 1 to 10"),
    "a shape with a truth value": (prototypes_with(means=lambda m: Array("float32", (len(m), True * 64, True), RAW,
        m.tobytes())), "a shape of other things"),
    "a gigabyte in the prototypes": (prototypes_with(means=lambda m: Array("float32", m.shape, RAW, huge)),
        "bytes of arrays, where a valid reply"),
    "a gigabyte beside them": (extra("more", ArrayRecord({"x": Array("float32", (GIGABYTE // 4,), RAW, huge)})),
        "bytes of arrays, where a valid reply"),
    "a class it does not hold": (prototypes_with(labels=lacking_class), "did not declare when it joined"),
    "labels flipped to others' classes": (attacks.flipped(10), "did not declare when it joined"),
    "scaled by 10^6": (scaled(1e6), "(max-prototype-norm)"),
    "scaled by 2000": (scaled(2000), "times the round's median"),  # an absolute limit lets short ones grow by 10^6
    "a count below 1": (prototypes_with(counts=lambda n: n * 0), "count below 1"),
    "inflated counts": (prototypes_with(counts=lambda n: n + 2**62), "but it has 30 for training"),
    "inflated samples": (report_with(train_samples=10**12), "train_samples = 1000000000000, but it joined with 30"),
    "no samples": (report_with(train_samples=0), "without training samples"),
    "too many correct": (report_with(correct__head=10**6), "more correct predictions than test samples"),
    "endless loss": (report_with(losses__total=float("nan")), "not a finite number"),
    "an undeclared number": (report_with(losses__feature=0.5), "odd entry losses.feature"),
    "an undeclared text": (extra("note", ConfigRecord({"x": "y" * 10**6})), "records other than a report"),
    "a reply with a record more": (extra("more", MetricRecord({"x": 1})), "records other than a report"),
    "a replayed reply": (attacks.replayed(), "a reply to round 1 in round"),
    "nothing in it": (lambda message, _: from_node(message, Message(RecordDict(), reply_to=message)), "records other"),
    "weights": (extra("weights", ArrayRecord({"w": raw(np.zeros(3, np.float32))})), "undeclared array record"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_reply_is_refused_counted_and_harmless(
    attack: str, tmp_path: Path, without: Runs
) -> None:
    """A gigabyte is refused before anything of it is copied."""
    change, said = ATTACKS[attack]
    if attack == "a gigabyte in the prototypes":
        tracemalloc.start()
    outcome = federation(tmp_path, change)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    rounds = outcome.rows[1:ROUNDS] if attack == "a replayed reply" else outcome.rows[:ROUNDS]
    for row in rounds:
        assert list(row["refused"]) == ["site-3"]
        assert said in row["refused"]["site-3"]
        assert len(row["refused"]["site-3"]) < 600
    assert outcome.summary["trouble"]["refused"] == len(rounds)
    if attack != "a replayed reply":  # whose first reply was honest
        assert_unharmed(outcome, without("fedproto"))


@pytest.mark.parametrize("figure", [{"correct__head": 60}, {"metrics__head/auc": 1.0}])
def test_a_round_without_an_evaluation_has_no_figures_of_one(
    figure: dict[str, Any], tmp_path: Path
) -> None:
    """They would be those of the round, for nobody else has any."""
    outcome = federation(tmp_path, report_with(**figure), evaluate_every=2, metrics="auc")
    assert outcome.rows[0]["accuracy"]
    assert not outcome.rows[1]["accuracy"]
    assert not outcome.rows[1].get("metrics")
    assert "a round without one (evaluate-every)" in outcome.rows[1]["refused"]["site-3"]


@pytest.mark.parametrize("algo", [algo for algo, declared in DECLARED.items() if declared.records])
def test_the_same_holds_for_other_algorithms(algo: str, tmp_path: Path, without: Runs) -> None:
    """NaN in the first round, and in the second what is too long."""
    rarely = not DECLARED[algo].prototypes or algo == "protofed"  # only in its last round
    entry = "weights" if DECLARED[algo].weights else next(iter(DECLARED[algo].beside), "")

    def change(message: Message, reply: Message) -> Message:
        factor = float("nan") if message.metadata.group_id == "1" else 1e6
        lie = (
            attacks.weights_scaled(factor, entry)
            if rarely
            else scaled(factor, DECLARED[algo].record)
        )
        return lie(message, reply)

    outcome = federation(tmp_path, change, algo)
    assert outcome.summary["trouble"]["refused"] == ROUNDS
    assert_unharmed(outcome, without(algo))


def test_a_negative_variance_is_refused(tmp_path: Path) -> None:
    """It is of the usual norm, and would make every honest client's next features NaN."""

    def change(message: Message, reply: Message) -> Message:
        for name, array in reply.content.array_records["weights"].items():
            if name.endswith("running_var"):
                array.data = (-30 * attacks.values_of(array)).astype("<f4").tobytes()
        return from_node(message, reply)

    outcome = federation(tmp_path, change, "fedavg", models="resnet4-imagenet-stem")
    for row in outcome.rows[:ROUNDS]:
        assert list(row["refused"]) == ["site-3"]
        assert row["refused"]["site-3"].endswith("running_var: below 0")
    assert outcome.rows[-1]["valid"] == CLIENTS


def overflow(server: FedAvg[Any]) -> None:
    server.weights = {name: value * float("inf") for name, value in server.weights.items()}


NO_INT = RuntimeError("value cannot be converted to type int64_t without overflow")


@pytest.mark.parametrize("happens", [overflow, MagicMock(side_effect=NO_INT)])
def test_a_server_step_that_fails_costs_sites_a_round(
    happens: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    """An error ends a simulation; a round that would leave NaN is void there as well."""
    honest = FedAvg.merge

    def merge(self: FedAvg[Any], uploads: list[Upload]) -> dict[str, float]:
        found = honest(self, uploads)
        if uploads[0].report.round == 2:
            happens(self)
        return found

    monkeypatch.setattr(FedAvg, "merge", merge)
    config = run_config(tmp_path, algo="fedavg", **DIGITS | {"rounds": 3, "models": "htcnn-1"})
    outcome = run_federation(config, nodes=real_sites(3))
    assert [row["void"] for row in outcome.rows] == [False, True, False, False]
    assert all(
        torch.isfinite(value).all()
        for value in load_file(outcome.folder / "weights.safetensors").values()
    )
    downs = [message.content["weights"] for message, _ in outcome.exchanged()]
    assert [array.data for array in downs[3].values()] == [
        array.data for array in downs[6].values()
    ]  # rounds 2 and 3
    simulated = config | {"out-dir": str(tmp_path / "simulated")}
    if happens is overflow:
        assert [row["void"] for row in run_federation(simulated, clients=2).rows] == [
            False,
            True,
            False,
            False,
        ]
        return
    assert outcome.rows[1]["void-because"].startswith(
        "the server's step failed: RuntimeError: value cannot be"
    )
    with pytest.raises(RuntimeError, match="without overflow"):
        run_federation(simulated, clients=2)


def test_a_claim_of_samples_owns_no_mean(tmp_path: Path, capsys: Printed) -> None:
    """Ten to the fifteen samples weigh as much as one client's share of 30, where the setting says so."""
    small = {"dataset": "digits", "partition": "iid", "train_samples": 30, "rounds": 1}
    configs = {
        n: run_config(tmp_path / str(n), max_samples_ratio=1.0, **small) for n in (30, 10**15)
    }
    outcomes = [
        run_federation(config, CLIENTS, tamper=attacks.claims(n)) for n, config in configs.items()
    ]
    said = capsys.readouterr().out
    assert (
        said.count("warning: site-3: 1e+15 training samples weigh as 30 (max-samples-ratio)") == 1
    )
    assert "shares of the training samples: site-3 100.0 %, site-0 0.0 %" in said
    honest, hostile = (
        load_file(outcome.folder / "prototypes.safetensors")["means"] for outcome in outcomes
    )
    assert torch.allclose(honest, hostile)


def test_a_late_claim_is_bounded_too(tmp_path: Path, capsys: Printed) -> None:
    nodes = real_sites(CLIENTS)
    late = nodes.pop(HOSTILE)

    def joins(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "1":
            nodes.setdefault(HOSTILE, late)
        return attacks.claims(10**12)(message, reply) or reply

    run_federation(
        run_config(tmp_path, algo="fedproto", num_clients=3, **DIGITS), nodes=nodes, tamper=joins
    )
    assert (
        "warning: site-3: 1e+12 training samples weigh as 40 (max-samples-lead)"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.QUERY])
def test_what_flower_cannot_read_harms_nobody(
    kind: str, tmp_path: Path, without: Runs, monkeypatch: Patch
) -> None:
    """A shape of words passes Flower's encoder; its decoder, inside ``pull_messages``, raises a TypeError."""
    pull = LocalGrid.pull_messages

    def decoding(self: LocalGrid, message_ids: Iterable[str]) -> list[Message]:
        replies = pull(self, message_ids)
        for reply in replies:
            for record in () if reply.has_error() else reply.content.array_records.values():
                for array in record.values():
                    Array.inflate(array.deflate(), dict(array.children))
        return replies

    def garbled(message: Message, reply: Message) -> Message:
        record = ArrayRecord({"x": raw(np.zeros(3, np.float32))})
        record["x"].shape = ("5", "64")  # type: ignore[assignment]
        return extra("more", record)(message, reply)

    monkeypatch.setattr(LocalGrid, "pull_messages", decoding)
    if kind == MessageType.TRAIN:
        outcome = federation(tmp_path, garbled)
        assert all(
            "a reply that Flower cannot read" in row["failed"]["site-3"]
            for row in outcome.rows[:ROUNDS]
        )
        assert_unharmed(outcome, without("fedproto"))
        return
    config = run_config(tmp_path, rounds=1, num_clients=3, **DIGITS)
    outcome = run_federation(config, CLIENTS, tamper=by({HOSTILE: garbled}, kind))
    assert sorted(outcome.summary["clients"]) == ["site-0", "site-1", "site-2"]


def test_what_is_written_down_is_short_and_plain_json(tmp_path: Path) -> None:
    """An error with a long reason in the first round, huge figures in the second."""

    def change(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "1":
            return from_node(message, Message(Error(2, "\x1b[2J" + "x" * 10**6), reply_to=message))
        return report_with(losses__total=1e30, seconds__train=1e30)(message, reply)

    outcome = federation(tmp_path, change)
    reason = outcome.rows[0]["failed"]["site-3"]
    assert reason.startswith("\\x1b[2Jxxx")
    assert reason.endswith("(1000004 characters)")
    assert len(reason) < 600
    text = (outcome.folder / "metrics.jsonl").read_text() + (
        outcome.folder / "summary.json"
    ).read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert outcome.summary["trouble"] == {"failed": 1, "refused": 0, "missing": 0, "late": 0}


def test_a_rubbish_final_evaluation_is_refused(tmp_path: Path) -> None:
    counts = extra("label_counts", ArrayRecord({"counts": raw(np.zeros(0, np.int64))}))
    rubbish = by(
        {1002: counts, HOSTILE: report_with(losses__total=1.0, train_samples=0)},
        MessageType.EVALUATE,
    )
    outcome = run_federation(run_config(tmp_path, rounds=1, **DIGITS), CLIENTS, tamper=rubbish)
    assert outcome.rows[-1]["refused"] == {"site-2": "an undeclared array record 'label_counts'",
        "site-3": "a report with the odd entry losses.total = 1.0"}  # fmt: skip
    assert set(outcome.summary["accuracy-of-clients"]) == {"site-0", "site-1"}


RUBBISH: list[tuple[str, Any]] = [("name", "../../etc"), ("name", ""), ("name", "x" * 10**6), ("name", "\x1b[2J"),
    ("partition", -1), ("train_samples", "30"), ("train_samples", 2**62), ("classes", [1, 2, 3]),
    ("classes", [b"zero"]), ("present", [0, 0]), ("present", [3, 1]), ("present", [10]), ("present", ["0"]),
    ("secret", [0.5] * 64)]  # fmt: skip


def test_a_rubbish_introduction_keeps_its_site_out(tmp_path: Path) -> None:
    """With ``num-clients`` the others go on without it."""
    tamper = by(
        {1003 + n: card_with(**{key: value}) for n, (key, value) in enumerate(RUBBISH)},
        MessageType.QUERY,
    )
    config = run_config(tmp_path, rounds=1, num_clients=3, **DIGITS)
    assert sorted(run_federation(config, 3 + len(RUBBISH), tamper).summary["clients"]) == [
        "site-0",
        "site-1",
        "site-2",
    ]
    with pytest.raises(FederationError) as caught:
        run_federation(
            config | {"num-clients": 4, "out-dir": str(tmp_path / "all")}, 3 + len(RUBBISH), tamper
        )
    said = re.compile(r"(1 client|site-\d+) cannot take part: an introduction with .{,700}")
    assert [bool(said.fullmatch(line)) for line in str(caught.value).splitlines()] == [True] * len(
        RUBBISH
    )


@pytest.mark.parametrize(("algo", "claim", "why"), [
    ("fedavg", {"arch": "htcnn-1"}, "the sites differ in arch"),
    ("fedavg", {"input_shape": [1, 4096, 4096]}, "the sites differ in the shape of their inputs"),
    ("fedavg", {"input_shape": [7]}, "the sites differ in the shape of their inputs"),
    ("fedavg", {"weights": "0123456789abcdef"}, "the sites differ in weights"),
    ("fedproto", {"classes": ["x", "y"], "present": [0, 1]}, "the sites differ in classes"),
    ("fedproto", {"num_partitions": 7}, "the sites differ in num-partitions"),
    ("lg-fedavg", {"arch": "zzz"}, "arch is 'zzz'"),
    ("lg-fedavg", {"arch": "resnet34-imagenet-stem+fc512"}, "its arch and input_shape do not give the weights"),
    ("fedgh", {"arch": "zzz"}, "arch is 'zzz'"),
])  # fmt: skip
def test_the_first_decides_nothing(
    algo: str, claim: dict[str, Any], why: str, tmp_path: Path, capsys: Printed
) -> None:
    """Of five sites four suffice. Its introduction claims the others' digest, and another model or division.

    Heads are shared by all architectures: only what is built from the claim shows that its digest is false.
    """
    models = (
        {"models": "cnn4"}
        if algo == "fedavg"
        else {"models": "cnn4,htcnn-1,htcnn-3,mnist-cnn,htcnn-2"}
    )
    config = run_config(tmp_path, algo=algo, rounds=1, min_clients=4, **DIGITS | models)
    outcome = run_federation(
        config, nodes=real_sites(5), tamper=by({1000: card_with(**claim)}, MessageType.QUERY)
    )
    assert sorted(outcome.summary["clients"]) == [f"site-{n}" for n in range(1, 5)]
    assert [row["valid"] for row in outcome.rows] == [4, 4]
    assert f"site-0: {why}" in capsys.readouterr().out


def test_of_two_nodes_with_one_name_neither_takes_part(tmp_path: Path, capsys: Printed) -> None:
    """Before round 1 nobody knows which is right, nor which of three; the others go on, and the message names them."""
    config, nodes = run_config(tmp_path, rounds=2, min_clients=3, **DIGITS), real_sites(5)
    taken = by({1000: card_with(name="site-3")}, MessageType.QUERY)

    def third_comes(message: Message, reply: Message) -> Message | None:
        nodes[9] = nodes[1003]
        return taken(message, reply)

    outcome = run_federation(config, nodes=nodes, tamper=third_comes)
    assert sorted(outcome.summary["clients"]) == ["site-1", "site-2", "site-4"]
    said = capsys.readouterr().out
    assert "two clients call themselves site-3, nodes 1000 and 1003" in said
    assert (
        "site-3: two clients began with this name, so it is nobody's until you end one of them, stop the run"
        in said
    )


def test_no_site_says_how_many_must_take_part_where_data_are_their_own(tmp_path: Path) -> None:
    (sites := Three(tmp_path)).nodes[3]["data-dir"] = str(tmp_path)
    outcome = sites.run(tamper=by({1: card_with(num_partitions=3)}, MessageType.QUERY))
    assert sorted(outcome.summary["clients"]) == ["east", "north"]


def test_one_site_does_not_stop_a_run_early(tmp_path: Path) -> None:
    """It validates with 100 % before the first round, and with 0 % from then on; FedAvg has no prototypes."""

    def lies(message: Message, reply: Message) -> Message:
        right = {
            "validation__head": 1.0 if message.metadata.group_id == "1" else 0.0,
            "validation__prototype": 0.0,
        }
        return report_with(correct__prototype=20, **right)(message, reply)

    more = {
        "train_samples": 60,
        "validation_fraction": 0.3,
        "early_stopping": 2,
        "rounds": 6,
        "lr": 0.1,
    }
    config = run_config(tmp_path, algo="fedavg", models="htcnn-1", **DIGITS | more)
    outcome = run_federation(config, nodes=real_sites(5), tamper=by({1004: lies}))
    assert outcome.summary["rounds"] == 6
    assert all("trimmed" in row["validation"]["head"] for row in outcome.rows)
    assert all(list(row["accuracy"]) == ["head"] for row in outcome.rows)


def test_a_site_that_alone_has_validation_samples_does_not_choose_the_round(tmp_path: Path) -> None:
    """Nobody could outvote it: its figures would stop the run, and name the best round."""

    def lies(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id != 1004:
            return reply
        if message.metadata.message_type == MessageType.QUERY:
            return card_with(validation_samples=9)(message, reply)
        first = message.metadata.group_id == "1"
        return report_with(validation_samples=9, validation__head=1.0 if first else 0.0)(
            message, reply
        )

    config = run_config(tmp_path, algo="fedavg", models="htcnn-1", rounds=2, **DIGITS)
    outcome = run_federation(config, nodes=real_sites(5), tamper=lies)
    assert outcome.summary["best-accuracy"]["head"]["chosen-on"] == "test"
    with pytest.raises(
        SettingsError,
        match="early-stopping = 2: 1 of 5 clients has validation samples, too few for",
    ):
        run_federation(
            config | {"early-stopping": 2, "run-name": "stopping"}, nodes=real_sites(5), tamper=lies
        )


def test_a_site_that_sends_no_accuracy_hides_its_own_only_and_the_others_choose_no_round(
    tmp_path: Path,
) -> None:
    """It has fewer test samples than ``min-class-samples`` lets it tell of; two cannot outvote one of them."""

    def sends_none(message: Message, reply: Message) -> Message:
        report = reply.content.metric_records.get("report", {})
        hidden = {1002: ("correct.", "metrics."), 1001: ("metrics.head/auc",)}.get(
            message.metadata.dst_node_id, ()
        )
        for name in [name for name in report if name.startswith(hidden)]:
            del report[name]
        return reply

    config = run_config(
        tmp_path, algo="fedavg", models="htcnn-1", rounds=2, metrics="auc,macro-f1", **DIGITS
    )
    outcome = run_federation(config, nodes=real_sites(3), tamper=sends_none)
    for row in outcome.rows:
        shares = [row["clients"][site]["accuracy"]["head"] for site in ("site-0", "site-1")]
        assert row["accuracy"]["head"]["mean"] == pytest.approx(np.mean(shares))
        assert "trimmed" not in row["accuracy"]["head"]
    assert outcome.summary["best-accuracy"] == {}
    assert (
        "no accuracy of site-2 (too few test samples): the others' alone are in the means"
        in str(outcome.summary)
    )
    assert "no auc of site-1 (too few test samples of each class" in str(outcome.summary)

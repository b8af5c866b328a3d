"""Federations under differential privacy: what is sent, what it costs, and where the account stands."""

import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor
from torch.nn import functional

from client_app import training
from client_app.algorithms.base import Batch, ClientAlgorithm, LossTerms, client_half
from client_app.algorithms.fedavg import FedAvg
from client_app.algorithms.fedproto import FedProto
from client_app.app import app as client_app
from client_app.client import Client
from client_app.ledger_audit import lacking
from client_app.protections.differential_privacy import DifferentialPrivacy
from client_app.protections.private_step import PrivateStep
from client_app.training import Step, make_optimizer
from protofl_common.basics.files import digest
from protofl_common.basics.run_history import RunHistory
from protofl_common.config.options import SettingsError
from protofl_common.config.sections import protections
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.prototypes import Prototypes, class_means
from protofl_common.models.split import SplitModel
from protofl_common.models.trained import TrainedModel
from protofl_common.privacy.plan import Mechanism, epsilon
from protofl_common.report.charts import spent as spent_on_page
from protofl_common.report.reading import RecordedRun
from protofl_common.runs.folder import WEIGHTS
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Instructions, pack_instructions
from protofl_common.wire.schema import Counts
from server_app.callbacks.stopping import Budget, epsilon_spent
from server_app.network.membership import FederationError
from tests.support.accidents import Killed, on_message
from tests.support.attacks import values_of
from tests.support.given import Patch, Printed
from tests.support.harness import (
    Outcome,
    client_of,
    refusal,
    rows_without_a_reply,
    run_config,
    run_federation,
)
from tests.support.pages import drawn
from tests.support.sites import named, real_sites

TABLE: dict[str, Any] = {
    "dataset": "breast-cancer",
    "models": "mlp-1",
    "partition": "iid",
    "feature_dim": 8,
}
SMALL = TABLE | {
    "train_samples": 20,
    "test_samples": 10,
    "batch_size": 10,
    "dp": "sample",
    "norm": "group",
}
COVERED = [algo for algo, row in CATALOG.items() if set(row.exchange.up) <= set(row.private)]
BEHIND = {"dataset": "digits", "backbones": "glyphs"}
FROZEN = {"fedpcl": BEHIND, "gaussian": BEHIND}


def private(folder: Path, algo: str, clients: int = 2, **changes: Any) -> Outcome:
    small = SMALL | {"fedgen__server_steps": 2, "fedsa__contrast": 0.0} | FROZEN.get(algo, {})
    return run_federation(run_config(folder, algo=algo, **small | changes), clients)


def test_what_is_fitted_on_a_clients_samples_is_refused_or_left_out_under_differential_privacy(
    tmp_path: Path,
) -> None:
    for key, value in (("impute", "mean"), ("standardise", "client"), ("standardise", "pooled")):
        said = refusal(run_config(tmp_path, **SMALL, **{key: value}))
        assert re.match(f"dp = 'sample': {key} = '{value}'.* made of all samples", said)
    for dp in ("none", "sample"):
        first, second = (
            client_of(run_config(tmp_path, **SMALL | {"dp": dp}), i, 2).data.mean for i in range(2)
        )
        assert (first == second) == (dp == "sample")


def compared(
    step: PrivateStep, weights: dict[str, Tensor], samples: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """What `of_each` finds, after the first sample's has been compared with what `backward` finds for it alone."""
    found = of_each(step, weights, samples)
    step.gradients(step.terms(step.model, *(one[:1] for one in samples)))
    for name, one in weights.items():
        alone = torch.zeros_like(one) if one.grad is None else one.grad
        torch.testing.assert_close(
            found[name][0], alone, rtol=1e-5, atol=1e-5
        )  # float32: sums in another order
    return found


of_each = PrivateStep._of_each


@pytest.mark.parametrize("algo", COVERED)
def test_an_algorithm_takes_the_steps_and_tables_of_its_plan(
    algo: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """As often as each client's ledger was charged, and no class means without noise."""
    taken, tables = list[str](), list[str]()
    one_step, one_table = PrivateStep.__call__, DifferentialPrivacy._table_noise

    def step(self: PrivateStep, *batch: Tensor) -> Any:
        taken.append("step")
        return one_step(self, *batch)

    def table(self: DifferentialPrivacy) -> float:
        tables.append("table")
        return one_table(self)

    monkeypatch.setattr(PrivateStep, "__call__", step)
    monkeypatch.setattr(DifferentialPrivacy, "_table_noise", table)
    monkeypatch.setattr("client_app.protections.differential_privacy.class_means", None)
    draw = np.random.default_rng(
        0
    )  # rarely, noise makes gradients so large that float32's rounding passes the bound
    for module in ("differential_privacy", "private_step"):
        monkeypatch.setattr(f"client_app.protections.{module}.fresh_draw", lambda: draw)
    if algo != "fedgen":  # whose loss draws samples anew
        monkeypatch.setattr(PrivateStep, "_of_each", compared)
    outcome = private(tmp_path, algo, rounds=2, evaluate_every=2)
    plan = Settings.from_run_config(outcome.grid.run_config).plan(20)
    assert (len(taken), len(tables)) == (2 * 2 * plan.steps, 2 * sum(plan.tables))
    assert not any(outcome.summary["trouble"].values())
    assert 7.7 < outcome.summary["epsilon"] == outcome.rows[-1]["epsilon"] <= 8
    for message, reply in outcome.grid.log:
        if message.metadata.message_type == MessageType.TRAIN:
            assert not [
                name for name in reply.content["report"] if name.startswith(("losses", "seconds"))
            ]
        if message.metadata.message_type == MessageType.QUERY:
            every = list(range(len(reply.content["site"]["classes"])))
            assert list(reply.content["site"]["present"]) == (
                every if CATALOG[algo].tells_classes else []
            )


def test_which_algorithms_it_covers_is_written_here_and_others_are_refused_by_name() -> None:
    """Whose upload is more than weights that DP-SGD alone has trained, and tables of classes; Ditto trains twice."""
    not_covered = {
        "fedplvm",
        "mpft",
        "feddistill",
        "fedfa",
        "fedrep",
        "per-fedavg",
        "ditto",
        "pfedme",
    }
    assert set(COVERED) == CATALOG.keys() - not_covered
    assert all(set(row.private) <= set(row.exchange.up) for row in CATALOG.values())
    for algo in not_covered:
        sent = ", ".join(CATALOG[algo].exchange.up)
        said = (
            f"dp = 'sample': {algo} sends {sent}, which it does not cover; choose among local, fed"
        )
        assert said in refusal({"algo": algo, "dp": "sample"})


def test_a_new_entry_of_an_upload_is_refused_until_its_row_covers_it(monkeypatch: Patch) -> None:
    row = CATALOG["fedavg"]
    more = replace(row, exchange=replace(row.exchange, up={**row.exchange.up, "sizes": Counts()}))
    monkeypatch.setattr(
        "protofl_common.experiment.settings.algorithm_named", {"fedavg": more}.__getitem__
    )
    assert "dp = 'sample': fedavg sends sizes, which it does not cover" in refusal(
        {"algo": "fedavg", "dp": "sample"}
    )


class PlainStep(FedAvg[Any]):
    """Trains by steps of its own, as the newest algorithm might."""

    def fit(self) -> dict[str, float]:
        return self.train(Step(self.modules, self.optimizer, self.labelled_loss))


class PlainLoop(FedAvg[Any]):
    def fit(self) -> dict[str, float]:
        with torch.no_grad():
            for weight in self.model.parameters():
                weight += self.client.train_set.in_memory.mean()
        return {}


class Twice(FedAvg[Any]):
    def fit(self) -> dict[str, float]:
        self.train(self.step())
        return self.train(self.step(), purpose="again")


class ThreeEpochs(FedAvg[Any]):
    """Makes more private steps than a round's, in one loop."""

    def fit(self) -> dict[str, float]:
        return self.train(self.step(), epochs=3)


class TwoTables(FedProto):
    def upload(self) -> Payload:
        self.local_prototypes()
        return super().upload()


class NoTable(FedProto):
    """Sends what it was sent, or nothing, and makes no table, which the ledger was charged for."""

    def upload(self) -> Payload:
        return Payload(prototypes=self.global_prototypes)


def trained_beside(half: ClientAlgorithm[Any], model: SplitModel) -> None:
    """Train by plain steps, in a loop that no base knows of."""
    optimizer = make_optimizer([model], half.training)
    training.train(Step([model], optimizer, half.loss), half.training_set, half.training, seed=1)


class PlainBefore(FedAvg[Any]):
    def fit(self) -> dict[str, float]:
        trained_beside(self, self.model)
        return super().fit()


class PlainAfter(FedAvg[Any]):
    def fit(self) -> dict[str, float]:
        losses = super().fit()
        trained_beside(self, self.model)
        return losses


class PlainBeforeTheTable(FedProto):
    """Nothing noisy covers features of a model that single samples have shaped."""

    def upload(self) -> Payload:
        trained_beside(self, self.model)
        return super().upload()


class PlainTeacher(FedAvg[Any]):
    """Learns from a model of its own, which never leaves, but was trained without noise."""

    def __init__(self, client: Client, round_number: int) -> None:
        super().__init__(client, round_number)
        self.teacher = deepcopy(self.model)

    def fit(self) -> dict[str, float]:
        trained_beside(self, self.teacher)
        return super().fit()

    def loss(self, batch: Batch) -> LossTerms:
        with torch.no_grad():
            wanted_BC = self.teacher(batch.inputs).softmax(1)
        return {"cross-entropy": functional.cross_entropy(batch.logits, wanted_BC)}


class ASecondLoop(FedAvg[Any]):
    """Private steps, but more of them than were charged, in a loop that no base knows of."""

    def fit(self) -> dict[str, float]:
        training.train(self.step(), self.training_set, self.training, seed=1)
        return super().fit()


UNPAID = [PlainStep, PlainLoop, Twice, ThreeEpochs, TwoTables, NoTable]
UNPAID += [PlainBefore, PlainAfter, PlainBeforeTheTable, PlainTeacher, ASecondLoop]


@pytest.mark.parametrize("half", UNPAID)
def test_a_covered_row_pays_for_no_more(
    half: type[ClientAlgorithm[Any]], tmp_path: Path, monkeypatch: Patch
) -> None:
    algo = "fedproto" if issubclass(half, FedProto) else "fedavg"
    row = replace(CATALOG[algo], client=f"{half.__module__}:{half.__name__}")
    monkeypatch.setattr(
        "protofl_common.experiment.settings.algorithm_named", {algo: row}.__getitem__
    )
    (result,) = rows_without_a_reply(run_config(tmp_path, algo=algo, **SMALL | {"rounds": 1}), 2)
    does = "sends weights" if half is PlainAfter else "makes use of training data"
    assert f"dp = 'sample': {algo} {does} that the privacy ledger does not cover" in str(result)


def exact_in_place_of_noisy(monkeypatch: Patch, pays: bool) -> None:
    """Make every table exact; with ``pays`` a noisy one as well, so that their number is right."""
    noisy = {
        name: getattr(DifferentialPrivacy, name)
        for name in ("class_means", "class_counts", "measure")
    }

    def means(self: DifferentialPrivacy, features_ND: Tensor, labels_N: Tensor) -> Prototypes:
        if pays:
            noisy["class_means"](self, features_ND, labels_N)
        return class_means(features_ND, labels_N, self.client.num_classes)

    def counts(self: DifferentialPrivacy, labels_N: Tensor) -> Tensor:
        if pays:
            noisy["class_counts"](self, labels_N)
        return labels_N.bincount(minlength=self.client.num_classes)

    def measure(
        self: DifferentialPrivacy, moments: ClassMoments, features_NF: Tensor, labels_N: Tensor
    ) -> None:
        if pays:
            noisy["measure"](self, moments, features_NF, labels_N)
        moments.measure(features_NF, labels_N)

    monkeypatch.setattr(DifferentialPrivacy, "class_means", means)
    monkeypatch.setattr(DifferentialPrivacy, "class_counts", counts)
    monkeypatch.setattr(DifferentialPrivacy, "measure", measure)


TABLES = {
    algo: name
    for algo in COVERED
    for name, entry in CATALOG[algo].exchange.up.items()
    if entry.of_classes
}


@pytest.mark.parametrize("pays", [False, True])
@pytest.mark.parametrize("algo", TABLES)
def test_an_exact_table_in_the_place_of_a_noisy_one_is_refused_by_name(
    algo: str, pays: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The private table of every row; the honest ones run in the test of steps and tables above."""
    draw = np.random.default_rng(0)  # counts of few classes with noise may by chance be the exact
    monkeypatch.setattr("client_app.protections.differential_privacy.fresh_draw", lambda: draw)
    exact_in_place_of_noisy(monkeypatch, pays)
    of_ten_classes = BEHIND if algo == "fedgen" else FROZEN.get(algo, {})
    small = SMALL | {"fedsa__contrast": 0.0, "rounds": 1} | of_ten_classes
    rows = rows_without_a_reply(run_config(tmp_path, algo=algo, **small), 2)
    reasons = [why for row in rows for why in row["failed"].values()]
    assert reasons
    said = f"dp = 'sample': {algo} sends {TABLES[algo]} that the privacy ledger does not cover"
    assert all(said in why for why in reasons)


@pytest.mark.parametrize("what", ["counts", "one number of a mean", "weights"])
def test_no_number_of_what_is_released_can_be_changed(
    what: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    honest = ClientAlgorithm.upload

    def upload(self: ClientAlgorithm[Any]) -> Payload:
        sent = honest(self)
        prototypes = sent.vectors()
        assert prototypes is not None
        if what == "counts":
            sent.entries["prototypes"] = replace(prototypes, counts=prototypes.counts + 1)
        elif what == "weights":
            sent.entries["weights"] = {
                name: value + self.client.train_set.in_memory.mean()
                for name, value in self.weights().items()
            }
        else:
            prototypes.means[0, 0] += self.client.train_set.in_memory.mean()
        return sent

    monkeypatch.setattr(ClientAlgorithm, "upload", upload)
    config = run_config(tmp_path, algo="fedproto-avg", **SMALL | {"rounds": 1})
    (row,) = rows_without_a_reply(config, 2)
    entry = "weights" if what == "weights" else "prototypes"
    said = f"fedproto-avg sends {entry} that the privacy ledger does not cover"
    assert all(said in why for why in row["failed"].values())


@pytest.mark.parametrize("figures", ["correct", "validation", "metrics"])
def test_figures_without_noise_are_refused(
    figures: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Whatever puts them into a report beside the evaluations that have passed the protection."""
    pack = DifferentialPrivacy.report
    exact = {"correct": {"head": 7}, "validation": {"head": 0.7}, "metrics": {"head/auc": 0.7}}
    monkeypatch.setattr(
        DifferentialPrivacy,
        "report",
        lambda self, report: pack(self, replace(report, **{figures: exact[figures]})),
    )
    config = run_config(tmp_path, algo="local", **SMALL | {"rounds": 1, "validation_fraction": 0.3})
    (row,) = rows_without_a_reply(config, 2)
    assert "the privacy ledger does not cover" in str(row["failed"])


@pytest.mark.parametrize(("changes", "said"), [
    ({"algo": "fedpcl", "fedpcl__loss": "supcon"}, "fedpcl.loss = 'supcon' compares samples"),
    ({"algo": "gaussian", "gaussian__priors": "personal"}, "gaussian.priors = 'personal': the client's own class"),
    ({"algo": "gaussian", "min_class_samples": 5}, "min-class-samples = 5: gaussian sends sums over all classes"),
    ({"positive_rate": 0.5}, "positive-rate = 0.5: terms of unlabelled samples compare samples"),
    ({"local_steps": 5}, "local-steps = 5: the privacy ledger counts epochs; set 0"),
    ({"metrics": "auc"}, "metrics = 'auc': only numbers of right predictions have noise"),
    ({"predict_among": "own"}, "predict-among = 'own': predictions would show which classes a client has"),
    ({"baselines": "local"}, "baselines = 'local': each baseline would spend ε once more on the same samples"),
    ({"gradient_noise": 4.0}, "gradient-noise = 4.0: the noise follows from dp-epsilon"),
    ({"dp_clip": 1e-9}, "dp-clip = 1e-09: must be a number at least 1e-06 and at most 1e"),
    ({"dp_feature_clip": 1e-307}, "dp-feature-clip = 1e-307: must be a number at least 1e-06"),
    ({"dp_feature_clip": 1e7}, "dp-feature-clip = 10000000.0: must be a number at least 1e-06"),
    ({"dp": "none", "dp_epsilon": 1.0}, "dp-epsilon = 1.0: nothing is private with dp = 'none'; set dp = 'sample'"),
])  # fmt: skip
def test_what_it_cannot_hold_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(run_config(tmp_path, **{"dp": "sample"} | changes))


def test_what_only_a_run_shows_is_refused_before_any_client_trains(tmp_path: Path) -> None:
    """Batch normalisation when a client introduces itself, and an ε too small for any noise."""
    with pytest.raises(
        FederationError, match="2 clients cannot take part: norm = 'batch': this network has batch"
    ):
        private(tmp_path, "fedpcl", norm="batch")
    grids = list[Any]()
    with pytest.raises(SettingsError, match=r"dp-epsilon = 0\.001: no noise is large enough"):
        run_federation(
            run_config(tmp_path, **SMALL | {"dp_epsilon": 0.001}), 2, on_grid=grids.append
        )
    assert not [sent for sent, _ in grids[0].log if sent.metadata.message_type == MessageType.TRAIN]


def test_the_noise_of_a_paper_on_gradients_is_dp_sgd_and_is_called_no_protection(
    tmp_path: Path,
) -> None:
    """FedPLVM, Table 11."""
    site = client_of(
        run_config(tmp_path, **SMALL | {"algo": "fedplvm", "dp": "none", "gradient_noise": 4.0}),
        0,
        2,
    )
    step = client_half(site.settings.row)(site, 1).step()
    assert isinstance(step, PrivateStep)
    assert site.plan is None
    assert 3.9 < step.plan.epsilon(2) <= 4
    outcome = private(
        tmp_path,
        "fedplvm",
        dp="none",
        gradient_noise=4.0,
        prototype_noise="gaussian 0.05 0.1",
        rounds=1,
    )
    assert "epsilon" not in outcome.summary
    assert not protections(outcome.summary["settings"])


def test_a_run_spends_its_epsilon_and_says_so(tmp_path: Path) -> None:
    outcome, other = (
        private(tmp_path / name, "fedproto", rounds=3, evaluate_every=2) for name in "ab"
    )
    sent = [one.grid.log[2][1].content["prototypes"]["means"].data for one in (outcome, other)]
    assert sent[0] != sent[1]
    spent = [row["epsilon"] for row in outcome.rows]
    assert outcome.summary["rounds"] == 3
    assert spent == sorted(spent)
    assert 7.7 < spent[-1] <= 8
    (figure,) = spent_on_page(RecordedRun(outcome.folder))
    assert "ε of the client that the run costs most" in figure
    assert "<path" in figure
    *_, lines, _, _ = drawn(spent_on_page, outcome.folder, "line_chart")
    for kind, figures in outcome.summary["accuracy"].items():
        assert lines[f"{kind}, mean"][-1] == 100 * figures["mean"]
    assert "ε in a line is that of the client that the run costs most" in str(
        protections(outcome.summary["settings"])
    )
    ledgers = list(outcome.folder.glob("clients/*/privacy.json"))
    assert len(ledgers) == 2
    plan = Settings.from_run_config(outcome.grid.run_config).plan(20)
    for ledger in ledgers:
        (entries,) = json.loads(ledger.read_text()).values()
        mechanisms = [Mechanism(*one) for one in entries]
        assert sum(one.times for one in mechanisms if one.noise == plan.figure_noise) == 2 + 1
        assert epsilon(mechanisms, 1e-5) == pytest.approx(spent[-1])


def test_what_is_sent_in_one_shot_without_a_table_of_the_ledger_is_refused(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(
        DifferentialPrivacy,
        "measure",
        lambda _, moments, features, labels: moments.measure(features, labels),
    )
    config = run_config(tmp_path, algo="gaussian", **SMALL | BEHIND | {"rounds": 1})
    reasons = [why for row in rows_without_a_reply(config, 2) for why in row["failed"].values()]
    assert reasons
    assert all("the privacy ledger does not cover" in why for why in reasons)


@pytest.mark.parametrize(("stopped", "rounds", "left"), [("train", 5, 4), ("evaluate", 2, 2)])
def test_what_a_resumed_run_repeats_is_counted(
    stopped: str, rounds: int, left: int, tmp_path: Path
) -> None:
    """A round: the last one has no budget left, and the final evaluation has. The evaluation: it has its budget."""
    config = run_config(tmp_path, algo="fedproto", run_name="r", **SMALL | {"rounds": rounds})
    with pytest.raises(Killed):
        run_federation(config, 2, tamper=on_message(stopped, 2))
    resumed = run_federation(config | {"resume": True}, 2, run_id=2)
    assert resumed.summary["rounds"] == left
    assert not any(resumed.summary["trouble"].values())
    assert resumed.summary["epsilon"] <= 8


def test_a_run_that_stops_early_has_spent_what_it_says(tmp_path: Path) -> None:
    outcome = private(tmp_path, "fedavg", rounds=9, validation_fraction=0.3, early_stopping=1)
    assert outcome.summary["stopped-early"]
    for ledger in outcome.folder.glob("clients/*/privacy.json"):
        (entries,) = json.loads(ledger.read_text()).values()
        assert epsilon([Mechanism(*one) for one in entries], 1e-5) == pytest.approx(
            outcome.summary["epsilon"]
        )


def test_epsilon_is_that_of_the_client_that_pays_most_and_no_client_ends_the_run(
    tmp_path: Path,
) -> None:
    """With 64 samples an epoch of batches of 64 has one step, with 65 two at nearly the same rate."""
    config = run_config(tmp_path, **SMALL | {"algo": "fedavg", "batch_size": 64, "rounds": 5})
    settings = Settings.from_run_config(config)

    def run_of(*sizes: int) -> Any:
        cards = {
            f"site-{number}": SimpleNamespace(train_samples=size)
            for number, size in enumerate(sizes)
        }
        start, federation = SimpleNamespace(run_history=RunHistory(1)), SimpleNamespace(cards=cards)
        return SimpleNamespace(start=start, federation=federation, settings=settings)

    alone = [epsilon_spent(run_of(size), 3) for size in (64, 65, 1)]
    assert epsilon_spent(run_of(64, 65, 1), 3) == max(alone)  # type: ignore[type-var]
    assert len(set(alone)) > 1
    assert not any(
        Budget().why_stop(run_of(20, one), number)
        for one in (1, 0, 2**60)
        for number in range(1, 6)
    )


def test_a_server_that_asks_for_further_evaluations_runs_into_the_ledger(tmp_path: Path) -> None:
    """Each is charged before it is made; of a ledger that is spent, neither training nor evaluation is left."""
    config = run_config(tmp_path, **SMALL | {"algo": "local", "rounds": 2, "evaluate_every": 2})
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    context = Context(1, 7, {"partition-id": 0, "num-partitions": 2}, RecordDict(), config)

    def ask(kind: str) -> Message:
        asked = Instructions(1, "run", RunHistory(1))
        reply: Message = client_app(
            Message(RecordDict({"round": pack_instructions(asked)}), 7, kind), context
        )
        return reply

    replies = [ask(MessageType.EVALUATE) for _ in range(400)]
    answered = [one for one in replies if not one.has_error()]
    assert 3 <= len(answered) < 100
    assert not any(one.has_error() for one in replies[: len(answered)])
    for late in (replies[-1], ask(MessageType.TRAIN)):
        assert "dp-epsilon = 8: this message would bring this client to ε = " in late.error.reason
    assert len({one.content["report"]["correct.head"] for one in answered}) > 1, (
        "the same question, without noise"
    )


@pytest.mark.parametrize("algo", ["fedproto", "gaussian"])
def test_a_site_keeps_one_account_over_all_runs_and_stays_within_it(
    algo: str, tmp_path: Path, capfd: Printed
) -> None:
    more = SMALL | FROZEN.get(algo, {}) | {"dp_epsilon": 3.0, "rounds": 1}
    demand = {"require-dp": "epsilon<=3.3 delta<=1e-4"}
    first, second = (
        run_config(tmp_path / name, algo=algo, run_name=name, **more)
        for name in ("first", "second")
    )
    nodes = real_sites(2, tmp_path / "disk", **demand)
    named(zero=tmp_path / "disk-0/sites/site-0", one=tmp_path / "disk-1/sites/site-1")
    assert not any(run_federation(first, nodes=nodes, run_id=1).summary["trouble"].values())
    refusal = "require-dp, over all runs, = 3.3: this message would bring .* a run of smaller dp-epsilon may still fit"
    older = {
        "site-1.json": r"\(charges to site-1.json\)",
        "site-1.answered": rf"\(1 {algo} round 1\)",
    }
    for lost, reason in {
        "-": refusal,
        **older,
    }.items():  # before the first round; then one has an older privacy/
        (tmp_path / "disk-1/privacy" / lost).unlink(missing_ok=True)
        with pytest.raises(
            FederationError, match=reason if lost == "-" else "LedgerError .state-dir.: "
        ):
            run_federation(second, nodes=nodes, run_id=2)
        assert re.search(reason, capfd.readouterr().err)
    assert [
        [*json.loads(at.read_text())] for at in (tmp_path / "disk-0").glob("privacy/*.json")
    ] == [["first 1"]] * 2
    file, log = (
        tmp_path / "disk-0" / name
        for name in ("privacy/site-0.answered", "sites/site-0/audit.jsonl")
    )
    file.write_text(
        json.dumps(
            {key: value for key, value in json.loads(file.read_text()).items() if key[0] != "1"}
        )
    )
    assert lacking(tmp_path / "disk-0", "site-0") == "", (
        "lines that were compared before are read again"
    )
    log.write_text("".join(log.read_text().splitlines(True)[:3]))
    assert f"(1 {algo} round 1)" in lacking(tmp_path / "disk-0", "site-0"), (
        "of another log all lines count"
    )


@pytest.mark.parametrize(("demand", "changes", "said"), [
    ("epsilon<=8", {"dp": "none"},
     "dp = 'none': this site takes part only with dp = 'sample', dp-epsilon at most 8 and"),
    ("epsilon<=8", {"dp": "weights"}, "dp = 'weights': choose one of none, sample"),
    ("epsilon<=2", {"dp": "sample"}, "dp-epsilon = 8.0: this site takes at most 2"),
    ("epsilon<=8", {"dp": "sample", "dp_delta": 0.01}, "dp-delta = 0.01: this site takes at most 1e-05"),
    ("little", {"dp": "sample"}, "node-config: require-dp = 'little': say 'epsilon<=8'"),
])  # fmt: skip
def test_a_site_takes_no_less_than_it_demands(
    demand: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    node = {"site-name": "north", "require-dp": demand, "state-dir": str(tmp_path)}
    assert said in refusal(run_config(tmp_path, **changes), node)


def test_a_site_hides_the_kind_of_an_unexpected_error(
    tmp_path: Path, monkeypatch: Patch, capfd: Printed
) -> None:
    """A single sample may have caused it."""
    monkeypatch.setattr(
        "client_app.app.evaluate", MagicMock(side_effect=ZeroDivisionError("sample 7"))
    )
    config = run_config(tmp_path, algo="fedproto", **SMALL | {"rounds": 1})
    (row,) = rows_without_a_reply(config, nodes=real_sites(2, tmp_path / "disk"))
    assert set(row["failed"].values()) == {"an unexpected error; the log of the site says more"}
    assert "ZeroDivisionError: sample 7" in capfd.readouterr().err


def test_fedpcl_predicts_with_the_global_prototypes(tmp_path: Path) -> None:
    """Its own would shape its figures without noise; there are none before the first round."""
    outcome = private(tmp_path, "fedpcl", rounds=2)
    first, second, final = outcome.rows
    assert first["accuracy"] == {}
    assert set(second["accuracy"]) == set(final["accuracy"]) == {"prototype"}
    received = outcome.grid.log[-1][0].content["prototypes"]
    predicting = TrainedModel.read(outcome.folder / "clients" / "site-1" / WEIGHTS).prototypes
    assert np.array_equal(values_of(received["means"]), predicting.means.numpy())


@pytest.mark.parametrize("damage", ["no text", "no folder"])
def test_an_unusable_ledger_stops_the_client_and_is_named(
    damage: str, tmp_path: Path, capfd: Printed
) -> None:
    for i in range(2):
        (folder := tmp_path / f"disk-{i}").mkdir()
        if damage == "no folder":
            (folder / "privacy").write_text("a file where the folder should be")
        else:
            (folder / "privacy").mkdir()
            (folder / "privacy" / f"{digest('', '', i)}.json").write_text("{")
    config = run_config(tmp_path, algo="fedproto", **SMALL | {"rounds": 1})
    (row,) = rows_without_a_reply(config, nodes=real_sites(2, tmp_path / "disk"))
    state = (
        "StateError (state-dir): its state (models, requests, counts)",
        "state-dir: /.*.answered cannot",
    )
    ledger = "LedgerError: its privacy ledger", "the privacy ledger /"
    reason, logged = state if damage == "no folder" else ledger  # answers are looked up first
    assert f"{reason} cannot be read or written; the log of the site says more" in str(row)
    assert re.search(f"ERROR protofl: run .*: {logged}", capfd.readouterr().err)

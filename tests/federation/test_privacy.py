"""Federations under differential privacy: what is sent, what it costs, where the account stands."""

import json
import re
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType
from torch.nn import functional

from client_app.algorithms.base import (
    ClientAlgorithm,
    build_half,
)
from client_app.algorithms.fedavg import FedAvg
from client_app.algorithms.fedproto import FedProto
from client_app.learning import training
from client_app.learning.training import Step, make_optimizer
from client_app.protections import protections_of
from client_app.protections.differential_privacy import DifferentialPrivacy
from client_app.protections.private_step import PrivateStep
from client_app.site import privacy_ledger
from client_app.site.ledger_audit import missing_records
from protofl_common.basics.files import digest
from protofl_common.basics.run_history import RunHistory
from protofl_common.config.options import SettingsError
from protofl_common.config.sections import protections
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings
from protofl_common.maths.prototypes import class_means
from protofl_common.models.trained import TrainedModel
from protofl_common.privacy.plan import Mechanism, epsilon
from protofl_common.runs.folder import WEIGHTS
from protofl_common.wire.payloads import Payload
from protofl_common.wire.schema import Counts
from server_app.callbacks.budget import Budget, planned_epsilon
from server_app.network.membership import FederationError
from tests.support.accidents import Killed, on_message
from tests.support.attacks import values_of
from tests.support.harness import (
    LocalGrid,
    client_of,
    failures_in,
    federate,
    instructions,
    reason_in,
    refusal,
    rows_without_a_reply,
    run_config,
    run_federation,
)
from tests.support.sites import make_site_keys, real_sites

TABLE = {
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
ON_FEATURES = {"dataset": "digits", "backbones": "glyphs"}
FROZEN = {"fedpcl": ON_FEATURES, "gaussian": ON_FEATURES}
NOT_COVERED = "the privacy ledger does not cover"
DELTA = 1e-5
"""The default of dp-delta."""


def small_config(folder, algo, **changes):
    """A run under differential privacy, of two clients with 20 training samples each."""
    small = SMALL | {"fedgen__server_steps": 2, "fedsa__contrast": 0.0} | FROZEN.get(algo, {})
    return run_config(folder, algo=algo, **small | changes)


def private(folder, algo, **changes):
    return run_federation(small_config(folder, algo, **changes), clients=2)


def failures_of(config, nodes=None):
    """Make a run in which no reply is valid, and return why its clients fail."""
    return failures_in(rows_without_a_reply(config, clients=2, nodes=nodes))


def fix_the_noise(monkeypatch):
    """Let all noise of this test be the same in every run of it."""
    draw = np.random.default_rng(0)
    for module in ("differential_privacy", "private_step"):
        monkeypatch.setattr(f"client_app.protections.{module}.fresh_draw", lambda: draw)


def mechanisms_in(ledger):
    """Return what the only run in a ledger was charged for."""
    (entries,) = json.loads(ledger.read_text()).values()
    return [Mechanism(rate, noise, times) for rate, noise, _, times in entries]


@pytest.mark.parametrize(
    ("key", "value"),
    [("impute", "mean"), ("standardise", "client"), ("standardise", "pooled")],
)
def test_what_is_fitted_on_a_clients_samples_is_refused_under_differential_privacy(
    key, value, tmp_path
):
    refused = refusal(run_config(tmp_path, **SMALL, **{key: value}))
    assert re.match(f"dp = 'sample': {key} = '{value}'.* made of all samples", refused)


@pytest.mark.parametrize(("dp", "same"), [("none", False), ("sample", True)])
def test_no_mean_is_fitted_on_a_clients_samples_under_differential_privacy(dp, same, tmp_path):
    """By default a table is standardised by its client's own means; under dp these are not used."""
    config = run_config(tmp_path, **SMALL | {"dp": dp})
    first = client_of(config, partition=0, clients=2).data.mean
    second = client_of(config, partition=1, clients=2).data.mean

    assert (first == second) == same


gradients_of_each = PrivateStep._of_each


def checked_gradients_of_each(step, weights, samples):
    """Return the gradients of each sample as `PrivateStep._of_each` does.

    Those of the first sample must be what `backward` gives for it alone.
    """
    found = gradients_of_each(step, weights, samples)
    first_sample = [values[:1] for values in samples]
    step.gradients(step.terms(step.model, *first_sample))
    for name, weight in weights.items():
        alone = torch.zeros_like(weight) if weight.grad is None else weight.grad
        # float32: sums in another order
        torch.testing.assert_close(found[name][0], alone, rtol=1e-5, atol=1e-5)
    return found


@pytest.mark.parametrize("algo", COVERED)
def test_an_algorithm_takes_the_steps_and_tables_of_its_plan(algo, tmp_path, monkeypatch):
    """Steps and tables are as many as each client's ledger was charged for.

    No class means are taken without noise, and each sample's gradient is right.
    """
    calls = []
    one_step = PrivateStep.__call__
    table_noise = DifferentialPrivacy._noise_of_next_table

    def count_step(self, *batch):
        calls.append("step")
        return one_step(self, *batch)

    def count_table(self):
        calls.append("table")
        return table_noise(self)

    monkeypatch.setattr(PrivateStep, "__call__", count_step)
    monkeypatch.setattr(DifferentialPrivacy, "_noise_of_next_table", count_table)
    monkeypatch.setattr("client_app.learning.sample_use.class_means", None)
    # rarely, noise makes gradients so large that float32's rounding passes the bound
    fix_the_noise(monkeypatch)
    if algo != "fedgen":  # whose loss draws samples anew
        monkeypatch.setattr(PrivateStep, "_of_each", checked_gradients_of_each)

    outcome = private(tmp_path, algo, rounds=2, evaluate_every=2)

    plan = Settings.from_run_config(outcome.grid.run_config).plan(SMALL["train_samples"])
    clients = 2
    rounds = 2
    assert calls.count("step") == clients * rounds * plan.steps
    assert calls.count("table") == clients * sum(plan.tables)  # of all rounds
    assert not outcome.trouble
    # ε is nearly the default of dp-epsilon, 8, and not above it
    assert 7.7 < outcome.summary["epsilon"] == outcome.rows[-1]["epsilon"] <= 8
    for _, reply in outcome.exchanged():
        for name in reply.content["report"]:
            assert not name.startswith(("losses", "seconds"))

    for _, reply in outcome.exchanged(MessageType.QUERY):
        card = reply.content["site"]
        every = list(range(len(card["classes"])))
        assert list(card["present"]) == (every if CATALOG[algo].tells_classes else [])


def test_which_algorithms_it_covers_is_written_here_and_others_are_refused_by_name():
    """Differential privacy covers weights that DP-SGD trains, and noisy tables of classes.

    Other uploads are not covered, nor is Ditto, which trains twice.
    """
    not_covered = {
        "fedplvm",
        "mpft",
        "feddistill",
        "fedfa",
        "feddbe",
        "fedrep",
        "per-fedavg",
        "ditto",
        "pfedme",
    }

    assert set(COVERED) == CATALOG.keys() - not_covered
    for row in CATALOG.values():
        assert set(row.private) <= set(row.exchange.up)

    for algo in not_covered:
        sent = ", ".join(CATALOG[algo].exchange.up)
        reason = f"{algo} sends {sent}, which it does not cover; choose among fedavg, fed"
        assert f"dp = 'sample': {reason}" in refusal({"algo": algo, "dp": "sample"})


def replace_row(monkeypatch, algo, row):
    rows = {algo: row}
    monkeypatch.setattr("protofl_common.experiment.settings.algorithm_named", rows.__getitem__)


def test_a_new_entry_of_an_upload_is_refused_until_its_row_covers_it(monkeypatch):
    """FedAvg's row gets a second entry, ``sizes``, which it does not name as private."""
    row = CATALOG["fedavg"]
    exchange = replace(row.exchange, up={**row.exchange.up, "sizes": Counts()})
    replace_row(monkeypatch, "fedavg", replace(row, exchange=exchange))

    reason = "dp = 'sample': fedavg sends sizes, which it does not cover"
    assert reason in refusal({"algo": "fedavg", "dp": "sample"})


class PlainStep(FedAvg):
    """Trains by steps of its own, as the newest algorithm might."""

    def fit(self):
        return self.train(Step(self.modules, self.optimizer, self.labelled_loss))


class PlainLoop(FedAvg):
    """Reads the training data in a loop of its own, without steps."""

    def fit(self):
        with torch.no_grad():
            for weight in self.model.parameters():
                weight += self.client.train_set.in_memory.mean()
        return {}


class Twice(FedAvg):
    """Trains for two rounds in one."""

    def fit(self):
        self.train(self.step())
        return self.train(self.step(), purpose="again")


class ThreeEpochs(FedAvg):
    """Makes more private steps than a round's, in one loop."""

    def fit(self):
        return self.train(self.step(), epochs=3)


class TwoTables(FedProto):
    """Makes its table of prototypes twice, and is charged for one."""

    def upload(self):
        self.local_prototypes()
        return super().upload()


class NoTable(FedProto):
    """Sends what it was sent, or nothing, and makes no table, which the ledger was charged for."""

    def upload(self):
        return Payload(prototypes=self.global_prototypes)


def trained_beside(half, model):
    """Train by plain steps, in a loop that no base knows of."""
    optimizer = make_optimizer([model], half.training)
    training.train(Step([model], optimizer, half.loss), half.training_set, half.training, seed=1)


class PlainBefore(FedAvg):
    """Trains by plain steps before the private ones."""

    def fit(self):
        trained_beside(self, self.model)
        return super().fit()


class PlainAfter(FedAvg):
    """Trains by plain steps after the private ones."""

    def fit(self):
        losses = super().fit()
        trained_beside(self, self.model)
        return losses


class PlainBeforeTheTable(FedProto):
    """Makes a noisy table of features of a model that single samples have shaped."""

    def upload(self):
        trained_beside(self, self.model)
        return super().upload()


class PlainTeacher(FedAvg):
    """Learns from a model of its own, which never leaves, but was trained without noise."""

    def __init__(self, client, round_number):
        super().__init__(client, round_number)
        self.teacher = deepcopy(self.model)

    def fit(self):
        trained_beside(self, self.teacher)
        return super().fit()

    def loss(self, batch):
        with torch.no_grad():
            wanted_BC = self.teacher(batch.inputs).softmax(1)
        return {"cross-entropy": functional.cross_entropy(batch.logits, wanted_BC)}


class ASecondLoop(FedAvg):
    """Takes more private steps than were charged, in a loop that no base knows of."""

    def fit(self):
        training.train(self.step(), self.training_set, self.training, seed=1)
        return super().fit()


UNPAID = [
    PlainStep,
    PlainLoop,
    Twice,
    ThreeEpochs,
    TwoTables,
    NoTable,
    PlainBefore,
    PlainAfter,
    PlainBeforeTheTable,
    PlainTeacher,
    ASecondLoop,
]


@pytest.mark.parametrize("half", UNPAID)
def test_a_covered_row_pays_for_no_more(half, tmp_path, monkeypatch):
    """A half that does more with the data than its row's plan pays for is refused."""
    algo = "fedproto" if issubclass(half, FedProto) else "fedavg"
    row = replace(CATALOG[algo], client=f"{half.__module__}:{half.__name__}")
    replace_row(monkeypatch, algo, row)

    config = run_config(tmp_path, algo=algo, **SMALL | {"rounds": 1})
    (row_of_the_round,) = rows_without_a_reply(config, clients=2)

    does = "sends weights" if half is PlainAfter else "makes use of training data"
    assert f"dp = 'sample': {algo} {does} that {NOT_COVERED}" in str(row_of_the_round)


def exact_moments(moments, features_NF, labels_N, *samples):
    moments.measure(features_NF, labels_N)


def exact_counts(labels_N, num_classes):
    return labels_N.bincount(minlength=num_classes)


EXACT_TABLES = {
    "class_means": class_means,
    "class_counts": exact_counts,
    "measure": exact_moments,
}
"""Method of the protection that makes a noisy table -> what makes the exact one."""


def put_exact_in_place_of_noisy(monkeypatch, pays):
    """Make every table exact; with ``pays`` a noisy one as well, so that their number is right."""

    def replace_noisy(name):
        noisy = getattr(DifferentialPrivacy, name)

        def table(protection, *given):
            if pays:
                noisy(protection, *given)
            return EXACT_TABLES[name](*given)

        monkeypatch.setattr(DifferentialPrivacy, name, table)

    for name in EXACT_TABLES:
        replace_noisy(name)


TABLES = {}
"""Algorithm -> the entry of its upload that is a table of classes."""
ONE_OF_EACH_TABLE = {}
"""Kind of table -> an algorithm with it."""
for algo in COVERED:
    for name, entry in CATALOG[algo].exchange.up.items():
        if entry.shows_classes:
            TABLES[algo] = name
            ONE_OF_EACH_TABLE.setdefault(type(entry).__name__, algo)
EXACT = [(algo, True) for algo in TABLES] + [(algo, False) for algo in ONE_OF_EACH_TABLE.values()]


@pytest.mark.parametrize(("algo", "pays"), EXACT)
def test_an_exact_table_in_the_place_of_a_noisy_one_is_refused_by_name(
    algo, pays, tmp_path, monkeypatch
):
    """Every algorithm with a table is tried, with the noisy table made and thrown away (``pays``).

    Without it, one algorithm for each kind of table is enough.
    """
    fix_the_noise(monkeypatch)  # counts of few classes with noise may by chance be the exact
    put_exact_in_place_of_noisy(monkeypatch, pays)
    of_ten_classes = ON_FEATURES if algo == "fedgen" else {}

    failures = failures_of(small_config(tmp_path, algo, rounds=1, **of_ten_classes))

    refused = f"dp = 'sample': {algo} sends {TABLES[algo]} that {NOT_COVERED}"
    assert all(refused in failure for failure in failures), failures


@pytest.mark.parametrize("what", ["counts", "one number of a mean", "weights"])
def test_no_number_of_what_is_released_can_be_changed(what, tmp_path, monkeypatch):
    """A half that adds something of its data to what the protection gave it is refused."""
    upload = ClientAlgorithm.upload

    def changed_upload(self):
        sent = upload(self)
        prototypes = sent.vectors()
        assert prototypes is not None
        leak = self.client.train_set.in_memory.mean()
        if what == "counts":
            sent.entries["prototypes"] = replace(prototypes, counts=prototypes.counts + 1)
        elif what == "weights":
            weights = self.weights()
            sent.entries["weights"] = {name: value + leak for name, value in weights.items()}
        else:
            prototypes.means[0, 0] += leak
        return sent

    monkeypatch.setattr(ClientAlgorithm, "upload", changed_upload)
    failures = failures_of(run_config(tmp_path, algo="fedproto-avg", **SMALL | {"rounds": 1}))

    entry = "weights" if what == "weights" else "prototypes"
    refused = f"fedproto-avg sends {entry} that {NOT_COVERED}"

    assert all(refused in failure for failure in failures), failures


@pytest.mark.parametrize("exact", [
    {"correct": {"head": 10_000}},  # which no noise makes of 20 samples
    {"validation": {"head": 0.7}},
    {"metrics": {"head/auc": 0.7}},
], ids=lambda exact: next(iter(exact)))  # fmt: skip
def test_figures_without_noise_are_refused(exact, tmp_path, monkeypatch):
    """Whatever puts them into a report beside the evaluations that have passed the protection."""
    pack = DifferentialPrivacy.report

    def report_with_exact_figures(self, report):
        return pack(self, replace(report, **exact))

    monkeypatch.setattr(DifferentialPrivacy, "report", report_with_exact_figures)
    config = run_config(tmp_path, algo="local", **SMALL | {"rounds": 1, "validation_fraction": 0.3})

    assert NOT_COVERED in str(failures_of(config))


@pytest.mark.parametrize(("changes", "reason"), [
    ({"algo": "fedpcl", "fedpcl__loss": "supcon"}, "fedpcl.loss = 'supcon' compares samples"),
    ({"algo": "gaussian", "gaussian__priors": "personal"},
        "gaussian.priors = 'personal': the client's own class"),
    ({"algo": "gaussian", "min_class_samples": 5},
        "min-class-samples = 5: gaussian sends sums over all classes"),
    ({"positive_rate": 0.5}, "positive-rate = 0.5: terms of unlabelled samples compare samples"),
    ({"local_steps": 5}, "local-steps = 5: the privacy ledger counts epochs; set 0"),
    ({"metrics": "auc"}, "metrics = 'auc': only numbers of right predictions have noise"),
    ({"predict_among": "own"},
        "predict-among = 'own': predictions would show which classes a client has"),
    ({"baselines": "local"},
        "baselines = 'local': each baseline would spend ε once more on the same samples"),
    ({"gradient_noise": 4.0}, "gradient-noise = 4.0: the noise follows from dp-epsilon"),
    ({"dp_clip": 1e-9}, "dp-clip = 1e-09: must be a number at least 1e-06 and at most 1e"),
    ({"dp_feature_clip": 1e-307}, "dp-feature-clip = 1e-307: must be a number at least 1e-06"),
    ({"dp_feature_clip": 1e7}, "dp-feature-clip = 10000000.0: must be a number at least 1e-06"),
    ({"dp": "none", "dp_epsilon": 1.0},
        "dp-epsilon = 1.0: nothing is private with dp = 'none'; set dp = 'sample' or 'person'"),
])  # fmt: skip
def test_what_it_cannot_hold_is_refused(changes, reason, tmp_path):
    assert reason in refusal(run_config(tmp_path, **{"dp": "sample"} | changes))


def test_batch_normalisation_is_refused_when_a_client_introduces_itself(tmp_path):
    refused = "2 clients cannot take part: norm = 'batch': this network has batch"
    with pytest.raises(FederationError, match=refused):
        private(tmp_path, "fedpcl", norm="batch")


def test_an_epsilon_too_small_for_any_noise_is_refused_before_a_client_trains(tmp_path):
    grids = []
    with pytest.raises(SettingsError, match=r"dp-epsilon = 0\.001: no noise is large enough"):
        federate(tmp_path, clients=2, on_grid=grids.append, **SMALL | {"dp_epsilon": 0.001})

    for message, _ in grids[0].log:
        assert message.metadata.message_type != MessageType.TRAIN


def test_the_noise_of_a_paper_on_gradients_is_dp_sgd_and_is_called_no_protection(tmp_path):
    """The setting gradient-noise, as in FedPLVM's Table 11: a run with it has no budget."""
    noise = {"dp": "none", "gradient_noise": 4.0}
    client = client_of(
        run_config(tmp_path, **SMALL | noise, algo="fedplvm"), partition=0, clients=2
    )
    step = build_half(client, 1, protections_of(client)).step()

    assert isinstance(step, PrivateStep)
    assert client.plan is None
    assert 3.9 < step.plan.epsilon(rounds=2) <= 4

    prototype_noise = "gaussian 0.05 0.1"
    outcome = private(tmp_path, "fedplvm", **noise, prototype_noise=prototype_noise, rounds=1)

    assert "epsilon" not in outcome.summary
    assert not protections(outcome.summary["settings"])


def test_a_run_spends_its_epsilon_and_says_so(tmp_path):
    """In its rows, in the report's figures, and in the ledgers of its two clients."""
    outcome = private(tmp_path, "fedproto", rounds=3, evaluate_every=2)
    spent = outcome.per_row("epsilon")  # from the beginning of the run

    assert outcome.summary["rounds"] == 3
    assert spent == sorted(spent)
    assert 7.7 < spent[-1] <= 8  # nearly the default of dp-epsilon

    protected = str(protections(outcome.summary["settings"]))
    assert "planned for the client that the run costs most" in protected

    plan = Settings.from_run_config(outcome.grid.run_config).plan(SMALL["train_samples"])
    ledgers = list(outcome.folder.glob("clients/*/privacy.json"))

    assert len(ledgers) == 2

    for ledger in ledgers:
        mechanisms = mechanisms_in(ledger)
        evaluations = [one.times for one in mechanisms if one.noise == plan.figure_noise]
        assert sum(evaluations) == 2 + 1  # in rounds 1 and 3, and at the end
        assert epsilon(mechanisms, DELTA) == pytest.approx(spent[-1])


def test_the_server_shows_the_epsilon_of_the_clients_own_ledgers(tmp_path, capsys):
    """It shows what the ledgers count for this run beside the planned ε.

    The planned one is that of a client which takes part in every round.
    """
    outcome = private(tmp_path, "fedproto", rounds=3, participation=0.5)
    *_, final = outcome.rows
    spent = {}
    for site, row in final["clients"].items():
        (ledger,) = tmp_path.rglob(f"{site}/privacy.json")
        whole = privacy_ledger.total(privacy_ledger.read_ledger(ledger))
        spent[site] = privacy_ledger.epsilon_of(whole, DELTA)
        assert row["epsilon"] == pytest.approx(spent[site])

    assert min(spent.values()) < final["epsilon"]

    largest = max(spent.values())
    assert outcome.summary["epsilon-of-ledgers"] == pytest.approx(largest)

    shown = f"ε ≤ {final['epsilon']:.2f} planned, {largest:.2f} by the clients' ledgers"
    assert shown in capsys.readouterr().out


def test_the_noise_of_two_runs_with_one_seed_differs(tmp_path):
    """Noise that could be drawn again from the seed would be no noise."""
    sent_by_site_0 = []
    for name in ("a", "b"):
        outcome = private(tmp_path / name, "fedproto", rounds=1)
        (_message, reply), _of_site_1 = outcome.exchanged()
        sent_by_site_0.append(reply.content["prototypes"]["means"].data)

    in_a, in_b = sent_by_site_0
    assert in_a != in_b


@pytest.mark.parametrize(("stopped", "rounds", "left"), [
    # killed while it trains: the last round has no budget left, and the final evaluation has
    ("train", 5, 4),
    # killed in the final evaluation, which can be repeated
    ("evaluate", 2, 2),
])  # fmt: skip
def test_what_a_resumed_run_repeats_is_counted(stopped, rounds, left, tmp_path):
    """The server dies in round 2, after clients were charged for it; ``left`` rounds are made."""
    config = run_config(tmp_path, algo="fedproto", run_name="r", **SMALL | {"rounds": rounds})
    with pytest.raises(Killed):
        run_federation(config, clients=2, tamper=on_message(stopped, 2))

    resumed = run_federation(config | {"resume": True}, clients=2, run_id=2)

    assert resumed.summary["rounds"] == left
    assert not resumed.trouble
    assert resumed.summary["epsilon"] <= 8


def test_a_run_that_stops_early_has_spent_what_it_says(tmp_path):
    """Its ε is that of the rounds that were made, and so is each client's ledger's."""
    outcome = private(tmp_path, "fedavg", rounds=9, validation_fraction=0.3, early_stopping=1)

    assert outcome.summary["stopped-early"]
    for ledger in outcome.folder.glob("clients/*/privacy.json"):
        spent = epsilon(mechanisms_in(ledger), DELTA)
        assert spent == pytest.approx(outcome.summary["epsilon"])


def test_epsilon_is_that_of_the_client_that_pays_most_and_no_client_ends_the_run(tmp_path):
    """With batches of 64, 64 samples make one step an epoch, and 65 two at nearly the same rate.

    So more samples do not always cost less. A client of 1, 0 or 2⁶⁰ samples, as a hostile one may
    claim to have, does not end the run.
    """
    config = run_config(tmp_path, **SMALL | {"algo": "fedavg", "batch_size": 64, "rounds": 5})
    settings = Settings.from_run_config(config)

    def run_of(*sizes):
        cards = {f"site-{i}": SimpleNamespace(train_samples=n) for i, n in enumerate(sizes)}
        return SimpleNamespace(
            start=SimpleNamespace(run_history=RunHistory(1)),
            federation=SimpleNamespace(cards=cards),
            settings=settings,
        )

    after_round_3 = [planned_epsilon(run_of(size), 3) for size in (64, 65, 1)]
    assert len(set(after_round_3)) > 1
    assert planned_epsilon(run_of(64, 65, 1), 3) == max(after_round_3)

    for size in (1, 0, 2**60):
        for number in (1, 2, 3, 4, 5):
            assert not Budget().why_stop(run_of(20, size), number)


def test_a_server_that_asks_for_further_evaluations_runs_into_the_ledger(tmp_path):
    """Each evaluation is charged before it is made, until the ledger is spent.

    From then on the client neither trains nor evaluates.
    """
    config = run_config(tmp_path, **SMALL | {"algo": "local", "rounds": 2, "evaluate_every": 2})
    grid = LocalGrid(config, {7: {"partition-id": 0, "num-partitions": 2}}, run_id=1)

    def ask(kind):
        return grid.ask(Message(instructions(run_id=1), 7, kind, group_id="1"))

    replies = [ask(MessageType.EVALUATE) for _ in range(400)]

    answered = [reply for reply in replies if not reply.has_error()]
    # the run plans two, in round 1 and at the end, and far fewer than were asked for may pass
    assert 3 <= len(answered) < 100
    assert not any(reply.has_error() for reply in replies[: len(answered)])  # they came first
    for late in (replies[-1], ask(MessageType.TRAIN)):
        assert "dp-epsilon = 8: this message would bring this client to ε = " in reason_in(late)

    figures = {reply.content["report"]["correct.head"] for reply in answered}
    assert len(figures) > 1, "the same question, without noise"  # would have one figure


@pytest.mark.parametrize("algo", ["fedproto", "gaussian"])
def test_a_site_keeps_one_account_over_all_runs_and_stays_within_it(algo, tmp_path, capfd):
    """The second of two runs with ε = 3 does not fit into the 3.3 that the sites allow over all.

    Nor does it if an account, or the record of answers, is lost or put back from a backup: the
    audit log says that more was charged.
    """
    of_both = SMALL | FROZEN.get(algo, {}) | {"dp_epsilon": 3.0, "rounds": 1}
    first = run_config(tmp_path / "first", algo=algo, run_name="first", **of_both)
    second = run_config(tmp_path / "second", algo=algo, run_name="second", **of_both)
    demand = {"require-dp": "epsilon<=3.3 delta<=1e-4"}
    nodes = real_sites(2, tmp_path / "disk", **demand)
    disk_0 = tmp_path / "disk-0"  # the state of site-0
    accounts = tmp_path / "disk-1/privacy"
    # with require-dp a site without a key takes its disk for one that is not mounted
    make_site_keys(zero=disk_0 / "sites/site-0", one=tmp_path / "disk-1/sites/site-1")

    assert not run_federation(first, nodes=nodes, run_id=1).trouble

    def assert_second_is_refused(told_to_server, in_log):
        """The second run is refused before its first round, with these words (patterns)."""
        with pytest.raises(FederationError, match=told_to_server):
            run_federation(second, nodes=nodes, run_id=2)
        assert re.search(in_log, capfd.readouterr().err)

    spent = "require-dp, over all runs, = 3.3: this message would bring .* a run of smaller "
    spent += "dp-epsilon may still fit"
    assert_second_is_refused(spent, spent)  # the server is told the whole reason
    (accounts / "site-1.json").unlink()
    assert_second_is_refused("LedgerError .state-dir.: ", r"\(charges to site-1.json\)")
    (accounts / "site-1.answered").unlink()
    assert_second_is_refused("LedgerError .state-dir.: ", rf"\(1 {algo} round 1\)")

    # the ledgers of the other site, under its name and under its data, have the first run alone
    ledgers = [json.loads(file.read_text()) for file in (disk_0 / "privacy").glob("*.json")]
    runs_charged = [list(ledger) for ledger in ledgers]
    assert runs_charged == [["first 1"], ["first 1"]]  # the run's name and number

    assert missing_records(disk_0, "site-0") == ""
    answered = disk_0 / "privacy/site-0.answered"
    content = json.loads(answered.read_text())
    # a key begins with the run's number
    without_run_1 = {key: value for key, value in content.items() if not key.startswith("1")}
    answered.write_text(json.dumps(without_run_1))

    assert f"(1 {algo} round 1)" in missing_records(disk_0, "site-0")


@pytest.mark.parametrize(("demand", "changes", "reason"), [
    ("epsilon<=8", {"dp": "none"},
     "dp = 'none': this site takes part only with dp = 'sample', dp-epsilon at most 8 and"),
    ("epsilon<=8", {"dp": "weights"}, "dp = 'weights': choose one of none, sample, person"),
    ("epsilon<=8 per person", {"dp": "sample"},
     "dp = 'sample': this site takes part only with dp = 'person', dp-epsilon at most 8 and"),
    ("epsilon<=2", {"dp": "sample"}, "dp-epsilon = 8.0: this site takes at most 2"),
    ("epsilon<=8", {"dp": "sample", "dp_delta": 0.01},
     "dp-delta = 0.01: this site takes at most 1e-05"),
    ("little", {"dp": "sample"}, "node-config: require-dp = 'little': say 'epsilon<=8'"),
])  # fmt: skip
def test_a_site_takes_no_less_than_it_demands(demand, changes, reason, tmp_path):
    node = {"site-name": "north", "require-dp": demand, "state-dir": str(tmp_path)}
    assert reason in refusal(run_config(tmp_path, **changes), node)


def test_fedpcl_predicts_with_the_global_prototypes(tmp_path):
    """Under dp a client does not predict with its own, which would shape figures without noise.

    In the first round there are no global ones, and so no accuracies.
    """
    outcome = private(tmp_path, "fedpcl", rounds=2)

    first, second, final = outcome.rows
    assert first["accuracy"] == {}
    assert set(second["accuracy"]) == set(final["accuracy"]) == {"prototype"}

    message, _ = outcome.grid.log[-1]
    received = values_of(message.content["prototypes"]["means"])
    stored = TrainedModel.read(outcome.folder / "clients" / "site-1" / WEIGHTS).prototypes

    assert np.array_equal(received, stored.means.numpy())


def damage_ledger(disk, monkeypatch, number):
    """Write a ledger of the site's data that is no JSON."""
    of_data = digest("", "", number)  # of data-dir, domain and partition
    (disk / "privacy").mkdir()
    (disk / "privacy" / f"{of_data}.json").write_text("{")


def put_a_file_in_place_of_ledgers(disk, monkeypatch, number):
    """The record of a site's answers is in that folder, too, and is looked up first."""
    (disk / "privacy").write_text("no folder")


def fail_over_one_sample(disk, monkeypatch, number):
    failing = MagicMock(side_effect=ZeroDivisionError("sample 7"))
    monkeypatch.setattr("client_app.app.evaluate", failing)


UNREADABLE = "cannot be read or written; the log of the site says more"
STOPPED = {
    "an unusable ledger": (
        damage_ledger,
        f"LedgerError: its privacy ledger {UNREADABLE}",
        "ERROR protofl: run .*: the privacy ledger /",
    ),
    "a file in the place of the ledgers": (
        put_a_file_in_place_of_ledgers,
        f"StateError (state-dir): its state (models, requests, counts) {UNREADABLE}",
        "ERROR protofl: run .*: state-dir: /.*.answered cannot",
    ),
    "an error that a single sample may have caused": (
        fail_over_one_sample,
        "an unexpected error; the log of the site says more",
        "ZeroDivisionError: sample 7",
    ),
}
"""What stops two sites -> (how it comes, what the server is told, a pattern of their logs)."""


@pytest.mark.parametrize("case", STOPPED)
def test_what_stops_a_site_is_named_and_its_log_alone_says_more(case, tmp_path, monkeypatch, capfd):
    befall, told, logged = STOPPED[case]
    for number in range(2):
        (tmp_path / f"disk-{number}").mkdir()
        befall(tmp_path / f"disk-{number}", monkeypatch, number)
    config = run_config(tmp_path, algo="fedproto", **SMALL | {"rounds": 1})

    assert set(failures_of(config, real_sites(2, tmp_path / "disk"))) == {told}
    assert re.search(logged, capfd.readouterr().err)

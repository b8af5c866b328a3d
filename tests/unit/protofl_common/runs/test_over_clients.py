"""Figures over clients: by hand, and in a run's files. And what looks odd in data or outcome."""

import numpy as np
import pytest

from client_app.algorithms.fedavg import FedAvg
from protofl_common.basics.text import human_bytes, human_seconds
from protofl_common.runs.figures import best_text, figure_rows, results_in_common, side_by_side
from protofl_common.runs.over_clients import (
    best_of,
    comparable_rounds,
    outcome_warnings,
    over_clients,
)
from protofl_common.tasks import Result
from protofl_common.tools.tables.figure import Figure
from tests.support.fakes import row as row_of
from tests.support.harness import run_config, run_federation


def test_over_clients_by_hand():
    """Three clients have the accuracies 0.5, 1 and 0 over 10, 30 and 60 test samples."""
    figures = over_clients([0.5, 1.0, 0.0], [10, 30, 60])

    assert figures["mean"] == pytest.approx(0.5)
    assert figures["weighted"] == pytest.approx((5 + 30 + 0) / 100)
    assert figures["worst-10%"] == 0.0
    assert figures["std"] == pytest.approx((1 / 6) ** 0.5)
    twenty = [i / 20 for i in range(20)]
    mean_of_worst_two = (0 / 20 + 1 / 20) / 2
    assert over_clients(twenty, [1] * 20)["worst-10%"] == pytest.approx(mean_of_worst_two)
    assert over_clients([], []) == {}


def test_rounds_that_asked_fewer_sites_than_the_last_are_not_comparable():
    """As many sites as in the last round must have been asked, and have answered.

    Where ``liars`` sites may lie, these numbers may differ by so many. ``numbers``: the rounds that
    are comparable then.
    """
    asked_and_valid = [(2, 2), (3, 3), (4, 4), (3, 3), (4, 1), (4, 3)]

    for liars, numbers in ((0, [2, 5]), (1, [1, 2, 3, 5]), (2, [0, 1, 2, 3, 4, 5])):
        rows = []
        for asked, valid in asked_and_valid:
            rows.append({"asked": asked, "valid": valid, "number": len(rows)})
        rows[-1]["liars"] = liars
        assert [row["number"] for row in comparable_rounds(rows)] == numbers

    assert comparable_rounds([]) == []


def test_human_units():
    """Sizes are in powers of 1,000, durations in hours, minutes and seconds."""
    sizes = [human_bytes(size) for size in (0, 999, 1536, 2.5e6, 4e9)]

    assert sizes == ["0 B", "999 B", "1.5 kB", "2.5 MB", "4.0 GB"]

    times = [human_seconds(seconds) for seconds in (1.25, 42, 75, 3720)]

    assert times == ["1.2s", "42s", "1m15s", "1h02m"]


def evaluated(after, tested, validated=None, asked=4):
    """Return the row of an evaluation ``after`` a round, with its mean accuracies by head.

    ``tested`` is that on test data, ``validated`` that on validation data; all ``asked`` answered.
    """
    row = {
        "asked": asked,
        "valid": asked,
        "evaluated-after-round": after,
        "accuracy": {"head": {"mean": tested}},
    }
    if validated is not None:
        row["validation"] = {"head": {"mean": validated}}
    return row


def test_the_best_round_is_chosen_on_validation_data_or_says_that_it_is_not():
    """Of several equal rounds it is the first; a lucky draw of two clients does not count.

    The figure itself, ``mean``, is on test data all the same.
    """
    rows = [
        evaluated(0, 0.1, 0.7),
        evaluated(1, 0.3, 0.99, asked=2),
        evaluated(2, 0.9, 0.5),
        evaluated(3, 0.8, 0.7),
        evaluated(4, 0.6, 0.6),
    ]
    best = {"mean": 0.1, "after-round": 0, "chosen-on": "validation"}

    assert best_of(rows, "head") == best

    for row in rows:
        del row["validation"]

    assert best_of(rows, "head") == {"mean": 0.9, "after-round": 2, "chosen-on": "test"}
    assert best_of(rows, "prototype") is None

    of_an_older_run = {"mean": 0.9, "after-round": 2}

    assert best_text(of_an_older_run) == "90.00 @2 (chosen on test data)"


def test_where_some_may_lie_a_round_of_few_sites_is_never_the_best():
    """Where sites may lie rounds are compared by trimmed means, which take enough sites.

    So a round without one, after round 1, is not the best.
    """
    rows = [evaluated(0, 0.5), evaluated(1, 0.9), evaluated(2, 0.6)]

    for row in rows:
        row["liars"] = 1
    rows[0]["accuracy"]["head"]["trimmed"] = 0.7
    rows[2]["accuracy"]["head"]["trimmed"] = 0.6

    assert best_of(rows, "head") == {"mean": 0.5, "after-round": 0, "chosen-on": "test"}


def result(algo, **clients):
    """Return the summary of a run, with the accuracy of each of its ``clients``."""
    return {
        "settings": {"algo": algo},
        "algorithm": algo.title(),
        "accuracy": {"head": {"mean": 0.5}},
        "metrics": {},
        "accuracy-of-clients": {site: {"head": share} for site, share in clients.items()},
        "clients": {site: {"arch": "x"} for site in clients},
        "bytes": {},
    }


def test_clients_are_compared_one_by_one():
    """An equal mean may hide that one client pays for another; c, a tie, is not worse off."""
    alone = result("local", a=0.5, b=0.5, c=0.5)
    fedavg = result("fedavg", a=0.9, b=0.1, c=0.5)
    said = " Clients worse off than alone: Fedavg 1 of 3."

    assert side_by_side([alone, fedavg]).note.endswith(said)
    assert "worse off" not in side_by_side([fedavg]).note

    single_clients_hidden = [result("local"), result("fedavg")]

    assert "worse off" not in side_by_side(single_clients_hidden).note


def test_a_gain_over_training_alone_is_that_of_the_same_networks():
    """FedAvg's client b has another network than it had alone, so it is not compared."""
    alone = result("local", a=0.3, b=0.4) | {"clients": {"a": {"arch": "x"}, "b": {"arch": "y"}}}
    fedproto = result("fedproto", a=0.4, b=0.3) | {"clients": alone["clients"]}
    fedavg = result("fedavg", a=0.2, b=0.3) | {"clients": {"a": {"arch": "x"}, "b": {"arch": "x"}}}
    table = side_by_side([alone, fedproto, fedavg])

    gains = [gain for _, _, gain, *_ in table.rows]
    assert gains == ["–", "+0.0 points", "other networks"]
    assert table.note.endswith("Clients worse off than alone: Fedproto 1 of 2, Fedavg 1 of 1.")
    assert "the clients alone had other networks" in table.note
    assert "other networks" not in side_by_side([alone, fedproto]).note


@pytest.mark.slow
def test_metrics_reach_rows_summary_and_tables(tmp_path):
    """AUC and the recalls of ten classes are in a run's rows, its summary and a table's figure."""
    config = run_config(tmp_path, metrics="auc, recall", train_samples=20, test_samples=40)
    outcome = run_federation(config, clients=3)

    last = outcome.rows[-1]
    of_clients = [client["metrics"] for client in last["clients"].values()]

    for inference in ("head", "prototype"):
        aucs = [metrics[f"{inference}/auc"] for metrics in of_clients]
        assert 0 <= min(aucs) <= max(aucs) <= 1
        assert last["metrics"][f"{inference}/auc"]["mean"] == pytest.approx(sum(aucs) / 3)

        # of ten classes with four samples each the mean recall is the accuracy
        recalls = []
        for metrics in of_clients:
            recalls += [metrics[f"{inference}/recall/{label}"] for label in range(10)]
        assert sum(recalls) / 30 == pytest.approx(last["accuracy"][inference]["mean"])

    assert outcome.summary["metrics"] == last["metrics"]

    auc = last["metrics"]["head/auc"]["mean"]

    assert Figure(what="head/auc").read(outcome.folder) == pytest.approx(auc)
    assert {name.partition("/")[2] for name in last["metrics"]} >= {"auc", "recall/9"}


# -- doubts ---------------------------------------------------------------------------------------
def written(tmp_path, labels):
    """Return the config of a run on samples with these labels, whose inputs say nothing of them.

    With that learning rate, the model stays what it was.
    """
    inputs = np.random.default_rng(1).normal(size=(len(labels), 3))
    np.savez(tmp_path / "mine.npz", inputs=inputs, labels=labels)
    return run_config(
        tmp_path,
        dataset="arrays",
        data_dir=str(tmp_path / "mine.npz"),
        partition="iid",
        models="mlp-1",
        algo="fedavg",
        train_samples=0,
        test_samples=0,
        lr=1e-9,
    )


def test_an_accuracy_that_needs_no_model(tmp_path, capfd):
    """Nine tenths of the labels are "no", which a model that learns nothing may say too."""
    outcome = run_federation(written(tmp_path, (["no"] * 9 + ["yes"]) * 8), clients=2)
    guess = outcome.summary["accuracy"]["head"]["mean"]

    assert guess <= 0.9

    (doubt,) = outcome.summary["warnings"]
    naming = "always naming each client's most frequent class is right for 90.0 %"

    assert doubt == f"accuracy by head is {100 * guess:.1f} %, no better than a guess: {naming}"
    assert f"warning: {doubt}" in capfd.readouterr().out


GUESS = "always naming each client's most frequent class is right for 60.0 %"


@pytest.mark.parametrize(("changes_of_last", "doubts"), [
    ({}, []),
    (
        {"void": True, "void-because": "few"},
        ["1 of 3 rounds changed nothing, the last one among them: few"],
    ),
    ({"refused": {"b": "odd"}}, ["1 of 12 replies failed or were refused, the last: odd"]),
    ({"accuracy": {}}, ["no accuracy of any client (too few test samples)"]),
    (
        {"accuracy": {"head": {"mean": 0.62}}},
        [
            "accuracy by head fell from 97.1 % after round 27 to 62.0 %: "
            "try a smaller lr, fewer rounds or early-stopping"
        ],
    ),
    (
        {"accuracy": {"prototype": {"mean": 0.6}}},
        [f"accuracy by prototype is 60.0 %, no better than a guess: {GUESS}"],
    ),
])  # fmt: skip
def test_what_makes_the_figures_of_a_run_doubtful(changes_of_last, doubts):
    """Site a has 4 and 6 test samples of two classes: naming the larger is right for 60 %."""
    rows = []

    for after, mean in ((26, 0.9), (27, 0.971), (40, 0.85)):
        row = {"kind": "round", "void": False, "failed": {}, "refused": {}}
        clients = {"a": {"accuracy": {"head": mean}}, "b": {"accuracy": {}, "metrics": {"auc": 1}}}
        rows.append(row | {"clients": clients} | evaluated(after, mean))
    rows[-1] |= changes_of_last
    if not rows[-1]["accuracy"]:
        rows[-1]["clients"] = {"a": {"accuracy": {}}}
    sites = {"sites": {"a": {"test-classes": [4, 6]}}}

    assert [*outcome_warnings(rows, rows[-1], sites)] == doubts


def test_a_class_that_is_tested_nowhere(tmp_path, capfd):
    run_federation(written(tmp_path, ["a", "b"] * 20 + ["rare"]), clients=2)

    assert "warning: trained on, but tested nowhere: rare\n" in capfd.readouterr().out


def test_a_method_that_breaks_at_some_clients(tmp_path, monkeypatch):
    """One of two clients fails in both rounds, and in the final evaluation nobody does."""
    honest = FedAvg.fit

    def broken(self):
        if self.client.name == "site-1":
            raise AttributeError("'Batch' object has no attribute 'label'")
        return honest(self)

    monkeypatch.setattr(FedAvg, "fit", broken)
    config = written(tmp_path, ["no", "yes"] * 60) | {"rounds": 2, "min-replies": 1}
    doubt, *_ = run_federation(config, clients=2).summary["warnings"]
    lost = "2 of 6 replies failed or were refused, the last: a fault of ProtoFL: AttributeError"

    assert doubt.startswith(lost)


def test_figures_of_labels_stand_together_with_the_names_of_the_labels():
    """Clients that test other labels report them in another order."""
    names = ["head/label-auc/3", "prototype/label-auc/3", "head/label-auc/1", "head/auc"]
    metrics = {name: {"mean": 0.5} for name in names}
    shown = [row[0] for row in figure_rows(metrics, classes=["no a", "a", "no b", "b"])]
    assert shown == [
        "head/label-auc/1 (a)",
        "head/label-auc/3 (b)",
        "prototype/label-auc/3 (b)",
        "head/auc",
    ]


def test_runs_of_several_labels_are_compared_by_exact_match_if_one_has_no_auc():
    """The AUC and the share of right predictions are different figures."""
    several_labels = {"task": "multi-label"}
    exact = {"head": {"mean": 0.5}}
    without = {"settings": several_labels, "accuracy": exact, "metrics": {}}
    with_auc = without | {"metrics": {"head/auc": {"mean": 0.7}}}

    assert results_in_common([with_auc, with_auc]) == 2 * [Result("head/auc", "AUC")]
    assert results_in_common([with_auc, without]) == 2 * [Result("head", "exact match")]


def test_a_label_that_too_few_samples_test_is_named_with_the_reason():
    final = row_of(1, ["a"])
    sites = {"classes": ["no a", "a"], "sites": {}}
    *_, warned = outcome_warnings([final], final, sites, "label-auc", least=5)
    assert warned.endswith("or all lack it, or too few of them do (min-class-samples = 5)")

"""Figures beside test accuracy in whole runs: validation data, and balanced accuracy."""

import json
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
from flwr.app import MessageType

from client_app.app import evaluate_model
from client_app.learning.evaluation import Evaluation
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.models.trained import TrainedModel
from protofl_common.report import charts
from protofl_common.report.page import page
from protofl_common.report.reading import RecordedRun
from protofl_common.runs.folder import BEST, WEIGHTS
from protofl_common.runs.over_clients import over_clients
from protofl_common.tools.tables.figure import Figure
from tests.support.accidents import Killed, on_message
from tests.support.commands import export_model, output
from tests.support.harness import RUN_ID, federate, run_config, run_federation
from tests.support.plain import assert_equal
from tests.support.results import without_times


@pytest.fixture(autouse=True)
def _one_figure(monkeypatch):
    """Let a report have one figure: all take seconds a page, and `tests/unit/report` draws them."""
    monkeypatch.setattr("protofl_common.report.page.FIGURES", {"Accuracy": (charts.means,)})


def north_and_south(folder):
    """Return node configs of two sites whose tables mark their test and validation samples."""
    own = {"dataset": "arrays", "classes": "0,1", "test-from": "official-own"}
    nodes = {}
    for number, site in enumerate(SITES):
        places = {"data-dir": f"{folder}/{site}.csv", "state-dir": f"{folder}/{site}"}
        nodes[number] = own | {"site-name": site} | places
    return nodes


SITES = ("north", "south")
SMALL = {"models": "mnist-cnn", "train_samples": 20, "test_samples": 20}


@pytest.mark.parametrize("algo", ["fedproto", "fedrep"])
def test_validation_figures_stand_beside_those_of_test_data(algo, tmp_path, capsys):
    """In the rows, the summary, what is printed, and the report.

    Each of three clients has 20 training samples, of which 30 % (6) are for validation.
    """
    config = run_config(
        tmp_path,
        algo=algo,
        callback="tensorboard",
        validation_fraction=0.3,
        metrics="auc",
        early_stopping_metric="head/auc",
        **SMALL,
    )
    outcome = run_federation(config, clients=3)

    assert not outcome.trouble

    for row in outcome.rows:
        clients = row["clients"].values()
        assert set(row["validation"]) == {*row["accuracy"], *row["metrics"]}
        for name, figures in row["validation"].items():
            values = [client["validation"][name] for client in clients]
            assert figures == pytest.approx(over_clients(values, test_samples=[6, 6, 6]))
        for client in clients:
            assert (client["train-samples"], client["validation-samples"]) == (14, 6)

    assert outcome.summary["validation"] == outcome.rows[-1]["validation"]
    for best in outcome.summary["best-accuracy"].values():
        assert best["chosen-on"] == "validation"

    means = [row["validation"]["head/auc"]["mean"] for row in outcome.rows]
    best_round = {"metric": "head/auc", "after": means.index(max(means)), "on": "validation"}

    assert outcome.summary["best-round"] == best_round

    printed = capsys.readouterr().out
    domains = "1 × photo, 1 × printed, 1 × scanned"

    assert f"3 clients · 10 classes · partition feature-shift ({domains})\n" in printed

    # 14, 6 and 20 samples of each of three clients
    training = "2,500 found · 42 for training (train-samples = 20 a client)"
    assert f"{training} · 18 for validation · 60 for testing" in printed
    assert "chosen on validation data" in printed
    assert "head, validation" in printed
    assert "validation head " in printed

    shown = page(RecordedRun(outcome.folder))
    assert "chosen on validation data" in shown
    assert "Validation: the mean on their validation data." in unescape(shown)
    assert "<td>head, validation</td>" in shown


def test_clients_too_small_for_validation_are_told(tmp_path, capsys):
    """South's table marks no validation samples; figures on validation data are those of north."""
    rows = ["label,split,x", *(f"{i % 2},train,{i}" for i in range(8)), "0,test,1", "1,test,2"]
    (tmp_path / "south.csv").write_text("\n".join(rows))
    (tmp_path / "north.csv").write_text("\n".join([*rows, "1,validation,3", "0,validation,4"]))
    own = {"dataset": "arrays", "partition": "own", "models": "table3", "num_clients": 2}

    outcome = federate(tmp_path, nodes=north_and_south(tmp_path), **own, rounds=1)

    printed = capsys.readouterr().out
    training = "22 found · 16 for training (train-samples = 30 a client)"

    assert f"{training} · 2 for validation · 4 for testing · none" in printed
    assert "or without any marked, so that all stay for training: south" in printed

    final = outcome.rows[-1]
    assert "validation" not in final["clients"]["south"]
    assert final["validation"]["head"]["mean"] == final["clients"]["north"]["validation"]["head"]
    assert outcome.summary["best-accuracy"]["head"]["chosen-on"] == "validation"


def write_planted(folder, **settings):
    """Write the tables of two sites, and return the settings of a run on them.

    Validation samples have the label of the other class, so the better a model is on test data,
    the worse it is on validation data.
    """
    drawing = np.random.default_rng(3)
    folder.mkdir(exist_ok=True)
    for site in SITES:
        lines = ["label,split,x,y"]
        for split, samples in (("train", 24), ("test", 20), ("validation", 20)):
            for number in range(samples):
                place = number % 2  # the two classes lie around (-1, -1) and (1, 1)
                x, y = drawing.normal(1.0 if place else -1.0, 1.0, 2)
                label = 1 - place if split == "validation" else place
                lines.append(f"{label},{split},{x:.3f},{y:.3f}")
        (folder / f"{site}.csv").write_text("\n".join(lines))
    small = {
        "dataset": "arrays",
        "partition": "own",
        "models": "table3",
        "train_samples": 0,
        "num_clients": 2,
        "seed": 1,
        "rounds": 8,
        "lr": 0.01,
        "keep_best": True,
        "run_name": "mine",
    }
    return run_config(folder, **small | settings)


def run_planted(folder, **settings):
    """Run on the tables of `write_planted` at both sites."""
    return run_federation(write_planted(folder, **settings), nodes=north_and_south(folder))


def best_round_of(outcome, where):
    """Return after which round the mean accuracy of the clients was highest, the first of several.

    ``where`` is ``accuracy`` (on test data) or ``validation``. Row 0 is evaluated before training.
    """
    means = [row[where]["head"]["mean"] for row in outcome.rows]
    return means.index(max(means))


def kept_model(folder, site="north", file_name=BEST):
    """Return the best model that a site has kept of its only run, or another that it has stored."""
    (file,) = folder.glob(f"{site}/mine-*/clients/{site}/{file_name}")
    return TrainedModel.read(file)


PLANTED = (3, 2, 9, 4, 4, 4, 9, 4)
"""Numbers of right predictions on validation data, one for each evaluation.

The first highest is that of the third evaluation, after two rounds.
"""


@pytest.mark.parametrize(("algo", "scripted"), [("fedavg", ()), ("fedproto", PLANTED)])
def test_validation_data_decide(algo, scripted, tmp_path, monkeypatch, capsys):
    """They decide which round is best, when a run stops early, and which model is kept.

    For FedAvg the data are such that test data would choose another round. For FedProto the numbers
    of right predictions on validation data are made up, `PLANTED`.
    """

    def evaluate_as_planted(work, algorithm):
        correct = {}
        if len(work.validation_set):
            correct["head"] = scripted[algorithm.round - 1]
        return replace(evaluate_model(work, algorithm), validated=Evaluation(correct))

    if scripted:
        monkeypatch.setattr("client_app.app.evaluate_model", evaluate_as_planted)

    # all rounds: the best on validation data is not the best on test data
    whole = run_planted(tmp_path / "whole", algo=algo)
    best = best_round_of(whole, "validation")

    assert best_round_of(whole, "accuracy") > best + 2

    mean = whole.rows[best]["accuracy"]["head"]["mean"]
    found = whole.summary["best-accuracy"]["head"]

    assert found == {"mean": mean, "after-round": best, "chosen-on": "validation"}
    assert whole.summary["best-round"] == {"metric": "head", "after": best, "on": "validation"}
    assert Figure(when="best").read(whole.folder) == pytest.approx(100 * mean)

    # stopped once two evaluations were no better than the best; each is of the round before
    stopped = run_planted(tmp_path / "stopped", algo=algo, early_stopping=2)
    last = best + 2 + 1

    assert stopped.per_row("round") == [*range(1, last + 1), last]
    assert stopped.rows[-1]["evaluated-after-round"] == last
    assert without_times(stopped.rows[:-1]) == without_times(whole.rows[:last])
    assert stopped.summary["rounds"] == last
    assert stopped.summary["stopped-early"] is True
    assert f"stopped early after round {last} of 8" in capsys.readouterr().out

    tile = f"<b>{last} of 8</b><span>rounds, stopped early</span>"
    assert tile in page(RecordedRun(stopped.folder))

    # the model that is kept is that of the best round
    accuracy = whole.rows[best]["clients"]["north"]["accuracy"]["head"]
    for run in (tmp_path / "whole", tmp_path / "stopped"):
        card = kept_model(run).card
        assert card.round == best
        assert (card.chosen_on, card.calibrated_on) == ("validation", "validation")
        assert card.accuracy["head"] == accuracy
        assert not list(run.rglob("evaluated-*"))
    if best:  # a run of so many rounds ends with that model
        until = run_planted(tmp_path / "until", algo=algo, rounds=best)
        assert until.rows[-1]["evaluated-after-round"] == best
        last_model = kept_model(tmp_path / "until", file_name=WEIGHTS)
        assert_equal(last_model.weights, kept_model(tmp_path / "whole").weights)


@pytest.mark.parametrize(("kind", "number"), [(MessageType.TRAIN, 2), (MessageType.EVALUATE, None)])
def test_early_stopping_and_the_kept_model_survive_a_stop(kind, number, tmp_path):
    """The server is killed in the second round, or in the final evaluation."""
    wanted = run_planted(tmp_path / "whole", early_stopping=2)
    config = write_planted(tmp_path / "stopped", early_stopping=2)
    nodes = north_and_south(tmp_path / "stopped")

    killed_in = number or wanted.summary["rounds"]
    with pytest.raises(Killed):
        run_federation(config, tamper=on_message(kind, killed_in), nodes=nodes)

    found = run_federation(config | {"resume": True}, nodes=nodes, run_id=RUN_ID + 1)

    assert without_times(found.rows) == without_times(wanted.rows)
    assert found.summary["best-round"] == wanted.summary["best-round"]
    assert kept_model(tmp_path / "stopped").card == kept_model(tmp_path / "whole").card
    assert_equal(kept_model(tmp_path / "whole").weights, kept_model(tmp_path / "stopped").weights)


def test_keeping_the_best_model_changes_nothing_and_needs_no_validation_data(tmp_path, capsys):
    """Without validation data the best model is chosen on test data.

    The run, its report and the exported model say so.
    """
    learn = SMALL | {"algo": "fedrep", "rounds": 3}
    plain = federate(tmp_path / "plain", clients=2, **learn)
    keeping = federate(tmp_path / "keep", clients=2, **learn, keep_best=True)

    assert without_times(plain.rows) == without_times(keeping.rows)
    for best in plain.summary["best-accuracy"].values():
        assert best["chosen-on"] == "test"
    assert not any("validation" in row for row in plain.rows)
    assert "chosen on test data" in capsys.readouterr().out
    assert "chosen on test data" in page(RecordedRun(plain.folder))

    best = keeping.summary["best-round"]
    assert best == {"metric": "head", "after": best_round_of(keeping, "accuracy"), "on": "test"}
    assert not list(plain.folder.glob(f"clients/*/{BEST}"))

    model = export_model(keeping.folder, tmp_path / "model", "site-1", "--best")

    chosen = f"after round {best['after']}, chosen as the best on test data"
    assert chosen in capsys.readouterr().out

    about = (model / "README.md").read_text()
    assert "after the best round, chosen on test data:" in about
    assert "What was chosen on test data makes these figures a little too high." in about
    assert json.loads((model / "model.json").read_text())["chosen-on"] == "test"

    refused = output(capsys, "export", plain.folder, "--site", "site-1", "--best", status=1).err
    assert "clients keep them with keep-best = true" in refused


@pytest.mark.parametrize(("settings", "reason"), [
    ({"early_stopping_metric": "loss"},
     "early-stopping-metric = 'loss': choose head, prototype, or one of"),
    ({"early_stopping_metric": "head/auc"}, "early-stopping-metric = 'head/auc': choose"),
    ({"early_stopping_metric": "/auc", "metrics": "auc"}, "early-stopping-metric = '/auc': choose"),
    ({"algo": "protofed", "early_stopping": 3},
     "early-stopping = 3: protofed does a part of its work in the last"),
    ({"validation_fraction": 1.0},
     "validation-fraction = 1.0: must be a number at least 0 and at most 0.9"),
    ({"early_stopping": 3},
     "early-stopping = 3: no client has validation samples; set validation-fraction"),
    ({"early_stopping_metric": "prototype", "algo": "local", "rounds": 3},
     "early-stopping-metric = 'prototype': this run measures head"),
    ({"early_stopping_metric": "head/auc", "metrics": "auc", "min_class_samples": 2, "rounds": 3},
     "= 'head/auc': this run measures head, prototype; too few test samples of each class "
     "(min-class-samples)"),
])  # fmt: skip
def test_settings_of_early_stopping_and_validation_that_cannot_be_are_refused(
    settings, reason, tmp_path
):
    with pytest.raises(SettingsError) as error:
        federate(tmp_path, clients=2, **SMALL, **settings)
    assert reason in str(error.value)


@pytest.mark.parametrize("secagg", [False, True])
def test_a_metric_that_validation_data_never_give_cannot_end_a_run(secagg, tmp_path):
    """All validation samples are of class 1, so they have no AUC: early-stopping is refused."""
    parts = ("train,0", "train,1", "test,0", "test,1", "validation,1")
    lines = ["client,split,label,x"]
    for site in "abc":
        for part in parts:
            lines += [f"{site},{part},{n % 7}" for n in range(9)]
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(lines))
    config = run_config(
        tmp_path,
        dataset="arrays",
        data_dir=str(file),
        partition="natural",
        models="mlp-1",
        train_samples=0,
        algo="fedavg",
        metrics="auc",
        early_stopping=1,
        early_stopping_metric="head/auc",
        rounds=4,
        secagg=secagg,
    )

    no_figure = "early-stopping = 1: no client has head/auc on validation data"
    with pytest.raises(SettingsError, match=no_figure):
        run_federation(config, clients=3)


def test_a_round_without_an_evaluation_does_not_say_that_a_figure_is_missing(tmp_path):
    """A run does not end because its first rounds lack the figure of early-stopping-metric.

    In the first round there are no prototypes to predict with, and in the second no evaluation.
    """
    settings = SMALL | {"rounds": 3, "early_stopping_metric": "prototype", "evaluate_every": 3}
    best = federate(tmp_path, clients=2, **settings).summary["best-round"]

    assert best is not None
    assert best["metric"] == "prototype"


@pytest.mark.long
@pytest.mark.parametrize("algo", CATALOG)
def test_every_algorithm_stops_early_and_keeps_its_best_model(algo, tmp_path):
    """With a learning rate of next to nothing the next round is no better, and the run stops.

    Where the server trains, it may go on.
    """
    settings = SMALL | {
        "algo": algo,
        "validation_fraction": 0.3,
        "early_stopping": 1,
        "keep_best": True,
        "rounds": 4,
        "lr": 1e-6,
    }
    if algo == "protofed":
        settings["protofed__prototypes"] = "every-round"

    outcome = federate(tmp_path, clients=3, **settings)

    assert not outcome.trouble

    best = outcome.summary["best-round"]
    assert best["on"] == "validation"
    assert best["metric"] == ("prototype" if algo == "fedpcl" else "head")
    assert outcome.summary["rounds"] in (best["after"] + 2, 4)

    models = [TrainedModel.read(file) for file in outcome.folder.glob(f"clients/*/{BEST}")]
    assert [model.card.round for model in models] == [best["after"]] * 3


def run_with_class_sizes(folder, counts, nodes=None, **settings):
    """Make a run of one round of FedProto on a table with so many samples of two classes."""
    file = folder / "data.npz"
    labels = np.repeat([0, 1], counts)
    inputs = np.random.default_rng(0).normal(size=(len(labels), 4))
    np.savez(file, inputs=inputs, labels=labels)
    data = {
        "dataset": "arrays",
        "data_dir": str(file),
        "classes": "a,b",
        "partition": "iid",
        "models": "mlp-1",
    }
    return federate(folder, clients=3, nodes=nodes, algo="fedproto", rounds=1, **data | settings)


def test_balanced_accuracy_stands_everywhere(tmp_path, capsys, monkeypatch):
    """Where one class has more than twice the samples of another, it is measured unasked.

    It stands in the rows, in what is printed and in the report.
    """
    name = "head/balanced-accuracy"
    figures = {"Metrics": (charts.metrics,)}  # all take seconds
    monkeypatch.setattr("protofl_common.report.page.FIGURES", figures)

    outcome = run_with_class_sizes(tmp_path, (130, 60))

    metrics = outcome.summary["metrics"]
    assert set(metrics) == {"prototype/balanced-accuracy", name}

    clients = outcome.rows[-1]["clients"].values()
    mean = np.mean([client["metrics"][name] for client in clients])

    assert metrics[name]["mean"] == pytest.approx(mean)
    assert name in capsys.readouterr().out
    assert name in page(RecordedRun(outcome.folder))


@pytest.mark.parametrize(
    ("most", "settings"), [(120, {}), (130, {"secagg": True}), (130, {"dp": "sample"})]
)
def test_even_or_hidden_classes_have_no_balanced_accuracy(most, settings, tmp_path):
    """Not with 120 samples beside 60, nor where protections hide how many there are of each."""
    assert not run_with_class_sizes(tmp_path, (most, 60), **settings).summary["metrics"]


def test_no_site_with_an_operator_sends_balanced_accuracy_unasked(tmp_path):
    own = {"dataset": "arrays", "data-dir": str(tmp_path / "data.npz"), "classes": "a,b"}
    nodes = {1000 + n: {"site-name": f"site-{n}", "arch": "mlp-1", **own} for n in range(2)}
    assert not run_with_class_sizes(
        tmp_path, (130, 60), nodes, partition="own", num_clients=2
    ).summary["metrics"]

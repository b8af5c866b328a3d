"""Figures beside accuracy on test data in whole runs: a validation part, who chooses by it, and balanced accuracy."""

import json
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MessageType

from client_app.app import Visit
from client_app.evaluation import Evaluation
from client_app.trained_model import Evaluated
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.models.trained import TrainedModel
from protofl_common.report import charts
from protofl_common.report.page import page
from protofl_common.report.reading import RecordedRun
from protofl_common.runs.folder import BEST, WEIGHTS
from protofl_common.runs.over_clients import over_clients
from protofl_common.tools.cli import main
from protofl_common.tools.tables.figure import Figure
from tests.support.accidents import Killed, on_message
from tests.support.given import Patch, Printed
from tests.support.harness import RUN_ID, Outcome, run_config, run_federation
from tests.support.results import without_times


@pytest.fixture(autouse=True)
def _one_figure(monkeypatch: Patch) -> None:
    """All of them take seconds a page; `tests/unit/report` draws them."""
    monkeypatch.setattr("protofl_common.report.page.FIGURES", {"Accuracy": (charts.means,)})


def north_and_south(folder: Path) -> dict[int, dict[str, Any]]:
    """Node configs of sites whose tables mark their test and validation samples."""
    own = {"dataset": "arrays", "classes": "0,1", "test-from": "official-own"}
    places = {
        site: {"data-dir": f"{folder}/{site}.csv", "state-dir": f"{folder}/{site}"}
        for site in SITES
    }
    return {number: own | {"site-name": site} | places[site] for number, site in enumerate(SITES)}


SITES = ("north", "south")
SMALL: dict[str, Any] = {"models": "mnist-cnn", "train_samples": 20, "test_samples": 20}


@pytest.mark.parametrize("algo", ["fedproto", "fedrep"])
def test_validation_figures_stand_beside_those_of_test_data(
    algo: str, tmp_path: Path, capsys: Printed
) -> None:
    more = {"validation_fraction": 0.3, "metrics": "auc", "early_stopping_metric": "head/auc"}
    outcome = run_federation(
        run_config(tmp_path, algo=algo, callback="tensorboard", **SMALL, **more), clients=3
    )
    assert not any(outcome.summary["trouble"].values())
    for row in outcome.rows:
        assert set(row["validation"]) == {*row["accuracy"], *row["metrics"]}
        for name, figures in row["validation"].items():
            values = [client["validation"][name] for client in row["clients"].values()]
            assert figures == pytest.approx(over_clients(values, [6, 6, 6]))
        assert {
            (one["train-samples"], one["validation-samples"]) for one in row["clients"].values()
        } == {(14, 6)}
    assert outcome.summary["validation"] == outcome.rows[-1]["validation"]
    assert {best["chosen-on"] for best in outcome.summary["best-accuracy"].values()} == {
        "validation"
    }
    means = [row["validation"]["head/auc"]["mean"] for row in outcome.rows]
    assert outcome.summary["best-round"] == {
        "metric": "head/auc",
        "after": means.index(max(means)),
        "on": "validation",
    }
    said = capsys.readouterr().out
    assert (
        "3 clients · 10 classes · partition feature-shift (1 × photo, 1 × printed, 1 × scanned)\n"
        in said
    )
    assert (
        "2,500 found · 42 for training (train-samples = 20 a client) · 18 for validation · 60 for testing"
        in said
    )
    for text in ("chosen on validation data", "head, validation", "validation head "):
        assert text in said
    shown = page(RecordedRun(outcome.folder))
    assert "chosen on validation data" in shown
    assert "Validation: the mean on their validation data." in unescape(shown)
    assert "<td>head, validation</td>" in shown


def test_clients_too_small_for_validation_are_told(tmp_path: Path, capsys: Printed) -> None:
    """Others have a part of their own; figures on validation data are over those."""
    rows = ["label,split,x", *(f"{i % 2},train,{i}" for i in range(8)), "0,test,1", "1,test,2"]
    for site in SITES:
        more = ["1,validation,3", "0,validation,4"] if site == "north" else []
        (tmp_path / f"{site}.csv").write_text("\n".join([*rows, *more]))
    own = {"dataset": "arrays", "partition": "own", "models": "table3", "num_clients": 2}
    outcome = run_federation(run_config(tmp_path, **own, rounds=1), nodes=north_and_south(tmp_path))
    said = capsys.readouterr().out
    assert (
        "22 found · 16 for training (train-samples = 30 a client) · 2 for validation · 4 for testing · none"
        in said
    )
    assert "or without any marked, so that all stay for training: south" in said
    final = outcome.rows[-1]
    assert "validation" not in final["clients"]["south"]
    assert final["validation"]["head"]["mean"] == final["clients"]["north"]["validation"]["head"]
    assert outcome.summary["best-accuracy"]["head"]["chosen-on"] == "validation"


def planted(folder: Path, **more: Any) -> tuple[Any, ...]:
    """A run of two sites whose validation samples have the labels of the other class: `run_federation`'s arguments."""
    drawing = np.random.default_rng(3)
    for site in SITES:
        lines = ["label,split,x,y"]
        for split, samples in (("train", 24), ("test", 20), ("validation", 20)):
            for number in range(samples):
                x, y = drawing.normal(1.0 if number % 2 else -1.0, 1.0, 2)
                lines.append(f"{(number + (split == 'validation')) % 2},{split},{x:.3f},{y:.3f}")
        folder.mkdir(exist_ok=True)
        (folder / f"{site}.csv").write_text("\n".join(lines))
    own = {
        "dataset": "arrays",
        "partition": "own",
        "models": "table3",
        "train_samples": 0,
        "num_clients": 2,
        "seed": 1,
    }
    small = {"rounds": 8, "lr": 0.01, "keep_best": True, "run_name": "mine"}
    return run_config(folder, **own | small | more), len(SITES), None, north_and_south(folder)


def best_of_run(outcome: Outcome, where: str) -> int:
    """After which round the mean over the clients was the highest, the first of several."""
    means = [row[where]["head"]["mean"] for row in outcome.rows]
    return means.index(max(means))


def kept(folder: Path, site: str = "north") -> TrainedModel:
    (file,) = folder.glob(f"{site}/mine-*/clients/{site}/{BEST}")
    return TrainedModel.read(file)


@pytest.mark.parametrize(
    ("algo", "scripted"), [("fedavg", ()), ("fedproto", (3, 2, 9, 4, 4, 4, 9, 4))]
)
def test_validation_data_decide(
    algo: str, scripted: Any, tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    """On planted data, and with planted numbers of right predictions on validation data after each round."""
    evaluate = Visit.evaluate

    def right(self: Visit) -> Evaluated:
        validated = Evaluation(
            {"head": scripted[self.algorithm.round - 1]} if len(self.client.validation_set) else {}
        )
        self.evaluated = replace(evaluate(self), validated=validated)
        return self.evaluated

    if scripted:
        monkeypatch.setattr(Visit, "evaluate", right)
    whole = run_federation(*planted(tmp_path / "whole", algo=algo))
    best = best_of_run(whole, "validation")
    assert best_of_run(whole, "accuracy") > best + 2
    found, mean = (
        whole.summary["best-accuracy"]["head"],
        whole.rows[best]["accuracy"]["head"]["mean"],
    )
    assert found == {"mean": mean, "after-round": best, "chosen-on": "validation"}
    assert whole.summary["best-round"] == {"metric": "head", "after": best, "on": "validation"}
    assert Figure(when="best").read(whole.folder) == pytest.approx(100 * found["mean"])
    stopped = run_federation(*planted(tmp_path / "stopped", algo=algo, early_stopping=2))
    assert [row["round"] for row in stopped.rows] == [*range(1, best + 4), best + 3]
    assert stopped.rows[-1]["evaluated-after-round"] == best + 3
    assert without_times(stopped.rows[:-1]) == without_times(whole.rows[: best + 3])
    assert (stopped.summary["rounds"], stopped.summary["stopped-early"]) == (best + 3, True)
    assert f"stopped early after round {best + 3} of 8" in capsys.readouterr().out
    assert f"<b>{best + 3} of 8</b><span>rounds, stopped early</span>" in page(
        RecordedRun(stopped.folder)
    )
    for run in ("whole", "stopped"):
        card = kept(tmp_path / run).card
        assert (card.round, card.chosen_on, card.calibrated_on) == (
            best,
            "validation",
            "validation",
        )
        assert card.accuracy["head"] == whole.rows[best]["clients"]["north"]["accuracy"]["head"]
        assert len(list((tmp_path / run).rglob("evaluated-*"))) == 0
    if best:
        until = run_federation(*planted(tmp_path / "until", algo=algo, rounds=best))
        assert until.rows[-1]["evaluated-after-round"] == best
        (file,) = tmp_path.glob(f"until/north/mine-*/clients/north/{WEIGHTS}")
        last = TrainedModel.read(file)
        assert all(
            torch.equal(last.weights[name], value)
            for name, value in kept(tmp_path / "whole").weights.items()
        )


@pytest.mark.parametrize("place", [(MessageType.TRAIN, 2), (MessageType.EVALUATE, None)])
def test_early_stopping_and_the_kept_model_survive_a_stop(
    place: tuple[str, int | None], tmp_path: Path
) -> None:
    wanted = run_federation(*planted(tmp_path / "whole", early_stopping=2))
    config, *_, nodes = planted(tmp_path / "stopped", early_stopping=2)
    kind, number = place
    with pytest.raises(Killed):
        run_federation(config, 2, on_message(kind, number or wanted.summary["rounds"]), nodes)
    found = run_federation(config | {"resume": True}, 2, None, nodes, run_id=RUN_ID + 1)
    assert without_times(found.rows) == without_times(wanted.rows)
    assert found.summary["best-round"] == wanted.summary["best-round"]
    models = [kept(tmp_path / name) for name in ("whole", "stopped")]
    assert models[0].card == models[1].card
    assert all(
        torch.equal(models[0].weights[name], value) for name, value in models[1].weights.items()
    )


def test_keeping_the_best_model_changes_nothing_and_needs_no_validation_data(
    tmp_path: Path, capsys: Printed
) -> None:
    """In a simulation. What is best says, as the exported model does, that it was chosen on test data."""
    learn = SMALL | {"algo": "fedrep", "rounds": 3}
    plain, keeping = (
        run_federation(run_config(tmp_path / str(keep), **learn, keep_best=keep), clients=2)
        for keep in (False, True)
    )
    assert without_times(plain.rows) == without_times(keeping.rows)
    assert {best["chosen-on"] for best in plain.summary["best-accuracy"].values()} == {"test"}
    assert not any("validation" in row for row in plain.rows)
    for shown in (capsys.readouterr().out, page(RecordedRun(plain.folder))):
        assert "chosen on test data" in shown
    best = keeping.summary["best-round"]
    assert best == {"metric": "head", "after": best_of_run(keeping, "accuracy"), "on": "test"}
    assert not list(plain.folder.glob(f"clients/*/{BEST}"))
    assert (
        main(
            [
                "export",
                str(keeping.folder),
                "--site",
                "site-1",
                "--best",
                "--out",
                str(tmp_path / "model"),
            ]
        )
        == 0
    )
    about = (tmp_path / "model" / "README.md").read_text()
    assert "after the best round, chosen on test data:" in about
    assert "What was chosen on test data makes these figures a little too high." in about
    assert (
        f"after round {best['after']}, chosen as the best on test data" in capsys.readouterr().out
    )
    assert json.loads((tmp_path / "model" / "model.json").read_text())["chosen-on"] == "test"
    assert main(["export", str(plain.folder), "--site", "site-1", "--best"]) == 1
    assert "clients keep them with keep-best = true" in capsys.readouterr().err


@pytest.mark.parametrize(("settings", "said"), [
    ({"early_stopping_metric": "loss"}, "early-stopping-metric = 'loss': choose head, prototype, or one of"),
    ({"early_stopping_metric": "head/auc"}, "early-stopping-metric = 'head/auc': choose"),
    ({"algo": "protofed", "early_stopping": 3}, "early-stopping = 3: protofed does a part of its work in the last"),
    ({"validation_fraction": 1.0}, "validation-fraction = 1.0: must be a number at least 0 and at most 0.9"),
    ({"early_stopping": 3}, "early-stopping = 3: no client has validation samples; set validation-fraction"),
    ({"early_stopping_metric": "prototype", "algo": "local", "rounds": 3},
     "early-stopping-metric = 'prototype': this run measures head"),
    ({"early_stopping_metric": "head/auc", "metrics": "auc", "min_class_samples": 2, "rounds": 3},
     "= 'head/auc': this run measures head, prototype; too few test samples of each class (min-class-samples)"),
])  # fmt: skip
def test_what_cannot_be_is_told(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        run_federation(run_config(tmp_path, **SMALL, **settings), clients=2)
    assert said in str(error.value)


@pytest.mark.parametrize("secagg", [False, True])
def test_a_metric_that_validation_data_never_give_cannot_end_a_run(
    secagg: bool, tmp_path: Path
) -> None:
    split = [
        "train,0",
        "train,1",
        "test,0",
        "test,1",
        "validation,1",
    ]  # of one class there is no AUC
    lines = [f"{site},{part},{n % 7}" for site in "abc" for part in split for n in range(9)]
    (file := tmp_path / "mine.csv").write_text("\n".join(["client,split,label,x", *lines]))
    data = {
        "dataset": "arrays",
        "data_dir": str(file),
        "partition": "natural",
        "models": "mlp-1",
        "train_samples": 0,
    }
    wanted = {
        "algo": "fedavg",
        "metrics": "auc",
        "early_stopping": 1,
        "early_stopping_metric": "head/auc",
    }
    with pytest.raises(
        SettingsError, match="early-stopping = 1: no client has head/auc on validation data"
    ):
        run_federation(run_config(tmp_path, **data, **wanted, rounds=4, secagg=secagg), clients=3)


def test_a_round_without_an_evaluation_does_not_say_that_a_figure_is_missing(
    tmp_path: Path,
) -> None:
    """There are no prototypes in the first round, nor an evaluation in the second."""
    config = run_config(
        tmp_path, **SMALL | {"rounds": 3}, early_stopping_metric="prototype", evaluate_every=3
    )
    best = run_federation(config, clients=2).summary["best-round"]
    assert best is not None
    assert best["metric"] == "prototype"


@pytest.mark.long
@pytest.mark.parametrize("algo", CATALOG)
def test_every_algorithm_stops_early_and_keeps_its_best_model(algo: str, tmp_path: Path) -> None:
    """A learning rate of next to nothing; servers that train may still improve."""
    every = {"protofed__prototypes": "every-round"} if algo == "protofed" else {}
    more = {
        "algo": algo,
        "validation_fraction": 0.3,
        "early_stopping": 1,
        "keep_best": True,
        "rounds": 4,
        "lr": 1e-6,
    }
    outcome = run_federation(run_config(tmp_path, **SMALL, **more, **every), clients=3)
    assert not any(outcome.summary["trouble"].values())
    best = outcome.summary["best-round"]
    assert (best["on"], best["metric"]) == (
        "validation",
        "prototype" if algo == "fedpcl" else "head",
    )
    assert outcome.summary["rounds"] == best["after"] + 2 or outcome.summary["rounds"] == 4
    models = [TrainedModel.read(file) for file in outcome.folder.glob(f"clients/*/{BEST}")]
    assert [model.card.round for model in models] == [best["after"]] * 3


def uneven(folder: Path, counts: tuple[int, int], nodes: Any = None, **more: Any) -> Outcome:
    labels, file = np.repeat([0, 1], counts), folder / "data.npz"
    np.savez(file, inputs=np.random.default_rng(0).normal(size=(len(labels), 4)), labels=labels)
    data = {
        "dataset": "arrays",
        "data_dir": str(file),
        "classes": "a,b",
        "partition": "iid",
        "models": "mlp-1",
    }
    return run_federation(
        run_config(folder, algo="fedproto", rounds=1, **data | more), 3, nodes=nodes
    )


def test_balanced_accuracy_stands_everywhere(
    tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(
        "protofl_common.report.page.FIGURES", {"Metrics": (charts.metrics,)}
    )  # all take seconds
    outcome = uneven(tmp_path, (130, 60))
    assert set(outcome.summary["metrics"]) == {
        "prototype/balanced-accuracy",
        "head/balanced-accuracy",
    }
    by_client = [
        client["metrics"]["head/balanced-accuracy"]
        for client in outcome.rows[-1]["clients"].values()
    ]
    assert outcome.summary["metrics"]["head/balanced-accuracy"]["mean"] == pytest.approx(
        np.mean(by_client)
    )
    assert "head/balanced-accuracy" in capsys.readouterr().out
    assert "head/balanced-accuracy" in page(RecordedRun(outcome.folder))


@pytest.mark.parametrize(
    ("most", "settings"), [(120, {}), (130, {"secagg": True}), (130, {"dp": "sample"})]
)
def test_even_or_hidden_classes_have_no_balance(
    most: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert not uneven(tmp_path, (most, 60), **settings).summary["metrics"]


def test_no_site_with_an_operator_sends_balanced_accuracy_unasked(tmp_path: Path) -> None:
    own = {"dataset": "arrays", "data-dir": str(tmp_path / "data.npz"), "classes": "a,b"}
    nodes = {1000 + n: {"site-name": f"site-{n}", "arch": "mlp-1", **own} for n in range(2)}
    assert not uneven(tmp_path, (130, 60), nodes, partition="own", num_clients=2).summary["metrics"]

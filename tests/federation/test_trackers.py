"""Experiment trackers: each receives every round's figures, each once.

A missing package is one clear line.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from protofl_common.config.options import SettingsError
from server_app.callbacks.trackers import UserCallback, accuracies, other_figures, tracker
from tests.support.accidents import run_until_stopped
from tests.support.harness import (
    federate,
    refusal,
    run_config,
    run_federation,
    settings_of,
)

NAMES = ("mlflow", "trackio", "wandb")  # Beside TensorBoard, which writes files
SMALL = {"models": "cnn4", "train_samples": 20, "test_samples": 20, "run_name": "one"}


class Fake:
    """The functions of all three packages that are used, which note their calls."""

    def __init__(self):
        self.figures = {}
        self.config = {}
        self.started = []
        self.ended = 0

    def set_experiment(self, project): ...

    def start_run(self, run_name):
        self.started.append(run_name)

    def init(self, project, name, config):
        self.log_params(config)
        self.start_run(name)
        return self

    def log_params(self, config):
        self.config = config

    def log_metrics(self, figures, step):
        assert step >= max(self.figures, default=0)  # W&B drops what is of an earlier step
        self.figures.setdefault(step, {}).update(figures)

    log = log_metrics

    def end_run(self):
        self.ended += 1

    finish = end_run


def figures_wanted(run):
    """Return round -> the figures that a tracker must get of it.

    Accuracies belong to the round after which they were measured, all else to the round itself.
    """
    figures = {}
    for row in run.rows:
        figures.setdefault(row["evaluated-after-round"], {}).update(accuracies(row))
        if row["kind"] == "round":
            figures.setdefault(row["round"], {}).update(other_figures(row))
    return figures


@pytest.mark.parametrize("name", NAMES)
def test_every_round_arrives_and_nothing_of_a_single_client(name, tmp_path, monkeypatch):
    """A resumed run sends all rows once more. Settings go without paths and names of sites."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, name, fake)
    run = federate(tmp_path, clients=2, callback=name, **SMALL)

    assert fake.figures == figures_wanted(run)
    assert fake.started == ["one"]
    assert fake.ended == 1
    assert fake.config["algo"] == "fedproto"
    assert not {"data-dir", "cache-dir", "out-dir", "state-dir", "study-sites"} & fake.config.keys()
    assert "site-0" not in json.dumps([fake.figures, fake.config])
    assert not (run.folder / "tensorboard").exists()

    again = Fake()  # as a resumed run, which has all rows but the last
    monkeypatch.setitem(sys.modules, name, again)
    settings = settings_of(
        {
            "algo": "gaussian",
            "callback": name,
            "gaussian.start-from": "runs/one",
            "backbones": "file:small:/own.json",
        }
    )
    resumed = SimpleNamespace(settings=settings, folder=Path("one"), rows=run.rows[:-1])
    UserCallback(resumed).on_round(resumed, row=run.rows[-1], result=resumed)

    assert again.figures == fake.figures
    assert again.config["algo"] == "gaussian"
    assert not re.search("runs/one|own.json", json.dumps(again.config))


def test_an_unknown_tracker_is_refused_with_the_choices():
    choices = "mlflow, tensorboard, trackio, wandb, or module:function"
    assert f"callback = 'comet': must be {choices}" in refusal({"callback": "comet"})


@pytest.mark.parametrize("name", [*NAMES, "tensorboard"])
def test_a_trackers_missing_package_is_one_line(name, tmp_path, monkeypatch):
    """The run ends with that line before any client is asked."""
    package = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, package, None)
    grids = []

    with pytest.raises(SettingsError, match=re.escape(f"callback = '{name}': ")) as error:
        federate(tmp_path, clients=2, on_grid=grids.append, callback=name, **SMALL)

    assert f"pip install 'protofl[{name}]'" in str(error.value)
    assert not grids[0].log


@pytest.mark.parametrize("name", NAMES)
def test_a_trackers_package_that_cannot_start_is_one_line(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    with pytest.raises(SettingsError, match="it did not start"):
        tracker(name, Path("one"), {}, [])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_real_trackers_store_every_rounds_mean(name, tmp_path, monkeypatch):
    """The mean accuracy is found in the files that the package writes, without a network."""
    places = {
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path),
    }
    for variable, value in places.items():
        monkeypatch.setenv(variable, value)  # before the import, which reads it
    pytest.importorskip(name)

    figures = figures_wanted(federate(tmp_path, clients=2, callback=name, **SMALL))

    # before the first round, and after each of two
    means = {number: figures[number]["accuracy/head/mean"] for number in range(3)}
    found = {}
    if name == "mlflow":
        (file,) = tmp_path.rglob("metrics/accuracy/head/mean")
        for line in file.read_text().splitlines():
            _, mean, step = line.split()
            found[int(step)] = float(mean)
    elif name == "trackio":
        (file,) = tmp_path.glob("*.db")
        rows = sqlite3.connect(file).execute("select step, metrics from metrics")
        for step, text in rows.fetchall():
            row = json.loads(text)
            if "accuracy/head/mean" in row:
                found[step] = row["accuracy/head/mean"]
    else:  # W&B's file has figures as JSON between bytes of its own
        (file,) = tmp_path.rglob("run-*.wandb")
        content = file.read_bytes()
        for number, mean in means.items():
            if json.dumps(mean).encode() in content:
                found[number] = mean

    assert found == pytest.approx(means)


EVENTS = {
    **SMALL,
    "dataset": "digits",
    "partition": "iid",
    "algo": "fedtgp",
    "metrics": "auc",
    "rounds": 3,
    "callback": "tensorboard",
    "fedtgp__server_epochs": 2,
}


def scalars(outcome):
    """Return TensorBoard's figures: tag -> step -> value. No step may stand there twice."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(outcome.folder / "tensorboard"), {"scalars": 0})
    reader.Reload()
    found = {}
    for tag in reader.Tags()["scalars"]:
        events = reader.Scalars(tag)
        found[tag] = {event.step: event.value for event in events}
        assert len(found[tag]) == len(events), tag
    return found


def assert_complete(outcome):
    """TensorBoard's files have the figures of all rows.

    Rows are of rounds but for the last, the final evaluation, which has no losses.
    """
    found = scalars(outcome)

    for kind in ("head", "prototype"):
        rows = [row for row in outcome.rows if kind in row["accuracy"]]
        for name, tag in (("mean", "mean"), ("worst-10%", "worst-10-percent"), ("std", "std")):
            wanted = {row["evaluated-after-round"]: row["accuracy"][kind][name] for row in rows}
            assert found[f"accuracy/{kind}/{tag}"] == pytest.approx(wanted)
        auc = f"{kind}/auc"
        wanted = {row["evaluated-after-round"]: row["metrics"][auc]["mean"] for row in rows}
        assert found[f"metric/{auc}"] == pytest.approx(wanted)

    def each_round(value):
        return pytest.approx({row["round"]: value(row) for row in outcome.rows[:-1]})

    assert found["loss/total"] == each_round(lambda row: row["losses"]["total"])
    assert found["bytes/up"] == each_round(lambda row: row["bytes"]["up"])
    assert found["seconds/total"] == each_round(lambda row: row["seconds"]["total"])
    assert found["replies/refused"] == each_round(lambda row: len(row["refused"]))
    assert found["replies/valid"] == each_round(lambda row: row["valid"])
    assert found["server/margin"] == each_round(lambda row: row["server"]["margin"])


def test_a_resumed_run_has_each_round_once_in_tensorboard(tmp_path):
    """The server dies in round 2 before its checkpoint, so that the round is made again."""
    pytest.importorskip("tensorboard")
    config = run_config(tmp_path, **EVENTS)
    run_until_stopped(config, "before the checkpoint", number=2)

    assert_complete(run_federation(config | {"resume": True}, clients=4, run_id=7))

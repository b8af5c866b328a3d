"""A first run on data of one's own.

Nothing is left out unless asked for, and every sample is accounted for.
"""

import csv
import json
import re
import shlex
from dataclasses import replace
from html import escape

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image

import server_app.app
from client_app.app import app as client_app
from protofl_common.config.datasets import PARTITIONS
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import baselines_of, default_run_config
from protofl_common.report.page import write_report
from protofl_common.runs.figures import compared, sentence
from protofl_common.runs.folder import RunFolder, baseline_folder
from protofl_common.tools.arguments import read_assignments
from protofl_common.tools.cli import parsed
from server_app.network.membership import FederationError
from tests.support import ROOT
from tests.support.harness import CACHE, RUN_ID, reason_in, refusal, run_federation, settings_of

CLASSES = ("ant", "bee", "cat", "dog", "elk", "fox")
EACH = 20
"""Samples of each class."""


def write_pictures(folder):
    """Write six folders of twenty images, and return the path and class of each image."""
    rng = np.random.default_rng(0)
    paths = []
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(EACH):
            path = folder / name / f"{number:02d}.png"
            pixels = rng.integers(0, 40 * (label + 1), (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
            paths.append((path, name))
    return paths


def write_readme_data(folder):
    """Write what the README's commands name: photos/, images.csv (a list of them), patients.csv."""
    photos = [("file", "label")]
    for path, name in write_pictures(folder / "photos"):
        photos.append((str(path.relative_to(folder)), name))
    write_table(folder / "images.csv", photos)

    rng = np.random.default_rng(0)
    patients = [("a", "b", "c", "d", "label")]
    for label, name in enumerate(CLASSES):
        for _ in range(EACH):
            patients.append((*rng.normal(label, size=4).round(3), name))
    write_table(folder / "patients.csv", patients)


def write_own_table(tmp_path):
    """Write the README's data, and return the settings of a run on patients.csv."""
    write_readme_data(tmp_path)
    return {"dataset": "arrays", "data-dir": str(tmp_path / "patients.csv"), "models": "table3"}


def write_table(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def first_run(tmp_path, run_id=RUN_ID, **changes):
    """Run one round of three clients with the project's own defaults, but for ``changes``.

    Return the outcome, and the clients of its last row.
    """
    config = default_run_config() | {
        "rounds": 1,
        "report": False,
        "join-timeout": 20.0,
        "out-dir": str(tmp_path / "runs"),
        **CACHE,
        **changes,
    }
    outcome = run_federation(config, clients=3, run_id=run_id)
    return outcome, outcome.rows[-1]["clients"]


def quick_start():
    """Return the words of the README's commands for data of one's own."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _before, _, chapter = readme.partition("## Your own data")
    chapter, _, _after = chapter.partition("## ")
    commands = [line for line in chapter.splitlines() if "protofl " in line]
    return [shlex.split(command, comments=True) for command in commands]


@pytest.mark.parametrize("words", quick_start(), ids=lambda words: words[2])
def test_every_sample_is_used_and_told(words, tmp_path, capsys, monkeypatch):
    """A command of the README runs on data as it describes; three quarters are for training."""
    write_readme_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    _protofl, command, *options = words
    arguments = parsed(command, options)

    _, clients = first_run(tmp_path, **read_assignments(arguments.settings))

    assert len(clients) == arguments.clients

    train = sum(client["train-samples"] for client in clients.values())
    test = sum(client["test-samples"] for client in clients.values())

    assert train + test == len(CLASSES) * EACH
    assert 0.7 < train / (train + test) < 0.8

    line = f"samples: 120 found · {train} for training · {test} for testing · none left out"
    console = capsys.readouterr().out.splitlines()

    assert line in console
    # a table alone has columns
    assert ("inputs: the columns a, b, c, d together" in console) == ("dataset=arrays" in words)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"train-samples": 10},
            "120 found · 30 for training (train-samples = 10 a client) · 90 for testing · none",
        ),
        ({"total-samples": 60}, "60 left out (total-samples = 60)"),
        (
            {"test-samples": 5},
            "89 for training · 15 for testing · 16 left out (test-samples = 5)",
        ),
        (
            {"partition": "own"},
            "120 found · 270 for training · 90 for testing · some of them used by several clients",
        ),
        (
            {"algo": "local", "fedprox.mu": 2.0},
            "\nfedprox.mu = 2.0: has no effect on local, which reads no settings",
        ),
    ],
)
def test_what_is_left_out_or_idle_is_told(changes, told, tmp_path, capsys):
    """Samples that settings leave out, or use several times, and settings without effect."""
    first_run(tmp_path, **write_own_table(tmp_path) | changes)
    assert told in capsys.readouterr().out


def test_baselines_train_beside_the_run_and_do_not_change_it(tmp_path, capsys):
    """A run has the same accuracy with baselines, and a baseline that of a run of its own.

    FedAvg needs one architecture, so its baseline takes one of the two. The result is said in one
    sentence, on the console and in the report.
    """
    settings = {
        "dataset": "digits",
        "partition": "dirichlet",
        "alpha": 0.5,
        "total-samples": 90,
        "run-name": "mine",
        "algo": "fedproto-avg",
        "models": "mnist-cnn,htcnn-1",
    }
    named = "local, fedavg,fedproto"  # spaces do not matter

    with_them, _ = first_run(tmp_path / "with", **settings, baselines=named, report=True)
    console = capsys.readouterr().out
    alone, _ = first_run(tmp_path / "without", **settings)
    fedavg_by_itself, _ = first_run(tmp_path / "fedavg", **settings | {"algo": "fedavg"})

    assert with_them.summary["accuracy"] == alone.summary["accuracy"]

    folder = tmp_path / "with" / "runs" / "mine"
    summaries = {}
    for algo, architectures in (("local", 2), ("fedavg", 1), ("fedproto", 2)):
        summary = RunFolder(baseline_folder(folder, algo)).finished_summary()
        assert summary["settings"]["algo"] == algo
        assert len({client["arch"] for client in summary["clients"].values()}) == architectures
        summaries[algo] = summary

    assert summaries["fedavg"]["accuracy"] == fedavg_by_itself.summary["accuracy"]

    shown = sentence(compared(folder, summaries))
    both = r"[\d.]+ %( by its head, [\d.]+ % by prototypes)?"
    prototypes = rf"FedProto over 2 architectures {both}, FedProto \+ averaging {both}"
    wanted = (
        rf"alone over 2 architectures [\d.]+ %, FedAvg [\d.]+ %, {prototypes}; [\d.]+ .B exchanged"
    )

    assert re.fullmatch(wanted, shown)
    assert f"result: {shown}" in console.splitlines()
    assert escape(shown) in (folder / "report.html").read_text(encoding="utf-8")

    # baselines are found beside the run by its name
    moved = folder.rename(folder.with_name("new"))
    assert "baselines not found beside it: 3" in write_report(moved).read_text()


def test_the_sentence_names_prototypes_that_predict_better_than_the_head():
    """Not where they are better by less than a point, as 50.9 % beside 50.0 %."""

    def result(algo, **accuracy):
        """Return what the sentence needs of a run's summary."""
        return {
            "settings": {"algo": algo},
            "algorithm": CATALOG[algo].title,
            "accuracy": {kind: {"mean": share} for kind, share in accuracy.items()},
            "metrics": {},
            "clients": {},
            "bytes": {"up": 1000},
        }

    alone = result("local", head=0.343)

    similar = result("fedproto", prototype=0.509, head=0.5)
    assert sentence([alone, similar]) == "alone 34.3 %, FedProto 50.0 %; 1.0 kB exchanged"

    better = result("fedproto", prototype=0.777, head=0.147)
    said = "alone 34.3 %, FedProto 14.7 % by its head, 77.7 % by prototypes; 1.0 kB exchanged"

    assert sentence([alone, better]) == said


def test_a_baseline_that_cannot_go_on_costs_only_itself(tmp_path, capsys, monkeypatch):
    """The run itself has its results, and the console says why the baseline has none."""
    one_run = server_app.app.one_run

    def failing_baseline(grid, job):
        if job.baseline:
            raise FederationError("nobody came")
        one_run(grid, job)

    monkeypatch.setattr(server_app.app, "one_run", failing_baseline)
    settings = write_own_table(tmp_path) | {"run-name": "mine", "baselines": "local"}
    outcome, _ = first_run(tmp_path, **settings)

    assert outcome.folder.name == "mine"
    assert "baseline local: not finished: nobody came" in capsys.readouterr().out


def test_the_baseline_of_another_run_is_not_taken_for_this_ones(tmp_path):
    """A run called mine-local is there already: mine with the baseline local is refused at once."""
    other = tmp_path / "runs" / "mine-local"
    other.mkdir(parents=True)
    (other / "settings.toml").touch()

    settings = write_own_table(tmp_path) | {"run-name": "mine", "baselines": "local"}
    with pytest.raises(SettingsError, match=r"run-name = 'mine-local': .* holds a run already"):
        first_run(tmp_path, **settings)
    assert not (tmp_path / "runs" / "mine").exists()


def test_a_baseline_whose_settings_are_wrong_is_named():
    config = default_run_config() | {"secagg": True, "baselines": "local,fedtgp"}
    with pytest.raises(SettingsError, match=r"^baselines = 'fedtgp': secagg = true"):
        baselines_of(settings_of(config), config)


def test_a_baseline_that_sends_nothing_needs_no_merging():
    """The run's merging, which local would refuse, is that of its other baselines alone."""
    merging = {"merging": "median", "max-update-ratio": 2.0}
    config = default_run_config() | merging | {"baselines": "local,fedavg"}
    local, fedavg = baselines_of(settings_of(config), config).values()

    assert local.bounds.merging == "mean"
    assert fedavg.bounds.merging == "median"


def test_a_resumed_run_goes_on_with_its_baselines(tmp_path, monkeypatch):
    """A baseline that has finished is not made again; one without its summary goes on.

    Where the division of the data has changed since, no baseline can be compared: it is refused.
    """
    settings = write_own_table(tmp_path) | {"run-name": "mine", "baselines": "local,fedavg"}
    first_run(tmp_path, **settings)
    lost = tmp_path / "runs" / "mine-local" / "summary.json"
    kept = tmp_path / "runs" / "mine-fedavg" / "summary.json"
    accuracy = json.loads(lost.read_text())["accuracy"]
    time_written = kept.stat().st_mtime_ns
    lost.unlink()

    first_run(tmp_path, run_id=5, **settings, resume=True)

    assert kept.stat().st_mtime_ns == time_written
    assert json.loads(lost.read_text())["accuracy"] == accuracy

    monkeypatch.setitem(PARTITIONS, "iid", replace(PARTITIONS["iid"], version=2))
    with pytest.raises(SettingsError, match="'iid' has changed since"):
        first_run(tmp_path, run_id=6, **settings, resume=True)


def test_a_site_trains_only_baselines_that_the_run_names():
    """A server asks for another algorithm, for none, and for other settings of a named one."""
    # Flower's messages and contexts need the numbers of a task
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    config = default_run_config() | CACHE | {"baselines": "local"}
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 3}, RecordDict(), config)
    for content in ({"algo": "fedavg"}, {"algo": 1}, {"algo": "local", "lr": 9.0}):
        message = Message(RecordDict({"baseline": ConfigRecord(content)}), 1, MessageType.QUERY)
        message.metadata.__dict__["_message_id"] = "1"
        assert "baseline" in reason_in(client_app(message, context))

    said = refusal({"baselines": "locall"})
    assert re.search("baselines = 'locall': choose among .*did you mean local", said)

"""A first run on data of one's own: nothing is left out unless asked for, and every sample is accounted for."""

import csv
import json
import re
import shlex
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from PIL import Image

import server_app.app
from client_app.app import app as client_app
from protofl_common.config.datasets import REDIVIDED
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import baselines_of, default_run_config
from protofl_common.report.page import write_report
from protofl_common.runs.figures import compared, sentence
from protofl_common.runs.folder import RunFolder, baseline_folder
from protofl_common.tools.cli import parsed
from protofl_common.tools.cli.arguments import read_assignments
from server_app.network.membership import FederationError
from tests.support import ROOT
from tests.support.given import Patch, Printed
from tests.support.harness import CACHE, RUN_ID, refusal, run_federation, settings_of

CLASSES, EACH = ("ant", "bee", "cat", "dog", "elk", "fox"), 20


def pictures(folder: Path) -> list[tuple[Path, str]]:
    """Six folders of twenty images, and the path and class of each."""
    rng, made = np.random.default_rng(0), []
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(EACH):
            made.append((folder / name / f"{number:02d}.png", name))
            Image.fromarray(rng.integers(0, 40 * (label + 1), (16, 16, 3), dtype=np.uint8)).save(
                made[-1][0]
            )
    return made


def bring(folder: Path) -> None:
    """What the README's commands name: photos/, images.csv, which lists them, and patients.csv."""
    shown = [(path.relative_to(folder), name) for path, name in pictures(folder / "photos")]
    rng = np.random.default_rng(0)
    rows = [
        (*rng.normal(label, size=4).round(3), name)
        for label, name in enumerate(CLASSES)
        for _ in range(EACH)
    ]
    for file, lines in (
        ("images", [("file", "label"), *shown]),
        ("patients", [("a", "b", "c", "d", "label"), *rows]),
    ):
        with (folder / f"{file}.csv").open("w", newline="") as opened:
            csv.writer(opened).writerows(lines)


def as_table(tmp_path: Path) -> dict[str, Any]:
    bring(tmp_path)
    return {"dataset": "arrays", "data-dir": str(tmp_path / "patients.csv"), "models": "table3"}


def first_run(tmp_path: Path, run_id: int = RUN_ID, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """One round with the project's own defaults, by three clients."""
    fast = {
        "rounds": 1,
        "report": False,
        "join-timeout": 20.0,
        "out-dir": str(tmp_path / "runs"),
        **CACHE,
    }
    outcome = run_federation(default_run_config() | fast | changes, clients=3, run_id=run_id)
    return outcome, outcome.rows[-1]["clients"]


def quick_start() -> list[list[str]]:
    """The words of the README's commands for data of one's own."""
    chapter = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your own data")[2]
    return [
        shlex.split(line, comments=True)
        for line in chapter.partition("## ")[0].splitlines()
        if "protofl " in line
    ]


@pytest.mark.parametrize("words", quick_start(), ids=lambda words: words[2])
def test_every_sample_is_used_and_told(
    words: list[str], tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    bring(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = parsed(words[1], words[2:])
    _, clients = first_run(tmp_path, **read_assignments(arguments.settings))
    assert len(clients) == arguments.clients
    train, test = (
        sum(one[part] for one in clients.values()) for part in ("train-samples", "test-samples")
    )
    assert train + test == len(CLASSES) * EACH
    assert 0.7 < train / (train + test) < 0.8
    told = f"samples: 120 found · {train} for training · {test} for testing · none left out"
    console = capsys.readouterr().out.splitlines()
    assert told in console
    assert ("inputs: the columns a, b, c, d together" in console) == ("dataset=arrays" in words)


@pytest.mark.parametrize(("changes", "told"), [
    ({"train-samples": 10}, "120 found · 30 for training (train-samples = 10 a client) · 90 for testing · none"),
    ({"total-samples": 60}, "60 left out (total-samples = 60)"),
    ({"test-samples": 5}, "89 for training · 15 for testing · 16 left out (test-samples = 5)"),
    ({"partition": "own"}, "120 found · 270 for training · 90 for testing · some of them used by several clients"),
    ({"algo": "local", "fedprox.mu": 2.0}, "\nfedprox.mu = 2.0: has no effect on local, which reads no settings"),
])  # fmt: skip
def test_what_is_left_out_or_idle_is_told(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: Printed
) -> None:
    first_run(tmp_path, **as_table(tmp_path) | changes)
    assert told in capsys.readouterr().out


def test_baselines_train_beside_the_run_and_do_not_change_it(
    tmp_path: Path, capsys: Printed
) -> None:
    small = {
        "dataset": "digits",
        "partition": "dirichlet",
        "alpha": 0.5,
        "total-samples": 90,
        "run-name": "mine",
    }
    small |= {"algo": "fedproto-avg", "models": "mnist-cnn,htcnn-1"}
    with_them, _ = first_run(
        tmp_path / "with", **small, baselines="local, fedavg,fedproto", report=True
    )
    said = capsys.readouterr().out
    alone, _ = first_run(tmp_path / "without", **small)
    assert with_them.summary["accuracy"] == alone.summary["accuracy"]
    folder = tmp_path / "with" / "runs" / "mine"
    baselines = ("local", "fedavg", "fedproto")
    found = {
        algo: RunFolder(baseline_folder(folder, algo)).finished_summary() for algo in baselines
    }
    assert [one["settings"]["algo"] for one in found.values()] == list(found)
    assert [
        len({client["arch"] for client in one["clients"].values()}) for one in found.values()
    ] == [2, 1, 2]
    by_itself, _ = first_run(tmp_path / "fedavg", **small | {"algo": "fedavg"})
    assert found["fedavg"]["accuracy"] == by_itself.summary["accuracy"]

    shown, both = (
        sentence(compared(folder, found)),
        r"[\d.]+ %( by its head, [\d.]+ % by prototypes)?",
    )
    prototypes = rf"FedProto over 2 architectures {both}, FedProto \+ averaging {both}"
    assert re.fullmatch(
        rf"alone [\d.]+ %, FedAvg [\d.]+ %, {prototypes}; [\d.]+ .B exchanged", shown
    )
    assert f"result: {shown}" in said.splitlines()
    assert escape(shown) in (folder / "report.html").read_text(encoding="utf-8")
    assert (
        "baselines not found beside it: 3"
        in write_report(folder.rename(folder.with_name("new"))).read_text()
    )


def test_the_sentence_names_prototypes_that_predict_better_than_the_head() -> None:
    def result(algo: str, **accuracy: float) -> Any:
        means, title = (
            {kind: {"mean": share} for kind, share in accuracy.items()},
            CATALOG[algo].title,
        )
        return {
            "settings": {"algo": algo},
            "algorithm": title,
            "accuracy": means,
            "clients": {},
            "bytes": {"up": 1000},
        }

    alone, near = result("local", head=0.343), result("fedproto", prototype=0.509, head=0.5)
    assert sentence([alone, near]) == "alone 34.3 %, FedProto 50.0 %; 1.0 kB exchanged"
    said = "alone 34.3 %, FedProto 14.7 % by its head, 77.7 % by prototypes; 1.0 kB exchanged"
    assert sentence([alone, result("fedproto", prototype=0.777, head=0.147)]) == said


def test_a_baseline_that_cannot_go_on_costs_only_itself(
    tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    whole = server_app.app.one_run

    def breaking(*args: Any, baseline: str = "") -> None:
        if baseline:
            raise FederationError("nobody came")
        whole(*args)

    monkeypatch.setattr(server_app.app, "one_run", breaking)
    outcome, _ = first_run(
        tmp_path, **as_table(tmp_path), **{"run-name": "mine", "baselines": "local"}
    )
    assert outcome.folder.name == "mine"
    assert "baseline local: not finished: nobody came" in capsys.readouterr().out


def test_the_baseline_of_another_run_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine-local").mkdir(parents=True)
    (tmp_path / "runs" / "mine-local" / "settings.toml").touch()
    with pytest.raises(SettingsError, match=r"run-name = 'mine-local': .* holds a run already"):
        first_run(tmp_path, **as_table(tmp_path), **{"run-name": "mine", "baselines": "local"})
    assert not (tmp_path / "runs" / "mine").exists()


def test_a_baseline_whose_settings_are_wrong_is_named_and_one_that_sends_nothing_needs_no_merging() -> (
    None
):
    config = default_run_config() | {"secagg": True, "baselines": "local,fedtgp"}
    with pytest.raises(SettingsError, match=r"^baselines = 'fedtgp': secagg = true"):
        baselines_of(settings_of(config), config)
    config = default_run_config() | {
        "merging": "median",
        "max-update-ratio": 2.0,
        "baselines": "local,fedavg",
    }
    assert [one.bounds.merging for one in baselines_of(settings_of(config), config).values()] == [
        "mean",
        "median",
    ]


def test_a_resumed_run_goes_on_with_its_baselines(tmp_path: Path, monkeypatch: Patch) -> None:
    table = as_table(tmp_path) | {"run-name": "mine", "baselines": "local,fedavg"}
    first_run(tmp_path, **table)
    lost, kept = (
        tmp_path / "runs" / f"mine-{algo}" / "summary.json" for algo in ("local", "fedavg")
    )
    before = [kept.stat().st_mtime_ns, json.loads(lost.read_text())["accuracy"]]
    lost.unlink()
    first_run(tmp_path, run_id=5, **table, resume=True)
    assert [kept.stat().st_mtime_ns, json.loads(lost.read_text())["accuracy"]] == before
    monkeypatch.setitem(REDIVIDED, "iid", 2)
    with pytest.raises(SettingsError, match="'iid' has changed since"):
        first_run(tmp_path, run_id=6, **table, resume=True)


def test_a_site_trains_only_baselines_that_the_run_names(tmp_path: Path) -> None:
    config = default_run_config() | CACHE | {"baselines": "local"}
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 3}, RecordDict(), config)
    for content in ({"algo": "fedavg"}, {"algo": 1}, {"algo": "local", "lr": 9.0}):
        message = Message(RecordDict({"baseline": ConfigRecord(content)}), 1, MessageType.QUERY)
        message.metadata.__dict__["_message_id"] = "1"
        assert "baseline is " in client_app(message, context).error.reason
    assert re.search(
        "baselines = 'locall': choose among .*did you mean local", refusal({"baselines": "locall"})
    )

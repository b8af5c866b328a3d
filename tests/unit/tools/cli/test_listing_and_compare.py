"""``protofl list``, ``protofl compare``, ``protofl runs`` and ``protofl report``."""

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock

from protofl_common.config.architectures import ARCHITECTURES, GROUPS
from protofl_common.config.backbones import EMBEDDED
from protofl_common.config.datasets import DATASETS, PARTITIONS
from protofl_common.experiment.catalog import CATALOG
from protofl_common.report import charts
from protofl_common.tools.cli import main, program
from protofl_common.wire.schema import Exchange, Weights
from tests.support.commands import cells_of, json_printed, output
from tests.support.fakes import row, write, write_run


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    # All figures of a page take a second.
    monkeypatch.setattr("protofl_common.report.page.FIGURES", {"Accuracy": (charts.means,)})


def test_every_choice_is_listed_with_its_explanation(capsys):
    """Each line is a name, spaces, and what the code says of it."""
    assert main(["list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    listed = {line.strip().partition("  ")[0]: line.rstrip() for line in lines}

    assert {*CATALOG, *DATASETS, *PARTITIONS, *GROUPS, *ARCHITECTURES, *EMBEDDED} <= set(listed)

    for name, explained in (DATASETS | PARTITIONS).items():
        assert listed[name].endswith(explained.help)
    for name, text in (ARCHITECTURES | EMBEDDED).items():
        assert listed[name].endswith(text)
    for name, algorithm in CATALOG.items():
        assert algorithm.paper in listed[name]


def test_an_output_that_takes_ascii_only_gets_question_marks(monkeypatch):
    """The program must not end in an error of the encoding."""
    printed = io.BytesIO()
    monkeypatch.setattr("sys.argv", ["protofl", "list"])
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, "ascii", write_through=True))
    monkeypatch.setattr("signal.signal", mock.Mock())

    with pytest.raises(SystemExit):
        program()
    assert b"MNIST, 28?28 grey" in printed.getvalue()  # for 28×28


def listed_algorithms(capsys):
    """Return what ``protofl list algorithms`` prints, as one line."""
    main(["list", "algorithms"])
    return " ".join(capsys.readouterr().out.split())


LOCAL = "Local (baseline: every client trains alone)"
PROTOTYPES = "prototypes (a prototype of each class"
COUNTED = f"{PROTOTYPES}, with the number of samples behind it)"
MEME = "weights (all weights of the meme, a shared model)"


@pytest.mark.parametrize("text", [
    f"{LOCAL}. Down: nothing. Up: nothing. Different networks: yes.",
    f"Down: {PROTOTYPES}). Up: {COUNTED}.",
    f"Down: {PROTOTYPES}), local_sets (every client's prototypes). Up: {COUNTED}.",
    "Up: weights (all weights of the model), prototypes (several prototypes of each class).",
    "Up: weights (all weights of the model but its last layers).",
    "Up: outputs (a mean output of each class).",
    f"Down: {MEME}. Up: {MEME}.",
])  # fmt: skip
def test_what_crosses_the_wire_is_said(text, capsys):
    assert text in listed_algorithms(capsys)


def test_a_part_of_the_model_and_a_second_model_are_named(monkeypatch, capsys):
    """A made-up algorithm sends the body, and a model called critic."""
    up = {"weights": Weights(parts=("body.",)), "critic": Weights(of="critic")}
    monkeypatch.setitem(CATALOG, "mine", replace(CATALOG["fedavg"], exchange=Exchange(up=up)))
    both = "weights (the body weights of the model), critic (all weights of the critic model)"

    assert f"Down: nothing. Up: {both}." in listed_algorithms(capsys)


@pytest.fixture
def two_runs(tmp_path):
    """The folders of a run of local training and one of FedProto, on data divided otherwise."""
    one = tmp_path / "one"
    two = tmp_path / "two"
    same = {"dataset": "digits", "lr": 0.1}
    local = same | {"algo": "local", "run-name": "a"}
    write_run(one, local, [{"0": {"head": 0.5}}] * 2)
    fedproto = same | {"algo": "fedproto", "run-name": "b", "fedproto.lambda": 1.0}
    write_run(two, fedproto, [{"0": {"head": 0.25, "prototype": 0.75}}] * 2, division=2)
    return [str(one), str(two)]


def test_compare_shows_figures_and_the_settings_that_differ(two_runs, capsys):
    """A row has the name of a run, in which are the settings that differ, and its figures."""
    rows = cells_of(output(capsys, "compare", *two_runs).out)

    for name, mean in (
        ("local division=1", "50.00"),
        ("fedproto division=2", "25.00"),
    ):
        estimates, *_, costs = [row for row in rows if row[0] == name]
        assert estimates[1:3] == ["1", mean]
        assert costs[-3] == "61.0"
        assert costs[-1] == "2", "lost replies: a late one was missing before"
    assert ["fedproto division=2", "prototype", *["75.00"] * 4] in rows


@pytest.mark.parametrize(("changes", "error"), [
    ({"settings": []}, "RUN: not the figures of a run: AttributeError"),
    ({"settings": {"seed": "x"}}, "RUN: not the figures of a run: ValueError"),
    ({"rounds": "many"}, "RUN: not the figures of a run: ValueError"),
    ({"trouble": 3}, "RUN: not the figures of a run: AttributeError"),
])  # fmt: skip
def test_a_summary_whose_content_is_not_that_of_a_run_is_named(changes, error, two_runs, capsys):
    """RUN stands for the folder in ``error``."""
    _, run = two_runs
    file = Path(run) / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    refused = output(capsys, "compare", run, status=1).err

    assert error.replace("RUN", run) in refused


def test_a_run_without_a_summary_is_named(two_runs, capsys):
    _, run = two_runs
    (Path(run) / "summary.json").write_text("")
    assert f"{run}: no summary.json in it" in output(capsys, "compare", run, status=1).err


EVIL = "\x1b]0;owned\x07<img src=x>"


@pytest.fixture
def strangers_runs(tmp_path):
    """A folder of runs with control characters in whatever a run has.

    The number of rounds of the last two is no number, or infinite.
    """
    folders = {"one": "1", "[/b]two": "1", "odd": '"many"', "endless": "inf"}
    for name, rounds in folders.items():
        folder = tmp_path / name
        settings = {"algo": f"fedproto{EVIL}", "dataset": EVIL, f"lr{EVIL}": name}
        settings |= {"seed": 1, "rounds": 1}
        write_run(folder, settings, [{"site-0": {"head": 0.5}}] * 2)
        toml = f"dataset = {json.dumps(EVIL)}\nrounds = {rounds}\n"
        (folder / "settings.toml").write_text(toml)
        summary = json.loads((folder / "summary.json").read_text())
        summary |= {"algorithm": EVIL}
        (folder / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_a_strangers_run_writes_no_escapes_on_the_terminal(strangers_runs, capsys):
    """Two of four runs are left out of the list, as their rounds are no numbers."""
    listed = output(capsys, "runs", strangers_runs)

    assert "left out: " in listed.err

    compared = output(capsys, "compare", strangers_runs / "one", strangers_runs / "[/b]two")

    assert "left out: " not in compared.err

    for printed in (listed.out, compared.out):
        assert "owned" in printed
        assert "\x1b" not in printed


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder of four runs: of today, yesterday (stopped), and 10 and 20 days ago (finished).

    That of today is running while a test takes its lock.
    """
    monkeypatch.chdir(tmp_path)
    for name, days in (("running", 0), ("stopped", 1), ("newer", 10), ("older", 20)):
        folder = tmp_path / "runs" / name
        partition = "own" if name == "running" else "iid"
        settings = {"algo": "local", "dataset": "digits", "partition": partition}
        settings |= {"seed": days}
        write_run(folder, settings, [{"0": {"head": 0.25 + days / 100}}] * 3)
        toml = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
        (folder / "settings.toml").write_text("".join(toml) + "rounds = 2\n")
        for part in ("clients/site-0", "checkpoints"):
            (folder / part).mkdir(parents=True)
            (folder / part / "1.bin").write_bytes(bytes(1000))
        if name in ("running", "stopped"):
            (folder / "summary.json").unlink()
        then = time.time() - days * 86400
        os.utime(folder / "metrics.jsonl", (then, then))
    return tmp_path / "runs"


def test_the_list_of_runs(runs, capsys):
    """A run's line has its state, its data, its last and best accuracy, and its size."""
    with FileLock(runs / ".running.lock"):
        found = {run["name"]: run for run in json_printed(capsys, "runs")["runs"]}

    assert [(name, run["state"], run["dataset"]) for name, run in found.items()] == [
        ("running", "running", "own data of the sites"),
        ("stopped", "stopped", "digits"),
        ("newer", "finished", "digits"),
        ("older", "finished", "digits"),
    ]

    older = found["older"]
    expected = {"algorithm": "local", "dataset": "digits", "seed": 20, "rounds": 2, "wanted": 2}
    expected |= {"final": "head 45.00", "best": "head 45.00 @1 (chosen on test data)"}

    assert expected.items() <= older.items()

    files = [path for path in (runs / "older").rglob("*") if path.is_file()]

    assert older["bytes"] == sum(file.stat().st_size for file in files)
    assert round(older["days"]) == 20

    printed = output(capsys, "runs").out

    assert "head 45.00 @1 (chosen on test data)" in " ".join(printed.split())
    assert "local · digits · seed 20" in printed


def test_the_name_of_a_run_can_be_copied_from_a_narrow_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    name = "20261129-180348-fedproto-digits-256594"
    figures = {"head": 0.5, "prototype": 0.25}
    write_run(tmp_path / name, {"algo": "fedproto", "dataset": "digits"}, [{"0": figures}] * 2)

    lines = output(capsys, "runs", tmp_path).out.splitlines()

    assert any(name in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_folder_of_runs_that_is_not_there_is_named(capsys):
    refusal = "nowhere: no such folder; runs are in runs unless out-dir says otherwise"
    assert refusal in output(capsys, "runs", "nowhere", status=1).err


def test_a_report_of_a_folder_and_of_a_name_in_runs(tmp_path, monkeypatch, capsys):
    """A run is given by its folder, or by its name in ``runs``."""
    monkeypatch.chdir(tmp_path)
    one = write(tmp_path / "elsewhere" / "one", [row(1, ["a"])])
    two = write(tmp_path / "runs" / "two", [row(1, ["a"])])

    printed = output(capsys, "report", one, "two").out

    assert printed.splitlines() == [str(one / "report.html"), "runs/two/report.html"]

    for folder in (one, two):
        assert (folder / "report.html").stat().st_size > 1000


def test_no_run_and_no_page_to_write_are_named(tmp_path, monkeypatch, capsys):
    """There is no folder, or an empty one, or a folder in the place of the page, or no true row."""
    monkeypatch.chdir(tmp_path)

    def refusal_of(run):
        return output(capsys, "report", run, status=1).err

    assert "nowhere: no such folder, neither here nor in runs/" in refusal_of("nowhere")

    (tmp_path / "empty").mkdir()

    assert "empty: no settings.toml in it; give the folder of a run" in refusal_of("empty")

    folder = write(tmp_path / "run", [row(1, ["a"])])
    (folder / "report.html").mkdir()

    assert "the page cannot be written" in refusal_of(folder)

    (folder / "metrics.jsonl").write_text('{"accuracy": 3}')

    assert f"{folder}: the page cannot be written: KeyError: " in refusal_of(folder)

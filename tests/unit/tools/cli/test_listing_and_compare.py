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
from tests.support.commands import told
from tests.support.fakes import row, write, write_run
from tests.support.given import Patch, Printed


@pytest.fixture(autouse=True)
def wide(monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(
        "protofl_common.report.page.FIGURES", {"Accuracy": (charts.means,)}
    )  # all take a second


def test_every_choice_is_listed_with_its_explanation(capsys: Printed) -> None:
    assert main(["list"]) == 0
    listed = {
        line.strip().partition("  ")[0]: line.rstrip()
        for line in capsys.readouterr().out.splitlines()
    }
    assert {*CATALOG, *DATASETS, *PARTITIONS, *GROUPS, *ARCHITECTURES, *EMBEDDED} <= set(listed)
    for name, text in (DATASETS | PARTITIONS | ARCHITECTURES | EMBEDDED).items():
        assert listed[name].endswith(text)
    for name, algorithm in CATALOG.items():
        assert algorithm.paper in listed[name]
    ascii = io.TextIOWrapper(shown := io.BytesIO(), "ascii", write_through=True)
    with (
        mock.patch("sys.argv", ["protofl", "list"]),
        mock.patch("sys.stdout", ascii),
        mock.patch("signal.signal"),
        pytest.raises(SystemExit),
    ):
        program()
    assert b"MNIST, 28?28 grey" in shown.getvalue()


def test_what_crosses_the_wire_is_said_a_part_and_another_module_too(capsys: Printed) -> None:
    main(["list", "algorithms"])
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "Local (baseline: every client trains alone). Down: nothing. Up: nothing. Different networks: yes."
        in out
    )
    each, counted = (
        "prototypes (a prototype of each class",
        ", with the number of samples behind it)",
    )
    assert f"Down: {each}). Up: {each}{counted}." in out
    assert f"Down: {each}), local_sets (every client's prototypes). Up: {each}{counted}." in out
    assert (
        "Up: weights (all weights of the model), prototypes (several prototypes of each class)."
        in out
    )
    for one in (
        "weights (all weights of the model but its last layers)",
        "outputs (a mean output of each class)",
    ):
        assert f"Up: {one}." in out
    assert (
        f"Down: {(meme := 'weights (all weights of the meme, a shared model)')}. Up: {meme}." in out
    )
    up = {"weights": Weights(parts=("body.",)), "critic": Weights(of="critic")}
    with mock.patch.dict(CATALOG, {"mine": replace(CATALOG["fedavg"], exchange=Exchange(up=up))}):
        main(["list", "algorithms"])
    said = "Down: nothing. Up: weights (the body weights of the model), critic (all weights of the critic model)."
    assert said in " ".join(capsys.readouterr().out.split())


def test_compare_shows_figures_and_the_settings_that_differ(
    tmp_path: Path, capsys: Printed
) -> None:
    same = {"dataset": "digits", "lr": 0.1}
    one, two = tmp_path / "one", tmp_path / "two"
    write_run(one, same | {"algo": "local", "run-name": "a"}, [{"0": {"head": 0.5}}] * 2)
    both = {"0": {"head": 0.25, "prototype": 0.75}}
    write_run(
        two,
        same | {"algo": "fedproto", "run-name": "b", "fedproto.lambda": 1.0},
        [both] * 2,
        division=2,
    )
    assert main(["compare", str(one), str(two)]) == 0
    cells = [
        [cell.strip() for cell in line.strip("│┃").split("│")]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert ["head: mean", "50.00", "25.00"] in cells
    assert ["prototype: best", "–", "75.00 @1 (chosen on test data)"] in cells
    for line in (
        "seconds 1m01s 1m01s",
        "algo local fedproto",
        "fedproto.lambda – 1.0",
        "division 1 2",
    ):
        assert line.split() in cells
    assert ["lost replies", "2", "2"] in cells, "a late one was missing before"
    assert not any(row[0] in ("dataset", "lr", "run-name") for row in cells)
    summary, no_run = json.loads((two / "summary.json").read_text()), "not the figures of a run: "
    wrong = (
        ({"settings": []}, "Attr"),
        ({"settings": {"seed": "x"}}, "Value"),
        ({"best-accuracy": 3}, "Attr"),
    )
    texts = {json.dumps(summary | changes): f"{no_run}{error}" for changes, error in wrong}
    for text, why in {**texts, "": "no summary.json in it"}.items():
        (two / "summary.json").write_text(text)
        assert main(["compare", str(two)]) == 1
        assert f"{two}: {why}" in capsys.readouterr().err


EVIL = "\x1b]0;owned\x07<img src=x>"


def test_a_strangers_run_writes_no_escapes_on_the_terminal(tmp_path: Path, capsys: Printed) -> None:
    for name, rounds in {"one": "1", "[/b]two": "1", "odd": '"many"', "endless": "inf"}.items():
        of_run = {
            "algo": "fedproto" + EVIL,
            "dataset": EVIL,
            "lr" + EVIL: name,
            "seed": 1,
            "rounds": 1,
        }
        write_run(tmp_path / name, of_run, [{"site-0": {"head": 0.5}}] * 2)
        (tmp_path / name / "settings.toml").write_text(
            f"dataset = {json.dumps(EVIL)}\nrounds = {rounds}\n"
        )
        summary = json.loads((file := tmp_path / name / "summary.json").read_text())
        file.write_text(json.dumps(summary | {"algorithm": EVIL, "rounds": EVIL}))
    for words in (
        ["runs", str(tmp_path)],
        ["compare", str(tmp_path / "one"), str(tmp_path / "[/b]two")],
    ):
        assert main(words) == 0
        out, err = capsys.readouterr()
        assert "owned" in out
        assert ("\x1b" in out, "left out: " in err) == (False, words[0] == "runs")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Four runs: of today, running; of yesterday, stopped; of 10 and of 20 days ago, finished."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, days in (("running", 0), ("stopped", 1), ("newer", 10), ("older", 20)):
        folder = tmp_path / "runs" / name
        settings = {
            "algo": "local",
            "dataset": "digits",
            "partition": "iid" if days else "own",
            "seed": days,
        }
        write_run(folder, settings, [{"0": {"head": 0.25 + days / 100}}] * 3)
        toml = "".join(
            f"{key} = {json.dumps(value)}\n" for key, value in {**settings, "rounds": 2}.items()
        )
        (folder / "settings.toml").write_text(toml)
        for part in ("clients/site-0", "checkpoints"):
            (folder / part).mkdir(parents=True)
            (folder / part / "1.bin").write_bytes(bytes(1000))
        if name in ("running", "stopped"):
            (folder / "summary.json").unlink()
        then = time.time() - days * 86400
        os.utime(folder / "metrics.jsonl", (then, then))
    return tmp_path / "runs"


def test_the_list_of_runs(runs: Path, capsys: Printed) -> None:
    with FileLock(runs / ".running.lock"):
        found = {run["name"]: run for run in told(capsys, "runs")["runs"]}
    assert list(found) == ["running", "stopped", "newer", "older"]
    facts = [f"{run['state']}, {run['dataset']}" for run in found.values()]
    assert facts == ["running, own data of the sites", "stopped, digits", *["finished, digits"] * 2]
    older = found["older"]
    wanted = {
        "algorithm": "local",
        "dataset": "digits",
        "seed": 20,
        "rounds": 2,
        "wanted": 2,
        "final": "head 45.00",
    }
    assert wanted.items() <= older.items()
    assert older["best"] == "head 45.00 @1 (chosen on test data)"
    assert older["bytes"] == sum(
        file.stat().st_size for file in (runs / "older").rglob("*") if file.is_file()
    )
    assert round(older["days"]) == 20
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    for line in (
        "head 45.00 @1*",
        "local · digits · seed 20",
        "* chosen on test data, and so too good.",
    ):
        assert line in out
    assert main(["runs", "nowhere"]) == 1
    assert (
        "nowhere: no such folder; runs are in runs unless out-dir says otherwise"
        in capsys.readouterr().err
    )


def test_a_report_of_a_folder_and_of_a_name_in_runs(
    tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    monkeypatch.chdir(tmp_path)
    one = write(tmp_path / "elsewhere" / "one", [row(1, ["a"])])
    two = write(tmp_path / "runs" / "two", [row(1, ["a"])])
    assert main(["report", str(one), "two"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(one / "report.html"),
        "runs/two/report.html",
    ]
    assert (one / "report.html").stat().st_size > 1000
    assert (two / "report.html").stat().st_size > 1000


def test_no_run_and_no_page_to_write_are_named(
    tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["report", "nowhere"]) == 1
    assert "nowhere: no such folder, neither here nor in runs/" in capsys.readouterr().err
    assert main(["report", "empty"]) == 1
    assert "empty: no settings.toml in it; give the folder of a run" in capsys.readouterr().err
    folder = write(tmp_path / "run", [row(1, ["a"])])
    (folder / "report.html").mkdir()
    assert main(["report", str(folder)]) == 1
    assert "the page cannot be written" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text('{"accuracy": 3}')
    assert main(["report", str(folder)]) == 1
    assert f"{folder}: the page cannot be written: KeyError: " in capsys.readouterr().err

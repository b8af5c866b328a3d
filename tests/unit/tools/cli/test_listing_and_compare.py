"""``protofl list`` and ``protofl compare``."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from protofl_common.config.architectures import ARCHITECTURES, GROUPS
from protofl_common.config.backbones import EMBEDDED
from protofl_common.config.datasets import DATASETS, PARTITIONS
from protofl_common.experiment.catalog import CATALOG
from protofl_common.tools.cli import main
from protofl_common.wire.schema import Exchange, Weights
from tests.support.fakes import write_run


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def test_every_choice_is_listed_with_its_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    listed = {line.strip().partition("  ")[0]: line.rstrip() for line in capsys.readouterr().out.splitlines()}
    for name in [*CATALOG, *DATASETS, *PARTITIONS, *GROUPS, *ARCHITECTURES, *EMBEDDED]:
        assert name in listed
    for name, text in (DATASETS | PARTITIONS | ARCHITECTURES | EMBEDDED).items():
        assert listed[name].endswith(text)
    for name, row in CATALOG.items():
        assert row.paper in listed[name]


def test_what_crosses_the_wire_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list", "algorithms"])
    out = " ".join(capsys.readouterr().out.split())
    nothing = "Local (baseline: every client trains alone). Down: nothing. Up: nothing."
    assert f"{nothing} Different networks: yes." in out
    each, counted = "prototypes (a prototype of each class", ", with the number of samples behind it)"
    assert f"Down: {each}). Up: {each}{counted}." in out
    assert f"Down: {each}), local_sets (every client's prototypes). Up: {each}{counted}." in out
    assert "Up: weights (all weights of the model), prototypes (several prototypes of each class)." in out
    assert "Up: weights (all weights of the model but its last layers)." in out
    assert "Down: weights (all weights of the meme model). Up: weights (all weights of the meme model)." in out


def test_a_part_and_another_module_are_named_too(capsys: pytest.CaptureFixture[str]) -> None:
    up = {"weights": Weights(parts=("body.",)), "critic": Weights(of="critic")}
    with mock.patch.dict(CATALOG, {"mine": replace(CATALOG["fedavg"], exchange=Exchange(up=up))}):
        main(["list", "algorithms"])
    said = "Down: nothing. Up: weights (the body weights of the model), critic (all weights of the critic model)."
    assert said in " ".join(capsys.readouterr().out.split())


def test_compare_shows_figures_and_the_settings_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = {"dataset": "digits", "lr": 0.1}
    one, two = tmp_path / "one", tmp_path / "two"
    write_run(one, same | {"algo": "local", "run-name": "a"}, [{"0": {"head": 0.5}}] * 2)
    both = {"0": {"head": 0.25, "prototype": 0.75}}
    write_run(two, same | {"algo": "fedproto", "run-name": "b", "fedproto.lambda": 1.0}, [both] * 2)
    assert main(["compare", str(one), str(two)]) == 0
    cells = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in capsys.readouterr().out.splitlines()]
    assert ["head: mean", "50.00", "25.00"] in cells
    assert ["prototype: best", "–", "75.00 @1 (chosen on test data)"] in cells
    assert ["seconds", "1m01s", "1m01s"] in cells
    assert ["algo", "local", "fedproto"] in cells
    assert ["fedproto.lambda", "–", "1.0"] in cells
    assert not any(row[0] in ("dataset", "lr", "run-name") for row in cells)


def test_compare_needs_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path)]) == 1
    assert f"{tmp_path}: no summary.json in it" in capsys.readouterr().err


EVIL = "\x1b]0;owned\x07<img src=x>"


def test_a_strangers_run_writes_no_escapes_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        of_run = {"algo": "fedproto" + EVIL, "dataset": EVIL, "lr" + EVIL: name, "seed": 1, "rounds": 1}
        write_run(tmp_path / name, of_run, [{"site-0": {"head": 0.5}}] * 2)
        (tmp_path / name / "settings.toml").write_text(f"dataset = {json.dumps(EVIL)}\n")
    for words in (["runs", str(tmp_path)], ["compare", str(tmp_path / "one"), str(tmp_path / "two")]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert "owned" in out
        assert "\x1b" not in out

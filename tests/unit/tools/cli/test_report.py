"""``protofl report``."""

from pathlib import Path

import pytest

from protofl_common.report.figures import curves
from protofl_common.tools.cli import main
from tests.support.fakes import row, write


@pytest.fixture(autouse=True)
def _one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take a second a page; `tests/unit/report` draws them."""
    monkeypatch.setattr("protofl_common.report.page.FIGURES", {"Accuracy": (curves.means,)})


def test_a_folder_and_a_name_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one = write(tmp_path / "elsewhere" / "one", [row(1, ["a"])])
    two = write(tmp_path / "runs" / "two", [row(1, ["a"])])
    assert main(["report", str(one), "two"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(one / "report.html"), "runs/two/report.html"]
    assert (one / "report.html").stat().st_size > 1000
    assert (two / "report.html").stat().st_size > 1000


def test_what_is_no_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["report", "nowhere"]) == 1
    assert "nowhere: no such folder, neither here nor in runs/" in capsys.readouterr().err
    assert main(["report", "empty"]) == 1
    assert "empty: no settings.toml in it; give the folder of a run" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", [row(1, ["a"])])
    (folder / "report.html").mkdir()
    assert main(["report", str(folder)]) == 1
    assert "the page cannot be written" in capsys.readouterr().err


def test_the_text_for_an_issue(tmp_path: Path) -> None:
    sites = ["a", "b"]
    late = row(3, sites, "final", failed={"a": "boom"})
    folder = write(tmp_path / "run", [row(1, sites), row(2, sites), late], **{"data-dir": "/home/jane", "lr": 0.5})
    main(["report", str(folder)])
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.splitlines() == [
        "### FedTGP on unknown data",
        "",
        "- not finished: 2 of 9 rounds, 2 clients, 6.0s, 9.0 kB on the wire",
        "- lost replies: 1 failed",
        "- commit not kept; versions not kept",
        "- server: not kept",
        "",
        "Settings that are not the defaults:",
        "",
        "```sh",
        "protofl run --clients 2 algo=fedtgp rounds=9 lr=0.5",
        "```",
        "",
        "|  | mean, % | by samples | worst 10 % | std | best mean |",
        "|---|---:|---:|---:|---:|---:|",
        "| prototype | 3.05 | 50.00 | 10.00 | 10.00 | 3.05 @3 (chosen on test data) |",
        "| head | 3.05 | 50.00 | 10.00 | 10.00 | 3.05 @3 (chosen on test data) |",
    ]


def test_the_text_for_an_issue_has_no_html_of_a_strangers_run(tmp_path: Path) -> None:
    evil = "<img src=x>\n```\n![](http://x/y)"
    folder = write(tmp_path / "run", [row(1, ["a"])], dataset=evil, callback=evil)
    main(["report", str(folder)])
    text = (folder / "report.md").read_text(encoding="utf-8")
    outside = text.split("```sh")[0] + text.rsplit("\n```\n")[-1]
    assert "&lt;img" in outside
    assert "<img" not in outside
    assert "![]" not in outside
    assert text.count("\n```") == 2

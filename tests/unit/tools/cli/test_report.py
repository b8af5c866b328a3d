"""``protofl report``."""

from pathlib import Path

import pytest

from protofl_common.report import charts
from protofl_common.tools.cli import main
from tests.support.fakes import row, write


@pytest.fixture(autouse=True)
def _one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take a second a page; `tests/unit/report` draws them."""
    monkeypatch.setattr("protofl_common.report.page.FIGURES", {"Accuracy": (charts.means,)})


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

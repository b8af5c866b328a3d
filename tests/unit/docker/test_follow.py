"""Following a run's log through breaks, and its end as an exit status; `flwr` is a script that plays a scene."""

import json
import os
from pathlib import Path

import pytest

from tests.support.programs import program

follow = program("follow")


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder: the n-th call of ``flwr log`` prints <folder>/log-n, that of ``flwr ls`` ls-n; without, they fail."""
    script = tmp_path / "flwr"
    script.write_text(
        f'#!/bin/sh\ncd {tmp_path}\necho . >>"count-$1"\nn=$(wc -l <"count-$1")\nexec cat "$1-$((n + 0))"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(follow, "PAUSE", 0.0)
    return tmp_path


def status(text: str) -> str:
    """What ``flwr ls --format json`` prints."""
    return json.dumps({"success": True, "runs": [{"status": text}]})


@pytest.mark.parametrize(("end", "code"), [("completed", 0), ("failed", 1), ("stopped", 1)])
def test_the_end_decides(end: str, code: int, flwr: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (flwr / "log-1").write_text("one\ntwo\n")
    (flwr / "ls-1").write_text(status(f"finished:{end}"))
    assert follow.main("7") == code
    assert capsys.readouterr().out == f"one\ntwo\nrun 7: finished:{end}\n"


def test_after_a_break_each_line_is_shown_once(flwr: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (flwr / "log-1").write_text("one\ntw")
    (flwr / "log-3").write_text("one\ntwo\nthree\n")
    (flwr / "ls-2").write_text(json.dumps({"success": False}))
    (flwr / "ls-3").write_text(status("finished:completed"))
    assert follow.main("7") == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\nrun 7: finished:completed\n"


def test_patience_ends(flwr: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(follow, "PATIENCE", 0.05)
    assert follow.main("7") == 1
    assert "no answer from the SuperLink" in capsys.readouterr().out

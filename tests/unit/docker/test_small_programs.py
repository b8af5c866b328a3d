"""The small programs: is a container healthy, what did a run achieve, and following a run's log through breaks."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.support.programs import program

health, result = program("health"), program("result")


class Answers(BaseHTTPRequestHandler):
    """The path is the status."""

    def do_GET(self) -> None:
        self.send_response(int(self.path[1:]))
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("urls", "code", "said"),
    [
        ("{0}/200", 0, ""),
        ("{0}/200 {0}/200", 0, ""),
        ("{0}/200 {0}/503", 1, "503"),
        ("{0}/204", 1, "204"),
        ("http://127.0.0.1:1/health", 1, "refused"),
        ("", 1, "names nothing"),
    ],
)
def test_all_addresses_must_answer(
    urls: str, code: int, said: str, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEALTH_URLS", urls.format(address))
    assert health.main() == code
    assert said in capsys.readouterr().out


def test_the_result_names_each_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = {
        "algorithm": "FedTGP",
        "dataset": "digit-domains",
        "rounds": 3,
        "clients": {"north": {"arch": "cnn4", "domain": "scanned"}, "south": {"arch": "htcnn-3", "domain": "photo"}},
        "accuracy-of-clients": {"north": {"head": 0.75, "prototype": None}},
        "accuracy": {"head": {"mean": 0.75}, "prototype": None},
        "seconds-per-round": 6.04,
        "trouble": {"failed": 0},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert result.main(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["FedTGP on digit-domains, 3 rounds", "  north  cnn4      scanned   head 0.750"]
    assert lines[4:] == ["mean accuracy, head: 0.750", "seconds per round: 6.0", "trouble: {'failed': 0}"]
    assert result.main(tmp_path / "nowhere") == 1
    assert "summary.json" in capsys.readouterr().out


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

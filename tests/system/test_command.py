"""``protofl run`` and ``protofl table`` for real: their exit status is the run's, and nothing is left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.processes import BIN, ROOT

pytestmark = pytest.mark.system
TINY = ("algo=local", "dataset=digits", "partition=iid", "rounds=1", "local-epochs=1", "--clients", "2")
FLOWER = (*TINY, "--engine", "flower")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path: Ray's sockets lie below it, and theirs may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def start(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(BIN / "protofl"), *arguments]
    env = os.environ | {"TMPDIR": str(temporary)}
    pipe = subprocess.PIPE
    out, err = pipe, subprocess.STDOUT
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err, text=True, preexec_fn=hear_ctrl_c)


def hear_ctrl_c() -> None:
    """As a terminal's child does; a shell's background jobs, and so what tests run in, may ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def lives(port: str) -> bool:
    """Whether a SuperLink of ours still has this port in its command line."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().split(b"\0")
        except OSError:
            continue
        if port.encode() in words and any(word.endswith(b"flower-superlink") for word in words):
            return True
    return False


def test_a_run_leaves_its_results_and_no_process(tmp_path: Path, temporary: Path) -> None:
    process = start(temporary, "run", *FLOWER, "--verbose", f"out-dir={tmp_path}", "run-name=demo")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert "round 1/1" in output
    assert (tmp_path / "demo" / "summary.json").exists()
    assert list(temporary.glob("protofl-*")) == []
    port = re.search(r"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=(\d+)", output)
    assert port is not None
    assert not lives(port[1])


def test_a_run_that_fails_exits_with_1(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "settings.toml").write_text("")
    process = start(temporary, "run", *FLOWER, f"out-dir={tmp_path}", "run-name=there")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 1, output
    assert "holds a run already" in output
    assert "protofl: this run has failed (finished:failed)" in output


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_one_that_is_stopped_or_killed_leaves_nothing(kind: signal.Signals, tmp_path: Path, temporary: Path) -> None:
    process = start(temporary, "run", *FLOWER, "--verbose", "rounds=100000", f"out-dir={tmp_path}")
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if re.search(r"round +2/", line):
            break
    process.send_signal(kind)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == (130 if kind == signal.SIGINT else -kind), "".join(said) + rest
    port = re.search(r"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=(\d+)", "".join(said))
    assert port is not None
    deadline = time.monotonic() + 50
    while (lives(port[1]) or list(temporary.glob("protofl-*"))) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not lives(port[1])
    assert list(temporary.glob("protofl-*")) == []


@pytest.mark.long
def test_a_table_runs_and_is_not_repeated(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "small.yaml").write_text(
        "title: Small\nrecipe: fedproto-mnist-3way\nseeds: [1, 2]\n"
        "settings: {dataset: digits, partition: iid, test-from: split, rounds: 1, total-samples: 300}\n"
        "columns: {head: {clients: 2}}\n"
        "rows:\n  Local: {settings: {algo: local}, paper: [98.26]}\n"
        "  MNIST: {settings: {algo: local, dataset: mnist}}\n"
    )
    for _ in range(2):
        process = start(temporary, "table", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "out"))
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output
        lines = (tmp_path / "out" / "small.md").read_text(encoding="utf-8").splitlines()
        assert re.match(r"\| Local \| \d+\.\d\d ± \d+\.\d\d \| 98.26 \|", lines[4]), lines
        assert lines[5] == "| MNIST | – |  |"
        assert len(list((tmp_path / "out" / "logs").glob("local-digits-s*.log"))) == 2

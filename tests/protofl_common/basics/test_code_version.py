"""Which commit a run was made from, where a copy of the code runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protofl_common.basics import code_version
from protofl_common.tools.cli import superlink


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    code_version.commit.cache_clear()
    yield
    code_version.commit.cache_clear()


def test_a_copy_of_the_code_knows_the_commit_from_whoever_started_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(superlink, "commit", lambda: "abc1234-dirty")
    monkeypatch.setattr(superlink.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(superlink.subprocess, "Popen", lambda *args, **more: type("Process", (), {"pid": 1})())
    started = superlink.SuperLink()
    monkeypatch.setenv(code_version.COMMIT, started.environment[code_version.COMMIT])
    assert code_version.commit() == "abc1234-dirty"

"""The command that names what Flower only calls invalid."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from protofl_common.config.options import SettingsError
from protofl_common.datasets import DataError
from protofl_common.tools.check import check, main


def test_a_right_configuration() -> None:
    settings = check(['algo="fedavg" rounds=5'])
    assert (settings.run.algo, settings.run.rounds) == ("fedavg", 5)


def test_a_recipe_with_an_unknown_key_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[fedproto]\nlamda = 2.0\n")
    with pytest.raises(SettingsError, match=r"fedproto\.lamda: unknown key; did you mean fedproto\.lambda\?"):
        check([str(recipe)])


@pytest.mark.parametrize("argument", ["algo=fedproto", "nowhere.toml"])
def test_what_cannot_be_read_is_an_error(argument: str) -> None:
    with pytest.raises(SettingsError, match=argument):
        check([argument])


def test_a_partition_that_cannot_be_is_an_error() -> None:
    with pytest.raises(DataError):
        check(['dataset="digits" partition="feature-shift"'])


def test_the_exit_status_tells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "roundz=3"])
    assert main() == 1
    assert "roundz: unknown key; did you mean rounds?" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["check", ""])
    assert main() == 0

"""What a command prints."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from protofl_common.tools.arguments import ROOT
from protofl_common.tools.cli import main, parser_of

_SCHEMA_FILE = ROOT / "docs" / "reference" / "commands.schema.json"
SCHEMA = json.loads(_SCHEMA_FILE.read_text(encoding="utf-8"))


def parsers_of(command: str) -> list[argparse.ArgumentParser]:
    """Return the parser of a command, then those of its actions."""
    parser = parser_of(command)
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += action.choices.values()
    return found


def in_lines(settings: Mapping[str, object]) -> str:
    """Return settings as a TOML file has them."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def in_one_line(settings: Mapping[str, object]) -> str:
    """Return settings as a command takes them in one word."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())


def export_model(run: Path, out: Path, site: str = "site-0", *more: str) -> Path:
    """Export the model of a site, with further words of the command; return its folder, ``out``."""
    assert main(["export", str(run), "--site", site, "--out", str(out), *more]) == 0
    return out


def output(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> Any:
    """Run a command, which must end with this status; return what it prints (``out``, ``err``)."""
    capsys.readouterr()  # forget what was printed before
    assert main([*map(str, words)]) == status, words
    return capsys.readouterr()


def cells_of(printed: str) -> list[list[str]]:
    """Return the cells of each line that a command prints on a terminal, as between its borders."""
    lines = [line.strip("│┃").split("│") for line in printed.splitlines()]
    return [[cell.strip() for cell in line] for line in lines]


def json_printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run a command with ``--json``; return the object that it prints, which fits the schema.

    Its exit status may be any.
    """
    capsys.readouterr()  # forget what was printed before
    main([*words, "--json"])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(content, SCHEMA)
    assert " ".join(words).startswith(content["command"])
    return content

"""What a command prints."""

import argparse
import json
from typing import Any

import jsonschema
import pytest

from protofl_common.tools.arguments import ROOT
from protofl_common.tools.cli import main, parser_of

_SCHEMA_FILE = ROOT / "docs" / "reference" / "commands.schema.json"
SCHEMA = json.loads(_SCHEMA_FILE.read_text(encoding="utf-8"))


def parsers_of(command: str) -> list[argparse.ArgumentParser]:
    """The parser of a command, then those of its actions."""
    parser = parser_of(command)
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += action.choices.values()
    return found


def output(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> Any:
    """What a command prints, as ``out`` and ``err``; its exit status is this."""
    capsys.readouterr()
    assert main([*map(str, words)]) == status, words
    return capsys.readouterr()


def cells_of(printed: str) -> list[list[str]]:
    """The rows of the tables that a command prints on a terminal."""
    lines = [line.strip("│┃").split("│") for line in printed.splitlines()]
    return [[cell.strip() for cell in line] for line in lines]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """With ``--json``, whatever its exit status: all of it is one object of the schema."""
    capsys.readouterr()
    main([*words, "--json"])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(content, SCHEMA)
    assert " ".join(words).startswith(content["command"])
    return content

"""What a command prints with ``--json``."""

import json
from typing import Any

import jsonschema
import pytest

from protofl_common.tools.cli import main
from protofl_common.tools.cli.arguments import ROOT

SCHEMA = json.loads((ROOT / "docs" / "reference" / "commands.schema.json").read_text(encoding="utf-8"))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What a command prints, which is all of it one object of the schema."""
    capsys.readouterr()
    main([*words, "--json"])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(content, SCHEMA)
    assert " ".join(words).startswith(content["command"])
    return content

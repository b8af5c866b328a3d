"""The reference pages are what the code makes, and name all that there is."""

from __future__ import annotations

import pytest

from protofl_common.catalog import CATALOG
from protofl_common.settings import known_keys
from protofl_common.tools.reference import REFERENCE, _meanings, pages

MADE = pages()


@pytest.mark.parametrize("name", MADE)
def test_what_is_committed_is_what_the_code_makes(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == MADE[name], "make docs writes it anew"


def test_every_setting_has_a_line_with_its_meaning() -> None:
    text = MADE["settings.md"] + MADE["algorithms.md"]
    for key in known_keys():
        assert f"\n| `{key}` | `" in text
    assert [key for key, meaning in _meanings().items() if not meaning] == []


def test_every_algorithm_has_its_equations() -> None:
    sections = MADE["algorithms.md"].split("\n## ")[1:]
    assert [section.partition("\n")[0] for section in sections] == list(CATALOG)
    for section in sections:
        assert section.count("```text\n") == 2
        assert "```text\n\n" not in section

"""What the documents say of the code is what the code makes, and names all that there is."""

import pytest

from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import known_keys
from tests.bench.reference import DOCS, _meanings, pages

MADE = pages()


@pytest.mark.parametrize("name", MADE)
def test_what_is_committed_is_what_the_code_makes(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == MADE[name], "make docs writes it anew"


def test_every_setting_has_a_line_with_its_meaning() -> None:
    text = "".join(MADE.values())
    for key in known_keys():
        assert f"\n| `{key}` | `" in text
    assert [key for key, meaning in _meanings().items() if not meaning] == []


@pytest.mark.parametrize("algo", CATALOG)
def test_every_algorithm_has_its_equations(algo: str) -> None:
    page = MADE[f"algorithms/{algo}.md"].partition("## From the code")[2]
    assert page.count("```text\n") == 2
    assert "```text\n\n" not in page

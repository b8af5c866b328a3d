"""What the documents say of the code is what the code makes, and names all that there is."""

import pytest

from protofl_common.experiment.catalog import CATALOG, options_of_a_run
from protofl_common.experiment.settings import known_keys
from tests.bench.reference import DOCS, pages

MADE = pages()


@pytest.mark.parametrize("name", MADE)
def test_what_is_committed_is_what_the_code_makes(name):
    assert (DOCS / name).read_text() == MADE[name], "make docs writes it anew"


def test_every_setting_has_a_line_with_its_meaning():
    text = "".join(MADE.values())
    for key in known_keys():
        assert f"\n| `{key}` | `" in text

    unexplained = [key for key, row in options_of_a_run().items() if not row.metadata["help"]]
    assert unexplained == []


@pytest.mark.parametrize("algo", CATALOG)
def test_every_algorithm_has_a_page_of_one_shape(algo):
    """It says when to use it and what travels, and has four sections in order and both halves."""
    page = MADE[f"algorithms/{algo}.md"]
    assert len(page.splitlines()) <= 200
    assert page.count("\n$$\n") >= 2

    order = ["**Use it when** ", "**Do not** ", f"](travels/{algo}.svg)"]
    order += [f"\n## {title}\n" for title in ("Equations", "Results", "Deviations", "Settings")]
    order += ["](../../client_app/"]

    assert [part for part in order if part not in page] == []

    places = [page.find(part) for part in order]
    assert places == sorted(places)

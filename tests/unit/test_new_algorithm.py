"""A new algorithm takes five places at most, which CONTRIBUTING.md lists; none is forgotten."""

import pytest

from protofl_common.config.options import keys_of
from protofl_common.experiment.catalog import CATALOG
from tests.support import ROOT
from tests.support.acting import CASES, NEED_AN_EARLIER_RUN
from tests.support.declared import DECLARED

PROVED = {
    "local": "tests/federation/test_identities.py",
    "fedproto-avg": "tests/unit/reference/test_fedavg.py",
}
"""The scripts of these algorithms have other names than theirs; add no new algorithm here."""


def text_of(path):
    """The text of a file; "" if there is none."""
    file = ROOT / path
    return file.read_text() if file.exists() else ""


def file_of(half):
    """Return the file of a half that a row names as MODULE:CLASS."""
    return half.partition(":")[0].replace(".", "/") + ".py"


def forgotten(algo):
    """Return the places that lack something of an algorithm."""
    row = CATALOG[algo]
    keys = set(keys_of(row.hparams, f"{algo}.")) - NEED_AN_EARLIER_RUN
    without_case = keys - CASES.keys()
    proof = PROVED.get(algo, f"tests/unit/reference/test_{algo.replace('-', '_')}.py")
    page = f"docs/algorithms/{algo}.md"
    is_there = {
        file_of(row.client): (ROOT / file_of(row.client)).exists(),
        file_of(row.server): (ROOT / file_of(row.server)).exists(),
        proof: algo in text_of(proof),
        f"{proof}, DECLARED": algo in DECLARED,
        f"{proof}, acts of DECLARED: {', '.join(sorted(without_case))}": not without_case,
        f"{page}, headed # {row.title}": text_of(page).startswith(f"# {row.title}\n"),
    }
    return [place for place, found in is_there.items() if not found]


@pytest.mark.parametrize("algo", CATALOG)
def test_a_new_algorithm_is_complete(algo):
    places = forgotten(algo)
    assert not places, f"{algo} lacks something in {'; '.join(places)}"

"""A new algorithm takes six places at most, which CONTRIBUTING.md lists; a test says which of them is forgotten."""

from dataclasses import replace

import pytest

from protofl_common.config.options import keys_of
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import default_run_config
from tests.support import ROOT
from tests.support.acting import CASES, NEED_AN_EARLIER_RUN
from tests.support.declared import DECLARED

PROVED = {
    "local": "tests/federation/test_identities.py",
    "fedproto-avg": "tests/unit/reference/test_fedavg.py",
}
"""Instead of a script of their own name; no new algorithm may be added here."""


def read(page: str) -> str:
    """A page of docs/algorithms; "" if there is none."""
    path = ROOT / "docs" / "algorithms" / f"{page}.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def forgotten(algo: str) -> list[str]:
    row, name = CATALOG[algo], algo.replace("-", "_")
    halves = [f"{half.partition(':')[0].replace('.', '/')}.py" for half in (row.client, row.server)]
    proof = PROVED.get(algo, f"tests/unit/reference/test_{name}.py")
    keys = set(keys_of(row.hparams, f"{algo}.")) - NEED_AN_EARLIER_RUN
    places = {
        **{half: (ROOT / half).exists() for half in halves},
        f"pyproject.toml, [tool.flwr.app.config.{algo}]": keys <= default_run_config().keys(),
        proof: (ROOT / proof).exists() and algo in (ROOT / proof).read_text(encoding="utf-8"),
        f"{proof}, DECLARED": algo in DECLARED,
        f"{proof}, acts of DECLARED: {', '.join(sorted(keys - CASES.keys()))}": keys
        <= CASES.keys(),
        f"docs/algorithms/{algo}.md, headed # {row.title}": read(algo).startswith(
            f"# {row.title}\n"
        ),
    }
    return [place for place, there in places.items() if not there]


@pytest.mark.parametrize("algo", CATALOG)
def test_a_new_algorithm_is_complete(algo: str) -> None:
    assert not forgotten(algo), f"{algo} lacks something in {'; '.join(forgotten(algo))}"


def test_what_is_forgotten_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = {
        "client": "client_app.algorithms.brand_new",
        "server": "server_app.strategies.brand_new",
    }
    monkeypatch.setitem(CATALOG, "brand-new", replace(CATALOG["fedprox"], **halves))
    assert [place.partition(",")[0] for place in forgotten("brand-new")] == [
        "client_app/algorithms/brand_new.py",
        "server_app/strategies/brand_new.py",
        "pyproject.toml",
        *["tests/unit/reference/test_brand_new.py"] * 3,
        "docs/algorithms/brand-new.md",
    ]

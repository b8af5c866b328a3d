"""Which figure of a run stands in a cell."""

from pathlib import Path
from typing import Any

import pytest

from protofl_common.config.options import SettingsError
from protofl_common.tools.tables.figure import Figure, NoFigure
from tests.support.fakes import write_run

DOMAINS = {"0": "amazon", "1": "amazon", "2": "dslr"}
HEADS = [(0.1, 0.2, 0.3), (0.9, 0.8, 0.4), (0.5, 0.6, 0.7)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    evaluations = [{str(site): {"head": accuracy} for site, accuracy in enumerate(heads)} for heads in HEADS]
    server = {"local-prototypes": 30.0, "global-prototypes": 12.0}
    write_run(tmp_path, {}, evaluations, domains=DOMAINS, server=server)
    return tmp_path


@pytest.mark.parametrize(
    ("parts", "value"),
    [
        ({}, 60.0),
        ({"when": "best"}, 70.0),
        ({"when": "last-2"}, 65.0),
        ({"when": "last-9"}, (20 + 70 + 60) / 3),
        ({"domain": "amazon"}, 55.0),
        ({"domain": "dslr", "when": "best"}, 70.0),
        ({"over": "by-samples"}, (50 * 10 + 60 * 20 + 70 * 30) / 60),
        ({"over": "std"}, 8.16496580927726),
        ({"over": "worst-10%"}, 50.0),
        ({"over": "worst-67%"}, 55.0),
        ({"over": "best-10%"}, 70.0),
        ({"what": "prototypes-received"}, 12.0),
        ({"what": "prototypes-sent"}, 10.0),
        ({"what": "numbers"}, (400 + 800) / 4),
        ({"what": "numbers", "when": "last-2"}, (100 + 300) / 2),
    ],
)
def test_a_figure(parts: dict[str, Any], value: float, folder: Path) -> None:
    assert Figure.of(parts, "here").read(folder) == pytest.approx(value)


def test_the_best_is_not_a_lucky_draw_of_clients(tmp_path: Path) -> None:
    """A round that asked the better half of the clients only."""
    half: dict[str, dict[str, float]] = {"0": {"head": 0.9}, "1": {"head": 0.9}}
    write_run(tmp_path, {}, [half, half | {"2": {"head": 0.3}}], domains=DOMAINS)
    assert Figure(when="best").read(tmp_path) == pytest.approx(70.0)


def test_a_figure_says_what_it_is_and_what_the_run_does_not_have(folder: Path) -> None:
    assert str(Figure("best", "head", "amazon", "worst-10%")) == "best head of amazon worst-10%"
    assert str(Figure()) == "final head"
    with pytest.raises(NoFigure, match="no evaluation of prototype"):
        Figure(what="prototype").read(folder)
    with pytest.raises(NoFigure, match="no client of domain 'webcam'; there are amazon, dslr"):
        Figure(domain="webcam").read(folder)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"when": "first"}, "here: figure.when = 'first': choose final, best, last-N"),
        ({"what": "heads"}, "here: figure.what = 'heads': choose head, prototype, "),
        ({"of": "head"}, "here: figure.of: unknown; choose among when, what, domain, over"),
        ({"when": "best", "what": "numbers"}, "figure.when = 'best' needs an accuracy"),
    ],
)
def test_a_wrong_figure_is_named(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        Figure.of(parts, "here")
    assert said in str(error.value)


PLANTED = [(0.9, 0.9, 0.9), (0.1, 0.2, 0.3), (0.6, 0.7, 0.5)]
"""On validation data the first evaluation is the best, which on test data is the worst."""


@pytest.mark.parametrize(
    ("parts", "value"),
    [
        ({"when": "best"}, 20.0),
        ({"when": "best", "over": "worst-10%"}, 10.0),
        ({"when": "best", "domain": "dslr"}, 30.0),
        ({"when": "best", "what": "validation/head"}, 90.0),
        ({"what": "validation/head"}, 60.0),
        ({"what": "validation/head", "over": "by-samples"}, (60 * 10 + 70 * 20 + 50 * 30) / 60),
        ({}, 60.0),
    ],
)
def test_the_best_round_follows_validation_data(parts: dict[str, Any], value: float, folder: Path) -> None:
    tested, validated = (
        [{str(site): {"head": accuracy} for site, accuracy in enumerate(heads)} for heads in rows]
        for rows in (HEADS, PLANTED)
    )
    figure = Figure.of(parts, "here")
    chosen = ", its round chosen on test data" if figure.when == "best" else ""
    assert figure.described(folder) == f"{figure}{chosen}"
    write_run(folder, {}, tested, domains=DOMAINS, validation=validated)
    assert figure.read(folder) == pytest.approx(value)
    assert figure.described(folder) == f"{figure}{chosen.replace('test', 'validation')}"

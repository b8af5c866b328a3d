"""The page of hand-made folders: hostile names, runs that go on, runs of older versions, many clients and classes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from protofl_common.basics.text import in_order
from protofl_common.report import charts
from protofl_common.report.page import FIGURES, write_report
from tests.support.fakes import row, write, write_prototypes
from tests.support.given import Patch
from tests.support.pages import Page

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=http://evil.example/x.png onerror=alert(1)>',
    "'onload='alert(1)",
    "</svg></figure></body>",
    "--><b>bold</b><!--",
    r"$\frac{1}{0$ \begin{x}",
    'url(http://evil.example) id="x" #010203 href="#a"',
    "_hidden 漢字 🎈 &amp; ]]>",
)


def draw_only(monkeypatch: Patch, *functions: Any) -> None:
    """Of all figures these: each takes a good part of a second."""
    monkeypatch.setattr("protofl_common.report.page.FIGURES", {"Figures": functions})


def test_hostile_names_are_shown_as_they_are_and_do_nothing(tmp_path: Path) -> None:
    sites = [f"{text} site" for text in HOSTILE]
    rows = [row(number, sites) for number in (1, 2, 3)]
    rows[0] |= {"void": True, "void-because": "weights of the server would be NaN"}
    rows[1] |= {
        "refused": {sites[0]: HOSTILE[1]},
        "failed": {sites[1]: HOSTILE[0]},
        "missing": [sites[2]],
    }
    rows[2]["losses"][HOSTILE[0]] = 1.0
    folder = write(tmp_path / "run", rows, dataset=HOSTILE[0])
    write_prototypes(folder, sites, list(HOSTILE), 3)
    facts = json.loads((folder / "sites.json").read_text())
    for index, site in enumerate(sites):
        facts["sites"][site] |= {"domain": HOSTILE[index], "arch": HOSTILE[0]}
    facts |= {"algorithm": HOSTILE[3], "paper": HOSTILE[4]}
    (folder / "sites.json").write_text(json.dumps(facts))
    page = Page(write_report(folder))
    assert [cells[0] for cells in page.table("client", "domain")] == in_order(sites)
    assert ["2", "refused", sites[0], HOSTILE[1]] in page.table("round", "what")
    assert ["2", "missing", sites[2], "no answer in time"] in page.table("round", "what")
    assert [
        "1",
        "void",
        "all",
        "weights of the server would be NaN; nothing was merged",
    ] in page.table("round", "what")
    assert {"accuracy-of-domains", "distribution", "prototypes-map"} <= set(page.figures)
    assert HOSTILE[0] in page.figures["losses"]


def test_metrics_have_a_line_each_and_recalls_a_row_per_class(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    draw_only(monkeypatch, charts.metrics)

    def figures(value: float) -> dict[str, float]:
        return {"mean": value, "weighted": value / 2, "worst-10%": 0.25, "std": 0.125}

    def of_round(number: int) -> dict[str, Any]:
        recalls = {
            f"{kind}/recall/{label}": figures(0.1 * label)
            for kind in ("head", "prototype")
            for label in (0, 2)
        }
        return {"head/auc": figures(0.1 * number), **recalls}

    rows = [row(number, ["a", "b"], metrics=of_round(number)) for number in (1, 2)]
    page = Page(write_report(write(tmp_path, [*rows, row(2, ["a", "b"], "final")])))
    (line,) = [line for table in page.tables for line in table if line[0] == "head/auc"]
    assert line == ["head/auc", "0.2000", "0.1000", "0.2500", "0.1250"]
    assert "head/auc" in page.figures["metrics"]
    assert "recall/" not in page.figures["metrics"]
    assert "Recall of each class by" in page.figures["recall"]
    assert "metrics" not in Page(write_report(write(tmp_path / "none", [row(1, ["a"])]))).figures


def test_losses_over_many_powers_of_ten_have_plain_numbers_beside_them(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    draw_only(monkeypatch, charts.losses)
    rows = [row(number, ["a"]) for number in (1, 2, 3, 4)]
    for index, one in enumerate(rows):
        one["losses"] = {"total": 200 / 10**index}
    text = Page(write_report(write(tmp_path / "run", rows))).figures["losses"]
    assert {"1", "10", "100"} <= set(text.split())
    assert "$" not in text


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(tmp_path: Path, monkeypatch: Patch) -> None:
    draw_only(monkeypatch, charts.means)
    folder = write(tmp_path / "run", [row(1, ["a", "b"]), row(2, ["a", "b"])])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "round", "rou')
    page = Page(write_report(folder))
    assert "2 of 9" in page.texts
    assert "This run is not finished: the page shows it as far as it is." in page.texts
    page = Page(write_report(write(tmp_path / "new", [])))
    assert "No round has been finished yet." in page.texts
    assert not page.figures


def test_a_run_of_an_older_version_lacks_what_was_not_recorded(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    draw_only(monkeypatch, *FIGURES["Data"], *FIGURES["Prototypes"])
    folder = write(tmp_path / "run", [row(1, ["a"]), row(1, ["a"], "final")])
    summary = {"clients": {"a": {"arch": "cnn4", "domain": "", "parameters": 9}}, "seconds": 61.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    page = Page(write_report(folder))
    assert page.table("client", "domain") == [["a", "–", "cnn4", "9", "–", "–", "0.5", "1.0"]]
    assert not {"distribution", "margins-by-class", "prototypes-map"} & set(page.figures)


@pytest.mark.parametrize(
    "damage", ["client-prototypes.safetensors", "sites.json", "prototypes.jsonl", "summary.json"]
)
def test_a_damaged_file_costs_its_figures_only(
    damage: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    draw_only(
        monkeypatch,
        charts.means,
        *FIGURES["Data"],
        *FIGURES["Prototypes"],
        *FIGURES["Privacy in figures"],
    )
    folder = write(tmp_path / "run", [row(number, ["a", "b"]) for number in (1, 2)])
    write_prototypes(folder, ["a", "b"], ["x", "y", "z"], 2)
    (folder / damage).write_bytes(b'{"half": ')
    page = Page(write_report(folder))
    assert "accuracy-curves" in page.figures


@pytest.mark.parametrize(("sites", "classes", "rounds"), [
    (1, 2, 1), (3, 1, 2), pytest.param(150, 120, 3, marks=pytest.mark.long), (5, 10, 150),
])  # fmt: skip
def test_any_size_of_run_can_be_drawn(
    sites: int, classes: int, rounds: int, tmp_path: Path
) -> None:
    names = [f"hospital-number-{index:03d}-of-the-north" for index in range(sites)]
    folder = write(tmp_path / "run", [row(number, names) for number in range(1, rounds + 1)])
    write_prototypes(folder, names, [f"class {index}" for index in range(classes)], rounds)
    page = Page(write_report(folder))
    assert len(page.source) < 3e6
    assert ("t-SNE of the prototypes" in page.figures.get("prototypes-map", "")) == (
        sites * classes >= 50
    )


def test_the_same_run_gives_the_same_page(tmp_path: Path, monkeypatch: Patch) -> None:
    draw_only(monkeypatch, *FIGURES["Prototypes"])  # some by chance
    monkeypatch.setitem(
        sys.modules, "sklearn.manifold", None
    )  # a few points are drawn without it: it takes a second
    folder = write(tmp_path / "run", [row(number, ["a", "b"]) for number in (1, 2)])
    write_prototypes(folder, ["a", "b"], ["x", "y", "z"], 2)
    first = Page(write_report(folder))
    assert "prototypes-map" in first.figures
    assert write_report(folder).read_text() == first.source

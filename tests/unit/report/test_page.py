"""The page of hand-made folders: hostile names, unfinished and damaged runs, many clients."""

import json
import sys

import pytest

from protofl_common.basics.text import in_order
from protofl_common.report import charts
from protofl_common.report.page import FIGURES, write_report
from protofl_common.report.reading import RecordedRun
from tests.support.fakes import row, write, write_prototypes
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


def draw_only(monkeypatch, *functions):
    """Let a page have these figures only: each takes a good part of a second."""
    monkeypatch.setattr("protofl_common.report.page.FIGURES", {"Figures": functions})


def rounds_of(sites, number):
    """Return the rows of the first so many rounds."""
    return [row(index, sites) for index in range(1, number + 1)]


def page_of(folder, rows, **settings):
    """Write a run with these rows; return its page."""
    return Page(write_report(write(folder, rows, **settings)))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The page of a run with a site, a class, a domain … for each hostile text."""
    sites = [f"{text} site" for text in HOSTILE]
    void, troubled, last = rounds_of(sites, 3)
    void |= {"void": True, "void-because": "weights of the server would be NaN"}
    troubled["refused"] = {sites[0]: HOSTILE[1]}
    troubled["failed"] = {sites[1]: HOSTILE[0]}
    troubled["missing"] = [sites[2]]
    last["losses"][HOSTILE[0]] = 1.0
    folder = tmp_path_factory.mktemp("hostile") / "run"
    write(folder, [void, troubled, last], dataset=HOSTILE[0])
    write_prototypes(folder, sites, list(HOSTILE), 3)

    facts = json.loads((folder / "sites.json").read_text())
    facts |= {"algorithm": HOSTILE[3], "paper": HOSTILE[4]}
    for site, text in zip(sites, HOSTILE, strict=True):
        facts["sites"][site] |= {"domain": text, "arch": HOSTILE[0]}
    (folder / "sites.json").write_text(json.dumps(facts))
    return Page(write_report(folder))


@pytest.mark.slow
def test_hostile_names_are_shown_as_they_are_and_do_nothing(hostile):
    """`Page` fails on a page with a script, an event handler or a link to another host."""
    sites = [f"{text} site" for text in HOSTILE]
    assert [cells[0] for cells in hostile.table("client", "domain")] == in_order(sites)
    assert HOSTILE[0] in hostile.figures["losses"]
    assert {"accuracy-of-domains", "distribution", "prototypes-map"} <= set(hostile.figures)


def test_troubles_of_rounds_are_a_table(hostile):
    troubles = hostile.table("round", "what")
    assert ["2", "refused", f"{HOSTILE[0]} site", HOSTILE[1]] in troubles
    assert ["2", "missing", f"{HOSTILE[2]} site", "no answer in time"] in troubles

    reason = "weights of the server would be NaN; nothing was merged"
    assert ["1", "void", "all", reason] in troubles


def test_metrics_have_a_line_each_and_recalls_a_row_per_class(tmp_path, monkeypatch):
    """AUC is a line of its figure; the recalls of classes 0 and 2 have a figure of their own."""
    draw_only(monkeypatch, charts.metrics)

    def figures(value):
        """Return a metric over the clients, of this mean."""
        return {"mean": value, "weighted": value / 2, "worst-10%": 0.25, "std": 0.125}

    def metrics_of(number):
        """Return the figures of a round; those of a metric of the head grow with its number."""
        metrics = {"head/auc": figures(0.1 * number)}
        for label in (0, 2):
            metrics[f"head/recall/{label}"] = figures(0.1 * label)
            metrics[f"prototype/recall/{label}"] = figures(0.1 * label)
        return metrics

    rows = rounds_of(["a", "b"], 2)
    for number, one in enumerate(rows, start=1):
        one["metrics"] = metrics_of(number)
    page = page_of(tmp_path, [*rows, row(2, ["a", "b"], "final")])

    lines = []
    for table in page.tables:
        lines += [cells for cells in table if cells[0] == "head/auc"]

    spread = ["0.2500", "–", "–", "–", "0.1250", "–"]  # no client tells its own
    assert lines == [["head/auc", "0.2000", "0.1000", *spread, "–"]]  # of the last round
    assert (
        "metrics as they are, after round 1 and 2, over the clients that have them" in page.source
    )
    assert "head/auc" in page.figures["metrics"]
    assert "recall/" not in page.figures["metrics"]
    assert "Recall of each class by" in page.figures["recall"]


def test_losses_over_many_powers_of_ten_have_plain_numbers_beside_them(tmp_path, monkeypatch):
    """The losses are 200, 20, 2 and 0.2, on a logarithmic axis."""
    draw_only(monkeypatch, charts.losses)
    rows = rounds_of(["a"], 4)
    for index, one in enumerate(rows):
        one["losses"] = {"total": 200 / 10**index}

    text = page_of(tmp_path, rows).figures["losses"]

    assert {"1", "10", "100"} <= set(text.split())
    assert "$" not in text  # as in $10^2$


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(tmp_path, monkeypatch):
    """Two of nine rounds are whole; a third one is being written."""
    draw_only(monkeypatch, charts.means)
    folder = write(tmp_path / "run", rounds_of(["a", "b"], 2))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "round", "rou')

    page = Page(write_report(folder))
    assert "2 of 9" in page.texts
    assert "This run is not finished: the page shows it as far as it is." in page.texts


def test_a_round_that_ends_while_the_page_is_drawn_is_left_out(tmp_path):
    """The figures of clients are read a second time, when there may be more of them."""
    rows = rounds_of(["a", "b"], 3)
    for one in rows:
        for client in one["clients"].values():
            client["prototypes-of-classes"] = [1, 2, 0]
    run = RecordedRun(write(tmp_path, rows[:2]))
    assert all(row["clients"] == {} for row in run.rows)

    write(tmp_path, rows)

    drawings = [*charts.of_clients(run), *charts.numbers(run)]
    assert [drawing.name for drawing in drawings] == [
        "accuracy-of-clients-head",
        "accuracy-of-clients-prototype",
        "prototype-numbers",
    ]


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    page = page_of(tmp_path, [])
    assert "No round has been finished yet." in page.texts
    assert not page.figures


@pytest.fixture
def two_rounds(tmp_path):
    """The folder of a run of two rounds, with the prototypes of two clients and three classes."""
    folder = write(tmp_path / "run", rounds_of(["a", "b"], 2))
    write_prototypes(folder, ["a", "b"], ["x", "y", "z"], 2)
    return folder


@pytest.mark.parametrize("damaged", [
    "client-prototypes.safetensors", "sites.json", "prototypes.jsonl", "summary.json",
])  # fmt: skip
def test_a_damaged_file_costs_its_figures_only(damaged, two_rounds, monkeypatch):
    """The curve of accuracies needs none of the files that are damaged."""
    # the figures that the damaged files are read for, and one that needs none of them
    concerned = [*FIGURES["Data"], *FIGURES["Prototypes"]]
    draw_only(monkeypatch, charts.means, *concerned)
    (two_rounds / damaged).write_bytes(b'{"half": ')

    assert "accuracy-curves" in Page(write_report(two_rounds)).figures


@pytest.mark.slow
@pytest.mark.parametrize(("sites", "classes", "rounds"), [
    (1, 2, 1), (3, 1, 2), pytest.param(150, 120, 3, marks=pytest.mark.long), (5, 10, 150),
])  # fmt: skip
def test_any_size_of_run_can_be_drawn(sites, classes, rounds, tmp_path):
    """The runs have from one site to 150, from one class to 120, and from one round to 150."""
    names = [f"hospital-number-{index:03d}-of-the-north" for index in range(sites)]
    folder = write(tmp_path / "run", rounds_of(names, rounds))
    write_prototypes(folder, names, [f"class {index}" for index in range(classes)], rounds)

    page = Page(write_report(folder))

    assert len(page.source) < 3e6  # bytes
    assert "metrics" not in page.figures

    has_many_points = sites * classes >= 50  # fewer are shown by their principal components
    caption = page.figures.get("prototypes-map", "")

    assert ("t-SNE of the prototypes" in caption) is has_many_points


def test_the_same_run_gives_the_same_page(two_rounds, monkeypatch):
    """The figures of prototypes depend on random numbers, which have a seed."""
    draw_only(monkeypatch, *FIGURES["Prototypes"])
    # A few points are drawn without this module, whose import takes a second.
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)

    first = Page(write_report(two_rounds))
    assert "prototypes-map" in first.figures
    assert write_report(two_rounds).read_text() == first.source

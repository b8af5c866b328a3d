"""The page of real runs has the run's own numbers.

What the server records for it: margins, and who has which samples.
"""

import json
import math
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from flwr.app import MessageType
from safetensors.numpy import load_file

from protofl_common.basics.text import human_bytes
from protofl_common.maths.prototypes import MAX_COMPARED, Prototypes, margins
from protofl_common.report import charts
from server_app.callbacks import artifacts
from tests.support.attacks import both, by, card_with, lost, scaled, values_of, when
from tests.support.harness import client_of, federate, run_config, run_federation
from tests.support.pages import Page, chart_arguments

SMALL = {"report": True, "train_samples": 40, "test_samples": 40}
DIGITS = {
    "dataset": "digits",
    "partition": "iid",
    "train_samples": 30,
    "test_samples": 30,
}
ALWAYS = ["result", "accuracy", "data", "time", "lost-replies", "clients", "settings"]


def sites_of(outcome):
    """Return what a run has recorded of each site."""
    return json.loads((outcome.folder / "sites.json").read_text())["sites"]


def page_of(outcome):
    return Page(outcome.folder / "report.html")


def run(folder, clients, **settings):
    return federate(folder, clients=clients, **SMALL | settings)


@pytest.fixture(scope="module")
def fedtgp(tmp_path_factory):
    """Run FedTGP for three rounds with four clients of three classes each.

    From the second round on site-3 sends prototypes of 10⁹ times their length, which are refused.
    """
    config = run_config(
        tmp_path_factory.mktemp("fedtgp"),
        **SMALL,
        dataset="digits",
        partition="pathological",
        classes_per_client=3,
        algo="fedtgp",
        fedtgp__server_epochs=5,
        rounds=3,
    )
    rubbish = both(when(scaled(1e9), number=2), when(scaled(1e9), number=3))
    return run_federation(config, clients=4, tamper=by({1003: rubbish}))


def prototypes_sent(outcome, round_number):
    """Return site -> means and labels of the prototypes that it has sent in a round."""
    uploads = {}
    for message, reply in outcome.exchanged(number=round_number):
        record = reply.content.array_records["prototypes"]
        site = f"site-{message.metadata.dst_node_id - 1000}"
        uploads[site] = values_of(record["means"]), values_of(record["labels"])
    return uploads


def margin(means, labels, label):
    """Return a class's margin: the smallest distance of its prototypes from those of other classes.

    That is the definition under FedTGP's Figure 1; NaN if there is no pair.
    """
    distances = []
    for own in means[labels == label].astype(np.float64):
        for other in means[labels != label].astype(np.float64):
            distances.append(float(np.linalg.norm(own - other)))
    return min(distances, default=math.nan)


def assert_margins(found, means, labels):
    """The margins of ten classes that a run has recorded are those of these prototypes."""
    recorded = [math.nan if value is None else value for value in found]
    wanted = [margin(means, labels, label) for label in range(10)]
    np.testing.assert_allclose(recorded, wanted, rtol=1e-4)


def test_fedtgp_has_every_section_that_a_run_of_prototypes_can_have(fedtgp):
    """Sections and figures stand in this order."""
    page = page_of(fedtgp)
    assert page.sections == [*ALWAYS[:3], "prototypes", *ALWAYS[3:]]
    assert list(page.figures) == [
        "accuracy-curves",
        "accuracy-of-clients-head",
        "accuracy-of-clients-prototype",
        "losses",
        "distribution",
        "margins-by-class",
        "prototypes-map",
        "time-of-a-round",
    ]

    said = "The first two principal components of the prototypes after round 3"
    assert said in page.figures["prototypes-map"]
    # site-3 was refused in rounds 2 and 3
    assert "Points are not all of the same clients." in page.figures["accuracy-curves"]


def test_a_pages_accuracies_are_the_runs(fedtgp):
    """In the table, by the ways to predict, and in the figure of means."""
    final = fedtgp.rows[-1]
    for kind, *cells in page_of(fedtgp).table("", "mean"):
        shares = sorted(client["accuracy"][kind] for client in final["clients"].values())
        assert len(shares) == 4
        worst, best = shares[0], shares[-1]
        weighted = final["accuracy"][kind]["weighted"]
        # the worst 10 %, 20 % and 40 %, and the best 10 %, of four clients are one client each
        wanted = [np.mean(shares), weighted, worst, worst, worst, best, np.std(shares)]
        *percentages, variance = cells[: len(wanted) + 1]
        assert percentages == [f"{100 * value:.2f}" for value in wanted]
        assert variance == f"{np.var(100 * np.array(shares)):.1f}"

    *_, lines, unit = chart_arguments(charts.means, fedtgp.folder, "line_chart")
    assert unit == "test accuracy, %"
    for kind, figures in final["accuracy"].items():
        assert lines[f"{kind}, mean"][-1] == 100 * figures["mean"]
        assert lines[f"{kind}, worst 10 %"][-1] == 100 * figures["worst-10%"]


def test_a_pages_text_and_settings_are_the_runs(fedtgp):
    """A setting's row has its value in the run, and its default."""
    page = page_of(fedtgp)
    text = "\n".join(page.texts)

    assert "FedTGP on digits" in text
    assert human_bytes(fedtgp.summary["bytes"]["up"]) in text
    assert human_bytes(fedtgp.summary["bytes"]["down"]) in text

    settings = {}
    for head, *rows in page.tables:
        if head[0] == "setting":
            settings |= {name: values for name, *values in rows}

    assert settings["algo"] == ['"fedtgp"', '"fedproto"']
    assert settings["rounds"] == ["3", "20"]
    assert settings["fedtgp.server-epochs"] == ["5", "100"]
    assert set(settings) == set(fedtgp.summary["settings"])


def test_recorded_margins_are_those_of_the_prototypes_that_were_sent(fedtgp):
    """Of each client in each round, and of the merged prototypes in the last."""
    lines = (fedtgp.folder / "prototypes.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]

    assert [row["round"] for row in rows] == [1, 2, 3]

    for row in rows:
        uploads = prototypes_sent(fedtgp, row["round"])
        if row["round"] > 1:
            del uploads["site-3"]  # refused
        assert sorted(row["clients"]) == list(uploads)
        for site, (means, labels) in uploads.items():
            assert_margins(row["clients"][site], means, labels)

    merged = load_file(fedtgp.folder / "prototypes.safetensors")
    assert_margins(rows[-1]["global"], merged["means"], merged["labels"])


def test_a_runs_last_prototypes_are_kept_for_the_map(fedtgp):
    """Those of site-0 to site-2, as site-3 was refused, and the server's."""
    kept = load_file(fedtgp.folder / "client-prototypes.safetensors")
    uploads = prototypes_sent(fedtgp, 3)
    for owner, site in enumerate(("site-0", "site-1", "site-2")):
        means, labels = uploads[site]
        is_its = kept["owners"] == owner
        assert np.array_equal(kept["means"][is_its], means)
        assert np.array_equal(kept["labels"][is_its], labels)

    merged = load_file(fedtgp.folder / "prototypes.safetensors")
    assert np.array_equal(kept["global-means"], merged["means"])
    of_clients, of_server, *_ = page_of(fedtgp).marks("prototypes-map")
    assert of_clients == len(kept["labels"])
    assert of_server == len(merged["labels"])


def test_the_page_shows_who_has_which_training_samples(fedtgp):
    """The heat map has the number of each class [C, S] at each client."""
    sites = sites_of(fedtgp)
    *_, counts_CS, classes, clients, unit, _ = chart_arguments(
        charts.samples, fedtgp.folder, "heat_map"
    )

    assert classes == [str(label) for label in range(10)]
    assert clients == ["site-0", "site-1", "site-2", "site-3"]
    assert unit == "training samples"

    for index, site in enumerate(clients):
        labels = client_of(fedtgp.grid.run_config, partition=index, clients=4).data.train_labels
        counts = np.bincount(labels, minlength=10).tolist()
        assert sites[site]["train-classes"] == counts
        assert np.nan_to_num(counts_CS[:, index]).tolist() == counts


def test_who_was_refused_is_told_with_the_reason(fedtgp):
    """Site-3's prototypes of rounds 2 and 3 were too long."""
    rows = page_of(fedtgp).table("round", "what", "client", "reason")

    assert len(rows) == 2
    for number, (round_text, what, client, reason) in enumerate(rows, start=2):
        assert (round_text, what, client) == (str(number), "refused", "site-3")
        assert "max-prototype-norm" in reason


def test_the_page_of_fedplvm_shows_the_number_of_prototypes_per_class(tmp_path):
    """Five clients of five domains have several prototypes of a class; rounds 1 and 3 evaluate."""
    fedplvm = run(tmp_path, clients=5, algo="fedplvm", rounds=3, evaluate_every=2)
    figures = page_of(fedplvm).figures

    assert "accuracy-of-domains" in figures
    assert "prototype-numbers" in figures

    *_, lines, _ = chart_arguments(charts.numbers, fedplvm.folder, "line_chart")
    for site, (_, labels) in prototypes_sent(fedplvm, 3).items():
        domain = fedplvm.summary["clients"][site]["domain"]
        per_class = len(labels) / len(np.unique(labels))
        assert lines[domain][-1] == pytest.approx(per_class)

    _name, _title, _caption, _rounds, phases, *_ = chart_arguments(
        charts.time, fedplvm.folder, "line_chart"
    )
    assert np.isnan(phases["client: evaluate"]).tolist() == [False, True, False]


def test_without_prototypes_their_section_is_absent(tmp_path):
    """The report of local training, in which no reply was lost."""
    outcome = run(tmp_path, clients=3, algo="local")
    page = page_of(outcome)

    assert page.sections == ALWAYS

    link = page.texts.index("Lost replies")  # in the table of contents
    heading = page.texts.index("Lost replies", link + 1)

    assert page.texts[heading + 1] == "None: every reply came in time and was accepted."
    assert not (outcome.folder / "prototypes.jsonl").exists()
    assert "not all of" not in page.figures["accuracy-curves"]


def test_a_page_that_cannot_be_drawn_fails_nothing(tmp_path, monkeypatch, capsys):
    broken = MagicMock(side_effect=MemoryError("no room for ink"))
    monkeypatch.setattr("protofl_common.report.page.write_report", broken)

    assert run(tmp_path, clients=2, algo="local", rounds=1).summary["rounds"] == 1
    assert "report: not drawn, MemoryError: no room for ink" in capsys.readouterr().out


def test_a_run_that_fails_leaves_a_page_too(tmp_path):
    settings = {"algo": "local", "rounds": 9, "run_name": "mine", "round_timeout": 0.1}
    with pytest.raises(Exception, match="3 rounds in a row"):
        federate(tmp_path, clients=2, tamper=when(lost, MessageType.TRAIN), **SMALL, **settings)

    page = Page(tmp_path / "runs" / "mine" / "report.html")
    assert "This run is not finished: the page shows it as far as it is." in page.texts
    # three rows for each of three rounds: two missing replies, and that the round is void
    assert len(page.table("round", "what")) == 9


@pytest.mark.parametrize(
    ("points", "labels", "wanted"),
    [
        # classes 2 and 4 are absent
        ([(0, 0), (3, 4), (0, 2)], [0, 1, 3], [2, 13**0.5, np.nan, 2, np.nan]),
        # prototypes of one class are no neighbours
        ([(0, 0), (0, 1), (0, 5)], [0, 0, 1], [4, 4]),
        # a single class has no margin
        ([(0, 0), (0, 1)], [1, 1], [np.nan] * 3),
        # two classes with the same prototype
        ([(1, 1), (1, 1)], [0, 1], [0, 0]),
    ],
)
def test_margins_in_the_plane(points, labels, wanted):
    found = margins(Prototypes(torch.tensor(points), torch.tensor(labels)), len(wanted))
    np.testing.assert_allclose(found.numpy(), wanted)


def test_too_many_prototypes_are_not_compared():
    many = Prototypes(torch.zeros(MAX_COMPARED + 1, 2), torch.arange(MAX_COMPARED + 1))
    assert margins(many, MAX_COMPARED + 1).isnan().all()


def test_with_hidden_labels_all_training_samples_are_counted(tmp_path):
    """All 30 of each client count, not only the half of the positive ones that keep their label."""
    config = run_config(tmp_path, algo="fedproto", positive_rate=0.5, rounds=1, **DIGITS)
    for facts in sites_of(run_federation(config, clients=2)).values():
        assert sum(facts["train-classes"]) == 30


def test_a_site_that_is_no_part_of_the_division_has_no_counts(tmp_path):
    """The server counts a client's samples of each class only if it knows how they are divided."""
    nodes = {
        1: {"partition-id": 0, "num-partitions": 2},
        # says it is client 1 of 2, but its data are those of another domain
        2: {"partition-id": 1, "num-partitions": 2, "domain": "photo"},
        # has no partition at all
        3: {"site-name": "north", "domain": "photo"},
    }
    sites = sites_of(federate(tmp_path, nodes=nodes, algo="fedtgp", num_clients=3, rounds=1))

    assert [site for site, facts in sites.items() if "train-classes" in facts] == ["site-0"]


def test_who_claims_a_million_partitions_makes_no_work(tmp_path, monkeypatch):
    """The server does not divide the data for the figure of who has what."""
    divide = MagicMock(side_effect=artifacts.shares_of)
    monkeypatch.setattr(artifacts, "shares_of", divide)
    claims = card_with(num_partitions=10**6)
    config = run_config(tmp_path, num_clients=2, rounds=1, **DIGITS)
    run_federation(config, clients=2, tamper=by({1000: claims, 1001: claims}, MessageType.QUERY))

    assert not divide.called


def test_an_empty_cache_on_the_server_gives_no_division(tmp_path, monkeypatch):
    """A server that has no data cannot say who has how many samples of each class."""
    monkeypatch.setattr(artifacts, "data_if_cached", lambda settings: None)
    outcome = federate(tmp_path, clients=2, rounds=1, **DIGITS)

    assert not (outcome.folder / "report.html").exists()  # which these settings do not want
    for facts in sites_of(outcome).values():
        assert "train-classes" not in facts

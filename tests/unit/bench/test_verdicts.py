"""The rule of docs/papers.md, and that the page is what it gives."""

from __future__ import annotations

import math
import statistics

import pytest

from tests.bench import verdicts
from tests.bench.verdicts import Claim, Interval, Sample, interval_of, lines_of


def of_seeds(*values):
    """Return a sample whose values are known, of the seeds 1, 2, …"""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Sample(dict(enumerate(values, 1)), statistics.fmean(values), deviation, len(values))


def of_means(mean, deviation, seeds=3):
    """Return a sample of which only mean and deviation are known."""
    return Sample({}, mean, deviation, seeds)


@pytest.mark.parametrize(("page", "exploration"), [("VERDICTS", False), ("EXPLORATION", True)])
def test_the_pages_are_what_the_script_writes(page, exploration):
    path = getattr(verdicts, page)
    assert path.read_text() == verdicts.with_list(path, exploration), "make verdicts"


def test_every_cell_that_is_measured_names_a_page_of_the_notebook():
    _heads, *lines = verdicts.MEASURED.read_text().splitlines()
    pages = {line.rsplit(",", 1)[1] for line in lines}
    assert [page for page in pages if not (verdicts.EXPLORATION.parent / page).exists()] == []


@pytest.mark.parametrize(
    ("low", "high", "claimed", "verdict"),
    [
        (1.1, 2.9, 2.0, "yes"),
        (1.1, 3.1, 2.0, "in direction"),
        (0.9, 1.5, 2.0, "in direction"),
        (-0.1, 2.0, 2.0, "undecided"),
        (-0.9, -0.1, 2.0, "no"),
        (-2.5, -1.5, -2.0, "yes"),
        (-9.0, -0.1, -2.0, "in direction"),
        (0.1, 0.2, -2.0, "no"),
        (0.1, 9.0, None, "in direction"),
        (-9.0, -0.1, None, "no"),
        (-math.inf, math.inf, 2.0, "undecided"),
    ],
)
def test_the_verdict_on_a_difference_follows_from_our_interval_and_the_claim(
    low, high, claimed, verdict
):
    """Our interval is from ``low`` to ``high``; ``claimed`` is None for "larger" without a number.

    "yes" if all of the interval is within half of the claim around it; "in direction" if all of it
    has the claim's sign; "no" if all of it has the other sign.
    """
    half_width = (high - low) / 2
    mean = 0.0 if math.isinf(half_width) else (low + high) / 2
    ours = Interval(mean, half_width, seeds=3)

    assert verdicts.verdict_on_difference(ours, claimed) == verdict


@pytest.mark.parametrize(
    ("mean", "half_width", "verdict"),
    [(50.0, 0.9, "yes"), (50.0, 1.1, "undecided"), (52.0, 0.9, "no"), (51.5, 0.6, "undecided")],
)
def test_the_verdict_on_a_number_follows_from_our_interval(mean, half_width, verdict):
    """The paper's number is 50; a difference of half of ``effect`` = 2 does not matter."""
    assert verdicts.verdict_on_number(Interval(mean, half_width, 3), 50.0, effect=2.0) == verdict


def test_intervals_are_paired_where_the_seeds_are_known_and_by_welch_where_they_are_not():
    """By hand: 1, 2, 3 have the deviation 1, and t with 2 degrees of freedom is 4.3027."""
    one = of_seeds(11.0, 22.0, 33.0)
    other = of_seeds(10.0, 20.0, 30.0, 40.0)
    paired = interval_of([one], [other])

    assert (paired.mean, paired.seeds) == (2.0, 3)
    assert paired.half_width == pytest.approx(4.3027 / math.sqrt(3), abs=1e-4)

    # Welch: variances 1/3 and 4/5, df = (1/3 + 4/5)² / ((1/3)²/2 + (4/5)²/4) = 5.958, t = 2.4512
    unpaired = interval_of([of_means(12.0, 1.0)], [of_means(10.0, 2.0, seeds=5)])

    assert unpaired.half_width == pytest.approx(2.4512 * math.sqrt(1 / 3 + 4 / 5), abs=1e-3)


def test_two_seeds_give_no_interval_and_what_is_counted_needs_none():
    assert math.isinf(interval_of([of_seeds(1.0, 1.1)]).half_width)
    assert math.isinf(interval_of([of_seeds(5.0)], [of_means(1.0, 0.1)]).half_width)
    assert interval_of([of_means(437.0, 0.0, seeds=1)]).half_width == 0


def test_a_row_that_was_not_measured_leaves_best_undecided_unless_it_is_refuted():
    """In the paper's Office-10 FedPLVM leads FedFA by 1.66 points, and is the best of all rows.

    FedFA is not measured first; then FedPLVM leads clearly, then by as much as in the paper, and in
    the end FPL is ahead of it.
    """
    claim = Claim("best", table="fedplvm-office10", columns=["average"], best="FedPLVM")
    cells = {("FedPLVM", "average"): of_seeds(60.0, 61.0, 62.0)}
    names = ("FedAvg", "FedProx", "FedProto", "FedPCL", "FPL")
    cells |= {(name, "average"): of_seeds(50.0, 51.1, 52.0) for name in names}

    (line,) = lines_of(claim, {"fedplvm-office10": cells})

    assert (line.paper, line.verdict) == ("ahead by 1.66", "undecided")
    assert "not measured: FedFA" in line.ours

    cells["FedFA", "average"] = of_seeds(52.0, 53.1, 54.0)
    (line,) = lines_of(claim, {"fedplvm-office10": cells})

    assert line.verdict == "in direction"

    cells["FedFA", "average"] = of_seeds(58.2, 59.4, 60.3)
    (line,) = lines_of(claim, {"fedplvm-office10": cells})

    assert line.verdict == "yes"

    cells["FPL", "average"] = of_seeds(70.0, 71.1, 72.0)
    del cells["FedFA", "average"]
    (line,) = lines_of(claim, {"fedplvm-office10": cells})

    assert line.verdict == "no"
    assert "rank 2 of 6" in line.ours

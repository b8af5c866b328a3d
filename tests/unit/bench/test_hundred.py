"""What tests/bench/hundred.py calls a fall."""

from __future__ import annotations

from protofl_common.experiment.catalog import CATALOG
from protofl_common.tools.tables.spec import read_table
from tests.bench.hundred import TABLE, Curve

OF_ONE_ROUND = {"gaussian", "mpft"}


def test_every_method_that_takes_more_than_a_round_has_a_row():
    rows = read_table(TABLE).rows.values()
    assert {row.settings["algo"] for row in rows} == CATALOG.keys() - OF_ONE_ROUND


def test_a_fall_is_from_the_best_to_the_lowest_after_it_of_means_over_five_evaluations():
    """A cell has the best mean, the fall and the end; a fall of many points is bold."""
    rising = Curve.of([10.0] * 5 + [90.0] * 5)

    assert (rising.best, rising.lowest_after, rising.end) == (90.0, 90.0, 90.0)
    assert rising.cells() == ["90.0", "0.0", "90.0"]

    one_bad_round = Curve.of([90.0] * 5 + [80.0] + [90.0] * 5)

    assert one_bad_round.lowest_after == 88.0  # (4 · 90 + 80) / 5
    assert not one_bad_round.falls

    broken_down = Curve.of([90.0] * 5 + [70.0] * 5 + [89.0] * 5)

    assert broken_down.cells() == ["90.0", "**20.0**", "89.0"]

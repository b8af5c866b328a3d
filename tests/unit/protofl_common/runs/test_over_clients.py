"""Figures over clients by hand."""

from typing import Any

import pytest

from protofl_common.basics.text import human_bytes, human_seconds
from protofl_common.runs.figures import best_text, side_by_side
from protofl_common.runs.over_clients import best_of, of_all_sites, over_clients


def test_over_clients_by_hand() -> None:
    figures = over_clients([0.5, 1.0, 0.0], [10, 30, 60])
    assert figures["mean"] == pytest.approx(0.5)
    assert figures["weighted"] == pytest.approx((5 + 30 + 0) / 100)
    assert figures["worst-10%"] == 0.0
    assert figures["std"] == pytest.approx((1 / 6) ** 0.5)
    assert over_clients([i / 20 for i in range(20)], [1] * 20)["worst-10%"] == pytest.approx(0.025)
    assert over_clients([], []) == {}


def test_evaluations_of_all_sites() -> None:
    told = [(2, 2), (3, 3), (4, 4), (3, 3), (4, 1), (4, 3)]
    rows = [{"asked": asked, "valid": valid, "number": number} for number, (asked, valid) in enumerate(told)]
    assert [row["number"] for row in of_all_sites(rows)] == [2, 5]
    assert of_all_sites([]) == []


def test_human_units() -> None:
    assert [human_bytes(size) for size in (0, 999, 1536, 2.5e6, 4e9)] == ["0 B", "999 B", "1.5 kB", "2.5 MB", "4.0 GB"]
    assert [human_seconds(seconds) for seconds in (1.25, 42, 75, 3720)] == ["1.2s", "42s", "1m15s", "1h02m"]


def evaluated(after: int, tested: float, validated: float | None = None, asked: int = 4) -> dict[str, Any]:
    row = {"asked": asked, "valid": asked, "evaluated-after-round": after, "accuracy": {"head": {"mean": tested}}}
    return row | ({} if validated is None else {"validation": {"head": {"mean": validated}}})


def test_the_best_round_is_chosen_on_validation_data_or_says_that_it_is_not() -> None:
    """The first of several; a lucky draw of clients does not count; `best` tells the test figure all the same."""
    disagreeing = [evaluated(0, 0.1, 0.7), evaluated(1, 0.3, 0.99, asked=2), evaluated(2, 0.9, 0.5)]
    disagreeing += [evaluated(3, 0.8, 0.7), evaluated(4, 0.6, 0.6)]
    assert best_of(disagreeing, "head") == {"mean": 0.1, "after-round": 0, "chosen-on": "validation"}
    blind = [{key: value for key, value in row.items() if key != "validation"} for row in disagreeing]
    assert best_of(blind, "head") == {"mean": 0.9, "after-round": 2, "chosen-on": "test"}
    assert best_of(blind, "prototype") is None
    assert best_text({"mean": 0.9, "after-round": 2}) == "90.00 @2 (chosen on test data)"  # of an older run


def result(algo: str, **clients: float) -> Any:
    of_clients = {site: {"head": accuracy} for site, accuracy in clients.items()}
    return {"settings": {"algo": algo}, "algorithm": algo.title(), "accuracy": {"head": {"mean": 0.5}}, "clients": {},
        "bytes": {}, "accuracy-of-clients": of_clients}  # fmt: skip


def test_clients_are_compared_one_by_one() -> None:
    """An equal mean may hide that one client pays for another; a tie harms nobody."""
    alone, other = result("local", a=0.5, b=0.5, c=0.5), result("fedavg", a=0.9, b=0.1, c=0.5)
    assert side_by_side([alone, other]).note.endswith(" Clients worse off than alone: Fedavg 1 of 3.")
    assert "worse off" not in side_by_side([other]).note
    assert "worse off" not in side_by_side([result("local"), result("fedavg")]).note, "single clients are hidden"

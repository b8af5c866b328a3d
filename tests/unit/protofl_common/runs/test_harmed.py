"""How many clients a run leaves worse off than training alone."""

from protofl_common.runs.figures import Compared, side_by_side


def result(algo: str, **clients: float) -> Compared:
    return Compared(algo, algo.title(), 50.0, None, 10.0, 0, "2 × cnn4", clients)


def test_clients_are_compared_one_by_one() -> None:
    """An equal mean may hide that one client pays for another; a tie harms nobody."""
    alone, other = result("local", a=0.5, b=0.5, c=0.5), result("fedavg", a=0.9, b=0.1, c=0.5)
    assert side_by_side([alone, other]).note.endswith(" Clients worse off than alone: Fedavg 1 of 3.")
    assert "worse off" not in side_by_side([other]).note
    assert "worse off" not in side_by_side([result("local"), result("fedavg")]).note, "single clients are hidden"

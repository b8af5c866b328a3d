"""The privacy ledger: whose spending counts for a run, its file, and what it amounts to."""

from collections import Counter

import pytest

from client_app.site.privacy_ledger import (
    charges_in,
    epsilon_of,
    read_ledger,
    spending_of,
    spent_by,
    total,
    unit_of,
    write_ledger,
)
from client_app.site.record import LedgerError
from protofl_common.privacy.plan import Mechanism, epsilon

STEPS = (0.1, 2.0, "sample")
TABLE = (1.0, 5.0, "sample")
OF_PERSONS = (0.1, 2.0, "person")
"""Sampling rate, noise multiplier, and whom the noise is for: the keys of what was spent."""
LEDGER = {
    "heart 1": Counter({STEPS: 4, TABLE: 1}),
    "heart 2": Counter({STEPS: 2}),
    "lungs 1": Counter({TABLE: 3}),
    "lungs 11": Counter({TABLE: 100}),
    "of the heart 3": Counter({TABLE: 100}),
}


@pytest.mark.parametrize(("run_name", "run_id", "wanted"), [
    ("heart", 9, {STEPS: 6, TABLE: 1}),  # the name that it had before
    ("liver", 1, {STEPS: 4, TABLE: 4}),  # the Flower run that it was before
    ("heart", 1, {STEPS: 6, TABLE: 4}),  # each once
    ("liver", 9, {}),
])  # fmt: skip
def test_a_new_name_and_a_new_flower_run_are_no_new_budget(run_name, run_id, wanted):
    """An entry "NAME NUMBER" of the ledger counts for runs of that name, or of that number."""
    assert spent_by(LEDGER, run_name, run_id) == wanted


def test_a_ledger_is_on_the_disk_as_it_was_written(tmp_path):
    """Its ε is that of all charges together; a file of other content is an error."""
    file = tmp_path / "privacy" / "north.json"

    assert read_ledger(file) == {}

    write_ledger(file, LEDGER)

    assert read_ledger(file) == LEDGER
    assert charges_in(LEDGER) == 4 + 1 + 2 + 3 + 100 + 100

    # the steps and the tables of all runs
    mechanisms = [Mechanism(0.1, 2.0, 6), Mechanism(1.0, 5.0, 204)]

    assert epsilon_of(total(LEDGER), 1e-5) == pytest.approx(epsilon(mechanisms, 1e-5))

    file.write_text('{"heart 1": 3}')

    with pytest.raises(LedgerError, match=r"north\.json cannot be read .*: what was spent"):
        read_ledger(file)


def test_costs_of_one_kind_are_added():
    costs = [Mechanism(0.1, 2.0, 4), Mechanism(1.0, 5.0, 1), Mechanism(1.0, 5.0, 1)]
    assert spending_of(costs, "sample") == {STEPS: 4, TABLE: 2}


def test_what_was_spent_is_of_persons_only_if_all_of_it_is():
    """Noise for a person covers each of its samples, and noise for a sample no person."""
    assert unit_of(Counter({OF_PERSONS: 3})) == "person"
    assert unit_of(Counter({OF_PERSONS: 3, TABLE: 1})) == "sample"
    assert epsilon_of(Counter({OF_PERSONS: 3}), 1e-5) == epsilon_of(Counter({STEPS: 3}), 1e-5)

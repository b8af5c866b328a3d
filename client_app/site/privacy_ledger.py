"""The privacy ledger, on a client's own disk: what its messages have cost its samples' privacy.

A site with an operator has two over all runs, by its name and by its data, which ``require-dp`` in
its node config bounds: neither another name nor a copy of the data is new. A simulated client has
one for each run.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from client_app.site.record import LedgerError
from protofl_common.basics.files import digest, write_text
from protofl_common.privacy.plan import Mechanism, epsilon

if TYPE_CHECKING:  # PyTorch, which a SuperNode that looks at the ledgers would keep in memory
    from client_app.site.client import Client

Spending = Counter[tuple[float, float, str]]
"""(q, σ, whether noise was for a "sample" or a "person") -> how many times"""
Ledger = dict[str, Spending]
"""By the names of a run and of its Flower run, as in "heart 4711": a server may change either."""


def ledgers_of(client: "Client", run_name: str) -> list[Path]:
    """The files of a client's ledgers.

    A site's name and its data have one each, and what either has spent counts.
    """
    if not client.node.is_site:
        return [client.own_file(run_name, "privacy.json")]
    data_dir = client.settings.data.data_dir
    folder = str(Path(data_dir).expanduser().resolve()) if data_dir else data_dir
    data = digest(folder, client.node.domain, client.node.partition)
    return [client.root / "privacy" / f"{owner}.json" for owner in (client.name, data)]


def read_ledger(file: Path) -> Ledger:
    """Return what a ledger contains; it is empty where there is no file.

    LedgerError where it cannot be read.
    """
    try:
        if not file.exists():
            return {}
        runs = json.loads(file.read_text(encoding="utf-8"))
        return {
            run: Counter({(rate, noise, unit): times for rate, noise, unit, times in rows})
            for run, rows in runs.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        unknown = f"({error}): what was spent is not known"
        raise LedgerError(f"the privacy ledger {file} cannot be read {unknown}") from error


def write_ledger(file: Path, ledger: Ledger) -> None:
    runs = {
        run: [[*kind, times] for kind, times in spending.items() if times]
        for run, spending in ledger.items()
    }
    write_text(file, json.dumps(runs) + "\n", private=True)


def spending_of(costs: Sequence[Mechanism], unit: str) -> Spending:
    """What answers cost each ``unit``: a value of ``dp``."""
    spending: Spending = Counter()
    for rate, noise, times in costs:
        spending[rate, noise, unit] += times
    return spending


def total(ledger: Ledger) -> Spending:
    """What all runs of a ledger have spent together."""
    return sum(ledger.values(), Counter())


def spent_by(ledger: Ledger, run_name: str, run_id: int) -> Spending:
    """What was spent under this name of a run *or* in this Flower run.

    So neither a new name nor a new Flower run is a new budget.
    """
    spending: Spending = Counter()
    for key, used in ledger.items():
        name, _, flower_run = key.rpartition(" ")
        if name == run_name or flower_run == str(run_id):
            spending += used
    return spending


def charges_in(ledger: Ledger) -> int:
    """How often something was charged, over all runs."""
    return sum(spending.total() for spending in ledger.values())


def unit_of(spending: Spending) -> str:
    """Of what ε can be said of all that was spent: a "sample", or a "person" if all was for these.

    Noise for a person covers each of its samples. Noise for a sample says nothing of the person,
    who may have had any number of them.
    """
    units = {unit for _, _, unit in spending}
    return "sample" if "sample" in units else "person"


def epsilon_of(spending: Spending, delta: float) -> float:
    mechanisms = [Mechanism(rate, noise, times) for (rate, noise, _), times in spending.items()]
    return epsilon(mechanisms, delta)

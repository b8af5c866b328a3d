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
    """Return the files of a client's ledgers.

    A simulated client has one for each run. A site has two over all runs, one by its name and one
    by its data, and every answer is charged to both.
    """
    if not client.node.is_site:
        return [client.own_file(run_name, "privacy.json")]
    data_dir = client.settings.data.data_dir
    folder = str(Path(data_dir).expanduser().resolve()) if data_dir else data_dir
    data_id = digest(folder, client.node.domain, client.node.partition)
    return [client.root / "privacy" / f"{owner}.json" for owner in (client.name, data_id)]


def read_ledger(file: Path) -> Ledger:
    """Return the content of a ledger's file, empty where there is none.

    LedgerError where it cannot be read.
    """
    try:
        if not file.exists():
            return {}
        runs = json.loads(file.read_text(encoding="utf-8"))
        ledger: Ledger = {}
        for run, rows in runs.items():
            ledger[run] = Counter({(rate, noise, unit): times for rate, noise, unit, times in rows})
        return ledger
    except (OSError, ValueError, TypeError, AttributeError) as error:  # or other content than ours
        unknown = f"({error}): what was spent is not known"
        raise LedgerError(f"the privacy ledger {file} cannot be read {unknown}") from error


def write_ledger(file: Path, ledger: Ledger) -> None:
    """Write a ledger as JSON: for each run its rows [q, σ, unit, how many times]."""
    runs = {}
    for run, spending in ledger.items():
        runs[run] = [[*kind, times] for kind, times in spending.items() if times]
    write_text(file, json.dumps(runs) + "\n", private=True)


def spending_of(costs: Sequence[Mechanism], unit: str) -> Spending:
    """Return the costs as they stand in a ledger; ``unit`` is a "sample" or a "person"."""
    spending: Spending = Counter()
    for rate, noise, times in costs:
        spending[rate, noise, unit] += times
    return spending


def total(ledger: Ledger) -> Spending:
    """Return what all runs of a ledger have spent together."""
    return sum(ledger.values(), Counter())


def spent_by(ledger: Ledger, run_name: str, run_id: int) -> Spending:
    """Return what was spent under this name of a run *or* in this Flower run.

    A server may change either, and must not get a new budget by it.
    """
    spending: Spending = Counter()
    for key, of_run in ledger.items():
        name, _, flower_run = key.rpartition(" ")
        if name == run_name or flower_run == str(run_id):
            spending += of_run
    return spending


def charges_in(ledger: Ledger) -> int:
    """Return how often noise was paid for, over all runs."""
    return sum(spending.total() for spending in ledger.values())


def unit_of(spending: Spending) -> str:
    """Return what the ε of all this spending protects: a "person" if all noise was for persons.

    Otherwise it is a "sample". Noise for a person also covers each of its samples. Noise for a
    sample bounds nothing for a person, who may have had any number of samples.
    """
    units = {unit for _, _, unit in spending}
    return "sample" if "sample" in units else "person"


def epsilon_of(spending: Spending, delta: float) -> float:
    mechanisms = [Mechanism(rate, noise, times) for (rate, noise, _), times in spending.items()]
    return epsilon(mechanisms, delta)

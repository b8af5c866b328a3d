"""The privacy ledger: what this client's messages have cost of its samples' privacy, on its own disk.

A site with an operator has one ledger over all runs; ``require-dp`` in its node config bounds it. A simulated client
has one for each run. A message is charged before its evaluation or training begins: one that is repeated is charged
twice, for its noise is new.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from client_app.client import Client
from client_app.state import LedgerError
from protofl_common.basics.files import locked, write_text
from protofl_common.config.options import SettingsError
from protofl_common.privacy.plan import Mechanism, epsilon
from protofl_common.wire.records import Instructions

Account = dict[str, Counter[tuple[float, float]]]
"""Run and Flower run -> (q, σ) -> how many times. One that is resumed has a new Flower run, and a server may change the
name from message to message: what either has spent counts."""
CURE = "; what earlier runs spent does not come back: a run of smaller dp-epsilon may still fit"


def charge(client: Client, instructions: Instructions, *, trains: bool) -> None:
    """Enter what the answer to ``instructions`` will cost: a round if it ``trains``, else a final evaluation.

    SettingsError if it would exceed the run's ``dp-epsilon``, or what this site lets all runs together spend.
    LedgerError if the ledger cannot be locked, read or written.
    """
    if (plan := client.plan) is None:
        return
    costs = plan.of_round(instructions.round, instructions.evaluate) if trains else plan.of_evaluation()
    file = client.folders.ledger(instructions.run_name)
    try:
        with locked(file):  # another run's client may be at work on this machine
            _charge(client, instructions.run_name, costs, file)
    except OSError as error:
        raise LedgerError(f"the privacy ledger {file} cannot be written: {error}") from error


def check_affordable(client: Client) -> None:
    """Raise SettingsError where not even one round fits in what this site lets all runs together spend.

    So a run that this site can only refuse hears of it before the first round, not in each.
    """
    if client.plan is None or client.node.required_dp is None:
        return
    used = sum(read_ledger(client.folders.ledger("")).values(), Counter())
    _check(used + _entries(client.plan.of_round(1, True)), *client.node.required_dp, "require-dp, over all runs,", CURE)


def spent(file: Path, delta: float) -> float:
    """Return ε at ``delta`` of all that a ledger contains."""
    return _epsilon(sum(read_ledger(file).values(), Counter()), delta)


def _charge(client: Client, run: str, costs: list[Mechanism], file: Path) -> None:
    account = read_ledger(file)
    account.setdefault(f"{run} {client.run_id}", Counter()).update(_entries(costs))
    privacy = client.settings.privacy
    alike = [used for key, used in account.items() if key.startswith(f"{run} ") or key.endswith(f" {client.run_id}")]
    _check(sum(alike, Counter()), privacy.dp_epsilon, privacy.dp_delta, "dp-epsilon")
    if client.node.required_dp is not None:
        _check(sum(account.values(), Counter()), *client.node.required_dp, "require-dp, over all runs,", CURE)
    rows = {name: [[*key, times] for key, times in used.items() if times] for name, used in account.items()}
    write_text(file, json.dumps(rows) + "\n")


def _check(used: Counter[tuple[float, float]], most: float, delta: float, what: str, cure: str = "") -> None:
    if (brought := _epsilon(used, delta)) > most:
        would = f"this message would bring this client to ε = {brought:.3g} (δ = {delta:g})"
        raise SettingsError(f"{what} = {most:g}: {would}{cure}")


def _entries(costs: list[Mechanism]) -> Counter[tuple[float, float]]:
    """Return what mechanisms add to a ledger."""
    entries: Counter[tuple[float, float]] = Counter()
    for mechanism in costs:
        entries[mechanism.rate, mechanism.noise] += mechanism.times
    return entries


def _epsilon(used: Counter[tuple[float, float]], delta: float) -> float:
    return epsilon([Mechanism(rate, noise, times) for (rate, noise), times in used.items()], delta)


def read_ledger(file: Path) -> Account:
    """Return what a ledger contains, nothing where there is no file; LedgerError where it cannot be read."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return {name: Counter({(rate, noise): times for rate, noise, times in used}) for name, used in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LedgerError(f"the privacy ledger {file} cannot be read ({error}): what was spent is not known") from error

"""What this client's messages have cost of its samples' privacy, on its own disk.

A site with an operator keeps one account over all runs; ``require-dp`` in its node config bounds it. A simulated client
keeps one for each run. A round is charged before it trains: one that is repeated is charged twice, as it must be.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from client_app.site import Site
from client_app.state import StateError
from protofl_common.config.options import SettingsError
from protofl_common.files import make_private, write_text
from protofl_common.privacy.accountant import Mechanism, epsilon
from protofl_common.wire.records import Instructions

Account = dict[str, Counter[tuple[float, float]]]
"""Run -> (q, σ) -> how many times."""


def charge(site: Site, instructions: Instructions) -> None:
    """Note what this round will cost.

    Raises
    ------
    SettingsError
        If it would exceed the run's ``dp-epsilon``, or what this site lets all runs together spend.
    StateError
        If the account cannot be read or written.
    """
    if (plan := site.plan) is None:
        return
    file, run = site.account_file(instructions.run_name), instructions.run_name
    account = _read(file)
    for one in plan.of_round(instructions.round):
        account.setdefault(run, Counter())[one.rate, one.noise] += one.times
    privacy = plan.privacy
    _check(account[run], privacy.dp_epsilon, privacy.dp_delta, "dp-epsilon")
    if site.required_dp is not None:
        _check(sum(account.values(), Counter()), *site.required_dp, "require-dp, over all runs,")
    kept = {name: [[*key, times] for key, times in used.items() if times] for name, used in account.items()}
    try:
        make_private(file.parent)
        write_text(file, json.dumps(kept) + "\n")
    except OSError as error:
        raise StateError(f"the privacy account {file} cannot be written: {error}") from error


def _check(used: Counter[tuple[float, float]], most: float, delta: float, what: str) -> None:
    spent = epsilon([Mechanism(rate, noise, times) for (rate, noise), times in used.items()], delta)
    if spent > most:
        raise SettingsError(f"{what} = {most:g}: this round would bring this client to ε = {spent:.3g} (δ = {delta:g})")


def _read(file: Path) -> Account:
    try:
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return {name: Counter({(rate, noise): times for rate, noise, times in used}) for name, used in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StateError(f"the privacy account {file} cannot be read ({error}): what was spent is not known") from error

"""Ten clients with the embedded digits, dealt out at random; the last two may be hostile."""

import contextlib
import io
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support import attacks
from tests.support.attacks import Change
from tests.support.harness import Outcome, run_config, run_federation

CLIENTS = 10
HOSTILE = (1008, 1009)
"""Node IDs of the last two."""


def run_of_ten(
    folder: Path,
    merging: str,
    change: Change | None,
    hostile: Iterable[int] = HOSTILE,
    **settings: Any,
) -> Outcome:
    """Make one run of ten clients, of which two are hostile if there is a ``change``."""
    tamper = attacks.by(dict.fromkeys(hostile, change)) if change else None
    data = {"dataset": "digits", "partition": "iid", "train_samples": 120, "test_samples": 60}
    config = run_config(folder, merging=merging, **data | settings)
    with contextlib.redirect_stdout(io.StringIO()):
        return run_federation(config, CLIENTS, tamper=tamper)


def honest_accuracy(outcome: Outcome, kind: str = "prototype") -> float:
    """Return the mean accuracy of the honest clients after the last round, in percent."""
    accuracies = outcome.summary["accuracy-of-clients"]
    honest = [accuracies[f"site-{index}"][kind] for index in range(CLIENTS - len(HOSTILE))]
    return 100 * statistics.mean(honest)

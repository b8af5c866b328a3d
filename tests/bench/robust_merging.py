"""How `merging` bears hostile clients: python -m tests.bench.robust_merging [--private] [--algo A] [--seeds 1 2 3]

Ten clients with the embedded digits, dealt out at random; two of them send changed prototypes in every round, below
every limit. All start from the same weights of one architecture, or with ``--private`` from their own, of three. The
figure is the accuracy of the nearest global prototype, averaged over the eight honest clients.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.attacks import Change, both, by, flipped, scaled
from tests.harness import Outcome, run_config, run_federation

CLIENTS, HOSTILE = 10, (1008, 1009)
ATTACKS: dict[str, Change | None] = {
    "none": None,
    "×10": scaled(10),
    "×−5": scaled(-5),
    "labels flipped": flipped(10),
    "flipped, ×5": both(flipped(10), scaled(5)),
}
MERGINGS = ("mean", "median", "trimmed-mean")


SHARED = {"arch": "cnn4", "initial_weights": "shared"}
"""Prototypes of different clients can only be compared coordinate by coordinate where their features are alike."""


def attacked(
    folder: Path, merging: str, change: Change | None, hostile: Iterable[int] = HOSTILE, **settings: Any
) -> Outcome:
    """One run: ten clients, of which two are hostile (if there is an attack)."""
    data = {"dataset": "digits", "partition": "iid", "train_samples": 120, "test_samples": 60}
    config = run_config(folder, merging=merging, **data | settings)
    with contextlib.redirect_stdout(io.StringIO()):
        return run_federation(config, CLIENTS, tamper=by(dict.fromkeys(hostile, change)) if change else None)


def honest_accuracy(outcome: Outcome, kind: str = "prototype") -> float:
    """Mean over the eight that are always honest, after the last round, in per cent."""
    shares = outcome.summary["accuracy-of-clients"]
    return 100 * statistics.mean(shares[f"site-{index}"][kind] for index in range(CLIENTS - len(HOSTILE)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--algo", default="fedproto")
    parser.add_argument("--kind", default="prototype", choices=("prototype", "head"))
    options = parser.parse_args()
    start = time.monotonic()
    print("| merging | " + " | ".join(ATTACKS) + " |\n|" + "---|" * (len(ATTACKS) + 1))
    for merging in MERGINGS:
        cells = []
        for change in ATTACKS.values():
            found = []
            for seed in options.seeds:
                with tempfile.TemporaryDirectory() as folder:
                    models = {} if options.private else SHARED
                    chosen = {"algo": options.algo, "rounds": options.rounds, "seed": seed}
                    run = attacked(Path(folder), merging, change, **chosen, **models)
                    found.append(honest_accuracy(run, options.kind))
            spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.1f}{spread}")
        print(f"| `{merging}` | " + " | ".join(cells) + " |", flush=True)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()

"""How federations of ten bear hostile clients.

    python -m tests.bench.robust_merging --out DIR [--hostile 1 2 3 4]

Ten clients with the embedded digits, dealt out at random; the last ones send changed replies in
every round, below every limit. The figure is the mean accuracy of the honest, by the nearest
prototype or, for FedAvg and FedPLVM, by the model. What a run came to is kept in
``<out>/results.jsonl``: the command, started again, does only what is missing.
"""

import contextlib
import io
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from protofl_common.tools.arguments import read_assignments
from tests.bench.printing import markdown, of_seeds, parser_of
from tests.support import attacks
from tests.support.attacks import Change, everywhere
from tests.support.harness import Outcome, Tamper, run_config, run_federation

CLIENTS = 10
HOSTILE = (1008, 1009)
"""Node IDs of the last two."""
LABELS = everywhere(attacks.flipped(10), attacks.flipped_head(10))
FLIPPED_AND_LONG = attacks.both(LABELS, everywhere(attacks.scaled(5), attacks.reversed_update(-5)))


def always(change: Change) -> Callable[[Collection[int]], Tamper]:
    """Return an attack in which the hostile clients change each training reply like this."""
    return lambda nodes: attacks.by(dict.fromkeys(nodes, change))


ATTACKS: dict[str, Callable[[Collection[int]], Tamper]] = {
    "without them": always(attacks.silent),
    "× 10": always(everywhere(attacks.scaled(10), attacks.reversed_update(-10))),
    "sign flipped": always(everywhere(attacks.scaled(-1), attacks.reversed_update(1))),
    "× −5": always(everywhere(attacks.scaled(-5), attacks.reversed_update(5))),
    "× −4": always(everywhere(attacks.scaled(-4), attacks.reversed_update(4))),
    "labels flipped": always(LABELS),
    "flipped, × 5": always(FLIPPED_AND_LONG),
    "within the spread": attacks.Colluding,
    "10¹⁵ samples, flipped": lambda nodes: attacks.claims(10**15, nodes, LABELS),
    "flood, flipped": always(
        attacks.both(LABELS, everywhere(attacks.flooding(50), lambda _, reply: reply))
    ),
}
FLOODED = ("fedplvm",)
"""Algorithms whose clients may send several prototypes of a class."""
BY_MODEL = ("fedavg", "fedplvm", "lg-fedavg", "fedper", "feddistill")
SHARED = {"arch": "htcnn-1", "initial-weights": "shared"}
PRIVATE = {"models": "htcnn-1,htcnn-3,cnn4"}
"""Prototypes of clients whose features are not alike cannot be compared by coordinates."""


def attacked(
    folder: Path,
    merging: str,
    change: Change | None,
    hostile: Iterable[int] = HOSTILE,
    **settings: Any,
) -> Outcome:
    """Make one run of ten clients, of which two are hostile if there is a ``change``."""
    tamper = attacks.by(dict.fromkeys(hostile, change)) if change else None
    return federation(folder, tamper, merging=merging, **settings)


def federation(folder: Path, tamper: Tamper | None, **settings: Any) -> Outcome:
    data = {"dataset": "digits", "partition": "iid", "train_samples": 120, "test_samples": 60}
    with contextlib.redirect_stdout(io.StringIO()):
        return run_federation(run_config(folder, **data | settings), CLIENTS, tamper=tamper)


def honest_accuracy(
    outcome: Outcome, kind: str = "prototype", hostile: int = len(HOSTILE)
) -> float:
    """Return the mean accuracy of the honest clients after the last round, in percent."""
    accuracies = outcome.summary["accuracy-of-clients"]
    honest = [accuracies[f"site-{index}"][kind] for index in range(CLIENTS - hostile)]
    return 100 * statistics.mean(honest)


def tried(
    algo: str, attack: str, hostile: int, seed: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Make a run with an attack by the last ``hostile`` clients.

    Return the honest clients' mean accuracy, and how many of them the server ever refused or took
    for failed.
    """
    nodes = range(1000 + CLIENTS - hostile, 1000 + CLIENTS)
    kind = "prototype"
    rate = {}
    if algo in BY_MODEL:
        kind = "head"
        rate = {"lr": 0.1}
    with tempfile.TemporaryDirectory() as folder:
        tamper = ATTACKS[attack](nodes)
        run = federation(Path(folder), tamper, algo=algo, seed=seed, **rate, **settings)

    blamed: set[str] = set()
    for row in run.rows:
        blamed.update(row["refused"], row["failed"], row["missing"])
    honest = {f"site-{index}" for index in range(CLIENTS - hostile)}
    return {"accuracy": honest_accuracy(run, kind, hostile), "blamed": len(blamed & honest)}


def table(results: Iterable[dict[str, Any]]) -> str:
    """Return the table of mean and standard deviation over the seeds, a column for each attack.

    The first column is the reference: the same runs without the hostile clients.
    """
    rows: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for one in results:
        row = rows.setdefault((one["algo"], one["hostile"], one["settings"]), {})
        row.setdefault(one["attack"], []).append(one["accuracy"])

    cells = []
    for what, row in rows.items():
        figures = [of_seeds(row.get(attack, [])) for attack in ATTACKS]
        cells.append([*map(str, what), *figures])
    return markdown(("", "hostile", "settings", *ATTACKS), sorted(cells))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("robust"))
    parser.add_argument("--algos", nargs="+", default=["fedproto", "fedtgp", "fedplvm", "fedavg"])
    parser.add_argument("--settings", nargs="+", default=["liars=0", "liars=1"])
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--hostile", type=int, nargs="+", default=[1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--private", action="store_true", help="three architectures, none with shared weights"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "results.jsonl"
    done = []
    if kept.exists():
        done = [json.loads(line) for line in kept.read_text().splitlines()]
    small = {"rounds": options.rounds, "train-samples": 60, "batch-size": 10}
    small |= PRIVATE if options.private else SHARED

    order = (options.seeds, options.hostile, options.algos, options.settings, options.attacks)
    for seed, hostile, algo, text, attack in itertools.product(*order):
        what = {"algo": algo, "attack": attack, "hostile": hostile, "seed": seed, "settings": text}
        what["private"] = options.private
        if any(what.items() <= result.items() for result in done):
            continue
        if attack.startswith("flood") and algo not in FLOODED:
            continue
        settings = small | read_assignments(text.split(","))
        result = what | tried(algo, attack, hostile, seed, settings)
        done.append(result)
        line = json.dumps(result, ensure_ascii=False)
        with kept.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
    print(table(result for result in done if result["private"] == options.private))


if __name__ == "__main__":
    main()

"""``make bench-scale``: what a simulated client costs among 100 to 10,000.

A tenth or all of them are asked. FedProto on made-up images of MNIST's number and shape,
Dirichlet 0.1, at most 40 training and 20 test samples a client, on as many Ray actors as there are
CPUs. Prints figures; nothing here passes or fails. ``ARGS='100 1000 1000:1.0'`` are other
federations: clients, and after a colon the part of them that a round asks.
"""

import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.printing import parser_of
from tests.support import ROOT
from tests.support.processes import Connection, superlink

FEDERATIONS = ("100", "1000", "3000", "10000", "1000:1.0")
SETTING = {
    "dataset": "arrays",
    "partition": "dirichlet",
    "alpha": 0.1,
    "train-samples": 40,
    "test-samples": 20,
    "models": "mnist-cnn",
    "report": False,
    "join-timeout": 3600,
    "callback": "tests.bench.scale:note",
}
NOTES = "PROTOFL_BENCH_NOTES"
COLUMNS = (
    "clients",
    "asked",
    "ms per asked client",
    "its own work",
    "server's CPU, ms",
    "server, MB",
    "to round 1, s",
)


def note(row: dict[str, Any]) -> None:
    """Note the time and what the server's process has used; it calls this after each round."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = {"time": time.time(), "cpu": time.process_time(), "memory": memory, "kind": row["kind"]}
    line |= {
        "asked": row["asked"],
        "seconds": row["seconds"]["total"],
        "clients": row["seconds"]["clients"],
    }
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def made_up_images(file: Path) -> None:
    """Write 60,000 grey images of 28×28: that of one of ten classes, with noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(60_000) % 10
    of_classes = rng.integers(0, 128, (10, 1, 28, 28))
    noise = rng.integers(0, 128, (len(labels), 1, 28, 28))
    images = of_classes[labels] + noise
    np.savez(file, inputs=images.astype(np.uint8), labels=labels)


def measured(
    connection: Connection, folder: Path, clients: int, participation: float, rounds: int
) -> str:
    """Make a run; return its line of the table, of all rounds after the first."""
    notes = Path(os.environ[NOTES])
    notes.unlink(missing_ok=True)
    config = SETTING | {
        "data-dir": str(folder / "images.npz"),
        "cache-dir": str(folder / "cache"),
        "rounds": rounds,
    }
    config |= {"out-dir": str(folder / "runs"), "run-name": f"{clients}-{participation}"}
    start = time.time()
    connection.simulate(clients, config | {"participation": participation}, timeout=36_000)
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    first = lines[0]
    later = [line for line in lines[1:] if line["kind"] == "round"]
    asked = sum(line["asked"] for line in later)
    round_seconds = sum(line["seconds"] for line in later)
    client_seconds = sum(sum(line["clients"].values()) for line in later)
    cpu_seconds = later[-1]["cpu"] - first["cpu"]
    figures = (
        f"{clients}",
        f"{first['asked']}",
        f"{1e3 * round_seconds / asked:.0f}",
        f"{1e3 * client_seconds / asked:.0f}",
        f"{1e3 * cpu_seconds / asked:.1f}",
        f"{lines[-1]['memory'] / 1e6:.0f}",
        f"{first['time'] - first['seconds'] - start:.0f}",
    )
    return f"| {' | '.join(figures)} |"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "federations", nargs="*", default=FEDERATIONS, help="CLIENTS or CLIENTS:PARTICIPATION"
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {NOTES: str(folder / "notes.jsonl"), "PYTHONPATH": str(ROOT)}
        made_up_images(folder / "images.npz")
        with superlink(folder, "--simulation") as connection:
            for federation in arguments.federations:
                clients, _, part = federation.partition(":")
                line = measured(
                    connection, folder, int(clients), float(part or 0.1), arguments.rounds
                )
                print(line, flush=True)


if __name__ == "__main__":
    main()

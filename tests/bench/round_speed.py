"""``make bench DATA_DIR=…``: a federated round against the same passes in bare PyTorch.

    python -m tests.bench.round_speed --data-dir D [--htfllib FOLDER] [--samples 4000]

FedProto and FedTGP on Fashion-MNIST, HtCNN8, 20 clients, Dirichlet 0.1, batch 10, one epoch,
D = 512, on this machine, in one run; two Ray actors of one thread against two bare processes of one
thread (`bare.py`) and, given the folder of HtFLlib, against its own loop (`htfllib.py`). FedTGP is
as in HtFLlib's code, with 100 epochs of its server in all three. Prints ratios; nothing here passes
or fails.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from protofl_common.basics.text import human_bytes
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.runs.folder import RoundRow, RunFolder
from tests.bench import htfllib
from tests.bench.bare import BareFederation
from tests.bench.printing import parser_of
from tests.support.processes import Connection, superlink

CLIENTS = 20
SETTING = {
    "dataset": "fashion-mnist",
    "partition": "dirichlet",
    "alpha": 0.1,
    "train-samples": 0,
    "models": "htcnn8",
    "feature-dim": 512,
    "batch-size": 10,
    "local-epochs": 1,
    "lr": 0.01,
    "momentum": 0.0,
}
METHODS: dict[str, dict[str, Any]] = {
    "FedProto": {"algo": "fedproto"},
    "FedTGP": {"algo": "fedtgp", "fedtgp.distance": "mse", "fedtgp.granularity": "sample"}
    | {"fedtgp.lambda": 1.0, "fedtgp.margin": "nearest"},
}
"""Name -> what makes it the same work in all loops.

The clients' term is the samples' mean square, of weight 1.
"""


def federated(connection: Connection, folder: Path, name: str, **changes: Any) -> list[RoundRow]:
    """Make a run by `flwr run`; return the rows of its rounds."""
    config = SETTING | {"out-dir": str(folder), "run-name": name} | changes
    connection.simulate(CLIENTS, config, timeout=3600)
    return [row for row in RunFolder(folder / name).rows() if row["kind"] == "round"]


def compare_rounds(
    connection: Connection, folder: Path, method: str, options: argparse.Namespace
) -> None:
    """Print how long a method's round takes beside the other loops.

    (a) is the ratio to the bare one, (b) what a client's round is made of, (c) the ratio to
    HtFLlib's. First rounds, in which nobody has prototypes, do not count.
    """
    changes = METHODS[method] | {"data-dir": options.data_dir, "total-samples": options.samples}
    settings = Settings.from_run_config(default_run_config() | SETTING | changes)

    def ours(name: str) -> list[RoundRow]:
        return federated(
            connection, folder, f"{method}-{name}", **changes, rounds=options.rounds + 1
        )[1:]

    bare = BareFederation(settings, CLIENTS)
    bare.round()  # without prototypes yet
    bare_seconds = [bare.round() for _ in range(options.rounds)]
    rows = ours("before")
    theirs = []
    if options.htfllib:
        place = folder / "htfllib"
        if not place.exists():
            htfllib.write_division(place, settings, CLIENTS)
        theirs = htfllib.seconds(options.htfllib, place, settings, CLIENTS, options.rounds)
        rows += ours("after")
    bare_seconds += [bare.round() for _ in range(options.rounds)]
    bare.close()
    seconds = [row["seconds"]["total"] for row in rows]
    print(f"{method}\nbare round       {spread(bare_seconds)} s")
    print(f"federated round  {spread(seconds)} s")
    print(f"(a) ratio        {statistics.median(seconds) / statistics.median(bare_seconds):.3f}")
    print_phases(rows)
    if theirs:
        ratio = statistics.median(seconds) / statistics.median(theirs)
        print(
            f"(c) HtFLlib's own loop: {spread(theirs)} s a round; ours / HtFLlib's: {ratio:.3f}",
            flush=True,
        )


def print_phases(rows: list[RoundRow]) -> None:
    """Print (b): what a client's round is made of, as means over the rounds."""
    phases: dict[str, float] = {}
    for row in rows:
        for phase, seconds in row["seconds"]["clients"].items():
            phases[phase] = phases.get(phase, 0) + seconds / len(rows)
    work = sum(phases[phase] for phase in ("train", "evaluate", "prototypes"))
    per_client = {phase: 1000 * seconds / CLIENTS for phase, seconds in phases.items()}
    total = statistics.mean(row["seconds"]["total"] for row in rows)
    actors = 2  # at work at the same time
    rest = 1000 * (actors * total - sum(phases.values())) / CLIENTS
    listed = ", ".join(f"{phase} {ms:.0f}" for phase, ms in per_client.items())
    print(f"(b) per client and round, ms: {listed}")
    print(
        f"    engine, wire and waiting for the last client {rest:.0f} ms; "
        f"work {1000 * work / CLIENTS:.0f} ms"
    )
    server = 1000 * statistics.mean(row["seconds"]["aggregate"] for row in rows)
    sizes = rows[-1]["bytes"]
    up = human_bytes(sizes["up"])
    down = human_bytes(sizes["down"])
    print(f"    server: {server:.1f} ms a round; {up} up, {down} down")


def spread(seconds: list[float]) -> str:
    """Return ``median (min … max)``."""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} … {max(seconds):.2f})"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data-dir", required=True, help="folder with FashionMNIST/raw")
    parser.add_argument(
        "--htfllib", type=Path, help="folder of HtFLlib, whose own loop is measured too"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, in each run")
    parser.add_argument(
        "--samples", type=int, default=0, help="of the training data, to try this out; 0: all"
    )
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    options = parser.parse_args()
    options.data_dir = str(Path(options.data_dir).resolve())
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as name,
        superlink(folder := Path(name), "--simulation") as connection,
    ):
        for method in options.methods:
            compare_rounds(connection, folder, method, options)


if __name__ == "__main__":
    main()

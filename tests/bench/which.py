"""docs/algorithms/which.md: accuracy, bytes and CPU seconds of every algorithm in five situations.

    python -m tests.bench.which measure --data-dir /data    # the tables which*.yaml, run by run in this process
    python -m tests.bench.which draw                        # the figure and the page's tables from what was measured

The first goes on where it was stopped; several may run at the same time. CPU seconds are those of a whole run, clients
and server, on one thread; a first run of the same data, whose seconds do not count, fills the caches.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import tempfile
import time
from pathlib import Path

from protofl_common.settings import default_run_config
from protofl_common.tools.tables.plan import Cell, Run, plan
from protofl_common.tools.tables.spec import read_table
from tests.harness import run_federation

HERE = Path(__file__).parents[2]
TABLES = sorted((HERE / "configs" / "tables").glob("which*.yaml"))
MEASURED = HERE / "docs" / "algorithms" / "which.csv"
COLUMNS = ("situation", "algorithm", "seed", "head", "prototype", "up", "down", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "draw"))
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--part", type=int, nargs=2, default=[0, 1], metavar=("I", "N"), help="the I-th of N parts")
    parser.add_argument("--tables", type=Path, nargs="+", default=TABLES)
    arguments = parser.parse_args()
    part, parts = arguments.part
    for seed in arguments.seeds:
        cells = [cell for file in arguments.tables for cell in plan(read_table(file), data_dir=arguments.data_dir, seeds=(seed,))]
        for column in dict.fromkeys(cell.column for cell in cells):
            measure_column([cell for cell in cells if cell.column == column][part::parts], seed)


def measure_column(cells: list[Cell], seed: int) -> None:
    done = {(row["situation"], row["algorithm"], row["seed"]) for row in measured()}
    todo = [cell for cell in cells if (cell.column, cell.row, str(seed)) not in done]
    if todo:
        run(todo[0].runs[seed], rounds=1)
    for cell in todo:
        found = run(cell.runs[seed])
        write([cell.column, cell.row, seed, *found])


def run(run: Run, **changed: int) -> list[str]:
    """[accuracy by the head in percent, by prototypes, bytes up, down, CPU seconds]; "" for what there is none of."""
    with tempfile.TemporaryDirectory() as folder:
        here = {"out-dir": folder, "report": False, "device": "cpu", "threads": 1}
        began = time.process_time()
        config = default_run_config() | run.config | here | changed
        summary = run_federation(config, int(run.federation["num-supernodes"])).summary
        seconds = time.process_time() - began
    accuracy = {kind: f"{100 * found['mean']:.2f}" for kind, found in summary["accuracy"].items()}
    sent = summary["bytes"]
    return [accuracy.get("head", ""), accuracy.get("prototype", ""), sent["up"], sent["down"], f"{seconds:.2f}"]


def measured() -> list[dict[str, str]]:
    if not MEASURED.exists():
        return []
    with MEASURED.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(values: list[object]) -> None:
    with MEASURED.open("a", encoding="utf-8", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        writer.writerow(values)


if __name__ == "__main__":
    main()

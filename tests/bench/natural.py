"""docs/algorithms/natural.md: clients that are real hospitals, people and cameras.

They are not parts of one data set. In turn, of /data/heart/*.data, with the page's table last:

    python -m tests.bench.natural write /data
    protofl table configs/tables/natural-heart.yaml --data-dir /data
    python -m tests.bench.natural show natural-heart --data-dir /data

The first makes /data/heart.npz; the last reads runs/tables/runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from protofl_common.basics.text import human_bytes
from protofl_common.runs.folder import RoundRow, RunFolder
from protofl_common.tools.tables.plan import plan
from protofl_common.tools.tables.spec import read_table
from tests.bench.printing import markdown, of_seeds, parser_of

TABLES = Path(__file__).parents[2] / "configs" / "tables"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = 10
"""The first of 14, as FLamby has them: without slope, ca and thal, which are mostly missing, and
the label."""
CATEGORIES = {2: (2, 3, 4), 6: (1, 2)}
"""Chest pain and ECG: a column for each value but the first."""
MOST_DOMAINS = 4
"""With more clients the table has no column for each."""


def heart(data_dir: str) -> dict[str, Any]:
    """Return UCI's four files as FLamby's Fed-Heart-Disease has them.

    Columns, rows and the division, by scikit-learn with the seed 43, are FLamby's.
    """
    from sklearn.model_selection import train_test_split

    parts = {name: complete_rows(Path(data_dir) / f"processed.{name}.data") for name in HOSPITALS}
    columns: dict[str, list[Any]] = {"inputs": [], "labels": [], "client": [], "split": []}
    for name, rows in parts.items():
        labels = (rows[:, -1] > 0).astype(np.int64)
        has_both_classes = min(np.bincount(labels, minlength=2)) > 2  # of enough patients
        numbers = np.arange(len(rows))
        _, test = train_test_split(
            numbers,
            test_size=1 - 0.66,
            train_size=0.66,
            random_state=43,
            stratify=labels if has_both_classes else None,
        )
        columns["inputs"] += [with_categories(row[:COLUMNS]) for row in rows]
        columns["labels"] += labels.tolist()
        columns["client"] += [name] * len(rows)
        columns["split"] += np.where(np.isin(numbers, test), "test", "train").tolist()
    return columns | {
        "inputs": np.array(columns["inputs"], np.float32),
        "classes": ("healthy", "ill"),
    }


def complete_rows(file: Path) -> np.ndarray:
    """Return the rows without a gap, [N, 11]: the columns that FLamby keeps, and the label."""
    rows = [line.split(",") for line in file.read_text().split()]
    kept = [row[:COLUMNS] + row[-1:] for row in rows]
    return np.array([row for row in kept if "?" not in row], dtype=np.float64)


def with_categories(row: np.ndarray) -> list[float]:
    """Return the numbers of a row, and behind them 0 or 1 for each category."""
    numbers = [value for column, value in enumerate(row) if column not in CATEGORIES]
    for column, values in CATEGORIES.items():
        numbers += [float(row[column] == value) for value in values]
    return numbers


# -- the page's table
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("write", "show"))
    parser.add_argument(
        "which", help="write: the folder of the data; show: a table of configs/tables, natural-…"
    )
    parser.add_argument("--data-dir", default="", help="as of `protofl table`")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/tables"), help="as of `protofl table`"
    )
    arguments = parser.parse_args()
    if arguments.what == "write":
        data = Path(arguments.which)
        np.savez(data / "heart.npz", **heart(str(data / "heart")))
        return

    runs: dict[str, list[RunFolder]] = {}
    for cell in plan(read_table(TABLES / f"{arguments.which}.yaml"), data_dir=arguments.data_dir):
        folders = [arguments.out / "runs" / run.name for run in cell.runs.values()]
        runs[cell.row] = [RunFolder(folder) for folder in folders]
    heads, *rows = shown(runs)
    print(markdown(heads, rows))


def shown(runs: dict[str, list[RunFolder]]) -> Iterator[list[str]]:
    """Yield the table's head and then its rows, of the last evaluation of each seed's run."""
    last = {name: [run.rows()[-1] for run in of_row] for name, of_row in runs.items()}
    sites = dict(sorted(runs["Local"][0].finished_summary()["clients"].items()))
    measured = last["Local"][0]["metrics"]
    metrics = [name for name in ("balanced-accuracy", "auc") if f"head/{name}" in measured]
    domains = []  # hospital, person or camera
    if len(sites) <= MOST_DOMAINS:
        domains = [site["domain"] for site in sites.values()]
    yield ["", "accuracy", *metrics, *domains, "worse off than alone", "bytes"]

    alone = by_head(last["Local"], sites)
    for name, rows in last.items():
        found = by_head(rows, sites)
        means = [of_seeds([100 * row["accuracy"]["head"]["mean"] for row in rows])]
        for metric in metrics:
            means.append(of_seeds([row["metrics"][f"head/{metric}"]["mean"] for row in rows], 2))
        if domains:
            means += [f"{100 * share:.1f}" for share in found.mean(0)]
        worse = "–" if name == "Local" else f"{(found < alone).sum()} of {found.size}"
        sent = [sum(run.finished_summary()["bytes"].values()) for run in runs[name]]
        yield [name, *means, worse, human_bytes(statistics.fmean(sent))]


def by_head(rows: list[RoundRow], sites: Iterable[str]) -> np.ndarray:
    """Return the accuracies by head, [seeds, sites]."""
    return np.array([[row["clients"][site]["accuracy"]["head"] for site in sites] for row in rows])


if __name__ == "__main__":
    main()

"""docs/algorithms/natural.md: the data of clients that are real hospitals.

    python -m tests.bench.natural write /data
    protofl table configs/tables/natural-heart.yaml --data-dir /data

The first makes /data/heart.npz of /data/heart/*.data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.printing import parser_of

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = 10
"""The first of 14, as FLamby has them: without slope, ca and thal, which are mostly missing, and
the label."""
CATEGORIES = {2: (2, 3, 4), 6: (1, 2)}
"""Chest pain and ECG: a column for each value but the first."""


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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("write",))
    parser.add_argument("data", type=Path, help="the folder of the data")
    data = parser.parse_args().data
    np.savez(data / "heart.npz", **heart(str(data / "heart")))


if __name__ == "__main__":
    main()

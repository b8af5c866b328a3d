"""docs/algorithms/natural.md: clients that are real hospitals, people and cameras, not parts of one data set.

protofl table configs/tables/natural-heart.yaml --data-dir /data    # reads /data/heart/*.data by `heart`
python -m tests.bench.natural natural-heart                         # the page's table, of runs/tables/runs
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = 10  # of 14, as FLamby: without slope, ca and thal, which are mostly missing, and the label
CATEGORIES = {2: (2, 3, 4), 6: (1, 2)}  # chest pain, ECG: a column for each value but the first


def heart(data_dir: str) -> dict[str, Any]:
    """UCI's four files as FLamby's Fed-Heart-Disease has them: its columns, its rows, its division (sklearn, 43)."""
    from sklearn.model_selection import train_test_split

    parts = {name: complete_rows(Path(data_dir) / f"processed.{name}.data") for name in HOSPITALS}
    columns: dict[str, list[Any]] = {"inputs": [], "labels": [], "client": [], "split": []}
    for name, rows in parts.items():
        labels = (rows[:, -1] > 0).astype(np.int64)
        both = min(np.bincount(labels, minlength=2)) > 2
        numbers = np.arange(len(rows))
        _, test = train_test_split(
            numbers, test_size=1 - 0.66, train_size=0.66, random_state=43, stratify=labels if both else None
        )
        columns["inputs"] += [with_categories(row[:COLUMNS]) for row in rows]
        columns["labels"] += labels.tolist()
        columns["client"] += [name] * len(rows)
        columns["split"] += np.where(np.isin(numbers, test), "test", "train").tolist()
    return columns | {"inputs": np.array(columns["inputs"], np.float32), "classes": ("healthy", "ill")}


def heart_own_scale(data_dir: str) -> dict[str, Any]:
    """The same, each hospital's columns in deviations from its own training patients: what a site alone can know."""
    found = heart(data_dir)
    inputs, client, split = found["inputs"], np.array(found["client"]), np.array(found["split"])
    for name in HOSPITALS:
        known = inputs[(client == name) & (split == "train")]
        spread = known.std(axis=0)
        inputs[client == name] -= known.mean(axis=0)
        inputs[client == name] /= np.where(spread > 0, spread, 1)
    return found


def complete_rows(file: Path) -> np.ndarray:
    """[N, 11]: the columns that FLamby keeps and the label, of the rows in which none of them is missing."""
    rows = [line.split(",") for line in file.read_text().split()]
    kept = [row[:COLUMNS] + row[-1:] for row in rows]
    return np.array([row for row in kept if "?" not in row], dtype=np.float64)


def with_categories(row: np.ndarray) -> list[float]:
    plain = [value for column, value in enumerate(row) if column not in CATEGORIES]
    return plain + [float(row[column] == value) for column, values in CATEGORIES.items() for value in values]

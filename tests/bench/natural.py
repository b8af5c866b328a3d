"""docs/algorithms/natural.md: clients that are real hospitals, people and cameras, not parts of one data set.

python -m tests.bench.natural write /data           # /data/heart.npz of /data/heart/*.data
protofl table configs/tables/natural-heart.yaml --data-dir /data
python -m tests.bench.natural show natural-heart    # the page's table, of runs/tables/runs
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from protofl_common.basics.text import human_bytes
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.tables.spec import TableFile, read_table

TABLES = Path(__file__).parents[2] / "configs" / "tables"
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


def complete_rows(file: Path) -> np.ndarray:
    """[N, 11]: the columns that FLamby keeps and the label, of the rows in which none of them is missing."""
    rows = [line.split(",") for line in file.read_text().split()]
    kept = [row[:COLUMNS] + row[-1:] for row in rows]
    return np.array([row for row in kept if "?" not in row], dtype=np.float64)


def with_categories(row: np.ndarray) -> list[float]:
    plain = [value for column, value in enumerate(row) if column not in CATEGORIES]
    return plain + [float(row[column] == value) for column, values in CATEGORIES.items() for value in values]


# -- the page's table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "show"))
    parser.add_argument("which", help="write: the folder of the data; show: a table of configs/tables, natural-…")
    parser.add_argument("--out", type=Path, default=Path("runs/tables"), help="as of `protofl table`")
    arguments = parser.parse_args()
    if arguments.what == "write":
        np.savez(Path(arguments.which) / "heart.npz", **heart(str(Path(arguments.which) / "heart")))
        return
    table = read_table(TABLES / f"{arguments.which}.yaml")
    runs = runs_of(table, arguments.out / "runs")
    first = runs["Local"][0]
    names = dict(sorted(sites(first).items()))
    metrics = [name for name in ("balanced-accuracy", "auc") if f"head/{name}" in last_row(first)["metrics"]]
    columns = ["", "accuracy", *metrics, *(names.values() if len(names) <= 4 else ()), "worse off than alone", "bytes"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, folders in runs.items():
        found, alone = ([last_row(folder) for folder in each] for each in (folders, runs["Local"]))
        texts = [name, of_seeds([100 * row["accuracy"]["head"]["mean"] for row in found], 1)]
        texts += [of_seeds([row["metrics"][f"head/{metric}"]["mean"] for row in found], 2) for metric in metrics]
        each = [f"{100 * statistics.fmean(accuracies(row)[one] for row in found):.1f}" for one in names]
        pairs = [(accuracies(one)[s], accuracies(two)[s]) for one, two in zip(found, alone, strict=True) for s in names]
        worse = "–" if name == "Local" else f"{sum(here < there for here, there in pairs)} of {len(pairs)}"
        texts += [*(each if len(each) <= 4 else ()), worse, human_bytes(statistics.fmean(map(sent, folders)))]
        print(f"| {' | '.join(texts)} |")


def runs_of(table: TableFile, folder: Path) -> dict[str, list[Path]]:
    """Row -> its finished runs, in the order of the seeds."""
    finished = [(one, RunFolder(one).summary()) for one in sorted(folder.iterdir())]
    settings = [(one, summary["settings"]) for one, summary in finished if summary]
    natural = [(one, found) for one, found in settings if found["partition"] == "natural"]
    rows = {name: table.base.settings | row.part.settings for name, row in table.rows.items() if row.part}
    natural.sort(key=lambda run: run[1]["seed"])
    return {name: [one for one, found in natural if is_of(found, row)] for name, row in rows.items()}


def is_of(found: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether a run's settings have the row's algorithm and data."""
    same = all(found[key] == row[key] for key in ("algo", "dataset", "standardise") if key in row)
    same = same and found.get("gaussian.priors", "global") == row.get("gaussian.priors", "global")
    return same and Path(found["data-dir"]).name == Path(row["data-dir"]).name


def last_row(folder: Path) -> dict[str, Any]:
    return dict(RunFolder(folder).rows()[-1])


def accuracies(row: dict[str, Any]) -> dict[str, float]:
    return {site: client["accuracy"]["head"] for site, client in row["clients"].items()}


def sites(folder: Path) -> dict[str, str]:
    """Site -> the hospital, person or camera that it is."""
    return {site: facts["domain"] for site, facts in RunFolder(folder).finished_summary()["clients"].items()}


def sent(folder: Path) -> int:
    return sum(RunFolder(folder).finished_summary()["bytes"].values())


def of_seeds(values: list[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


if __name__ == "__main__":
    main()

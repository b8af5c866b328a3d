"""docs/leaderboard.md: PFLlib's public table on Fashion-MNIST, and how far ours has come.

    protofl table configs/tables/pfllib-fmnist.yaml --data-dir DATA --out OUT
    python -m tests.bench.leaderboard OUT

The table's runs, finished or not, are read from OUT/runs. Their figures go to docs/leaderboard.csv,
where a figure stays until a run of more rounds replaces it. The page's list is made of that file.
"""

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from protofl_common.basics.text import human_bytes
from protofl_common.runs.folder import RoundRow, RunFolder
from protofl_common.tools.arguments import read_assignments
from protofl_common.tools.tables.plan import Cell, plan
from protofl_common.tools.tables.spec import TableFile, read_table
from tests.bench.printing import markdown, parser_of, with_content

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "configs" / "tables" / "pfllib-fmnist.yaml"
PAGE = ROOT / "docs" / "leaderboard.md"
MEASURED = ROOT / "docs" / "leaderboard.csv"
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
HEADS = (
    "",
    "PFLlib",
    "ours",
    "difference",
    "verdict",
    "rounds",
    "rise",
    "mean over clients",
    "a round's bytes",
)

NEAR = 0.3
"""Points."""
LAST_ROUNDS = 20
"""A curve is judged by what it has gained in so many rounds."""
FLAT = 0.1
"""Points that the curve of a method that has converged may still gain in `LAST_ROUNDS`."""


@dataclass(frozen=True)
class Figures:
    """What a run has come to. Accuracies are in percent, over all test samples."""

    row: str
    column: str
    seed: int
    rounds: int
    best: float
    best_after: int
    rise: float
    """What the best accuracy has gained in the `LAST_ROUNDS`; all of it in a shorter run."""
    last_mean: float
    """The mean over the clients after the last round, our own usual figure."""
    round_bytes: int
    """Up and down, of all clients together."""

    @classmethod
    def of(cls, cell: Cell, seed: int, rows: Iterable[RoundRow]) -> Self | None:
        """Return the figures of a run's rows; None if it was not tested yet."""
        weighted: dict[int, float] = {}
        mean = 0.0
        sizes = 0
        for row in rows:
            if row["kind"] == "round":
                sizes = max(sizes, row["bytes"]["up"] + row["bytes"]["down"])
            accuracy = row["accuracy"].get(cell.figure.what)
            after = row["evaluated-after-round"]
            if accuracy and after:
                weighted[after] = 100 * accuracy["weighted"]
                mean = 100 * accuracy["mean"]
        if not weighted:
            return None
        rounds = max(weighted)
        best_after = max(weighted, key=lambda after: weighted[after])
        best = weighted[best_after]
        earlier = [share for after, share in weighted.items() if after <= rounds - LAST_ROUNDS]
        rise = best - max(earlier, default=0.0)
        return cls(cell.row, cell.column, seed, rounds, best, best_after, rise, mean, sizes)

    @property
    def is_flat(self) -> bool:
        return self.rise <= FLAT


def verdict(figures: Figures, theirs: float, deviation: float) -> str:
    """Apply the rule of the page."""
    difference = figures.best - theirs
    if abs(difference) <= NEAR:
        return f"within {NEAR}"
    if abs(difference) <= deviation:
        return "within its deviation"
    if difference > 0:
        return "above"
    return "below" if figures.is_flat else "below, still rising"


def read_measured() -> dict[tuple[str, str, int], Figures]:
    """Return what is in the file, by row, column and seed."""
    if not MEASURED.exists():
        return {}
    types = {field.name: field.type for field in fields(Figures)}
    found = {}
    with MEASURED.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            values = {name: types[name](text) for name, text in line.items()}  # type: ignore
            figures = Figures(**values)
            found[figures.row, figures.column, figures.seed] = figures
    return found


def write_measured(measured: Iterable[Figures]) -> None:
    """Write the file anew, with accuracies to two decimals."""
    with MEASURED.open("w", encoding="utf-8", newline="") as file:
        names = [field.name for field in fields(Figures)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for figures in measured:
            line = asdict(figures)
            for name in ("best", "rise", "last_mean"):
                line[name] = f"{line[name]:.2f}"
            writer.writerow(line)


def update(cells: Iterable[Cell], runs: Path) -> dict[tuple[str, str, int], Figures]:
    """Return what was measured, with the runs in this folder."""
    before = read_measured()
    measured = dict(before)
    for cell in cells:
        for seed, run in cell.runs.items():
            key = (cell.row, cell.column, seed)
            known = before.get(key)
            found = Figures.of(cell, seed, RunFolder(runs / run.name).each_row())
            if found and (known is None or found.rounds >= known.rounds):
                known = found
            if known:
                measured[key] = known
    return measured


def written(table: TableFile, measured: dict[tuple[str, str, int], Figures]) -> str:
    """Return a heading and a Markdown table for each column."""
    parts = []
    for column in table.columns:
        lines = []
        for name, row in table.rows.items():
            figures = measured.get((name, column, table.seeds[0]))
            lines.append([name, *cells_of(figures, row.paper.get(column, ""))])
        parts.append(f"### {column.capitalize()}\n\n{markdown(HEADS, lines)}\n")
    return "\n".join(parts)


def cells_of(figures: Figures | None, theirs: str) -> list[str]:
    """Return the cells of one line; a dash stands for what was not measured or published."""
    if figures is None:
        return [theirs or "–", *["–"] * (len(HEADS) - 2)]
    difference = judged = "–"
    if theirs:
        number, deviation = (float(part) for part in theirs.split(" ± "))
        difference = f"{figures.best - number:+.2f}".replace("-", "−")
        judged = verdict(figures, number, deviation)
    rise = f"{figures.rise:.2f}" if figures.rounds > LAST_ROUNDS else "–"
    return [
        theirs or "–",
        f"{figures.best:.2f} @{figures.best_after}",
        difference,
        judged,
        str(figures.rounds),
        rise,
        f"{figures.last_mean:.2f}",
        human_bytes(figures.round_bytes),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path, help="where protofl table put its results")
    parser.add_argument("--data-dir", default="", help="as for protofl table")
    changes = "key=value, as for protofl table"
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=changes)
    options = parser.parse_intermixed_args()
    table = read_table(TABLE)
    overrides = read_assignments(options.settings)
    cells = plan(table, data_dir=options.data_dir, overrides=overrides)
    measured = update(cells, options.out / "runs")
    write_measured(measured.values())
    page = PAGE.read_text(encoding="utf-8")
    text = with_content(page, BEGIN, f"\n{written(table, measured)}", END)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""docs/algorithms/hundred-rounds.md: does a default fall from its best within a hundred rounds?

    protofl table configs/tables/hundred-rounds.yaml --out OUT
    python -m tests.bench.hundred OUT

The table's runs are read from OUT/runs. An accuracy here is a mean over five evaluations in a row,
ten rounds: single rounds of single small clients go up and down by more than the limit.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protofl_common.runs.figures import of_head_or_prototypes
from protofl_common.runs.folder import RunFolder
from protofl_common.tools.tables.plan import plan
from protofl_common.tools.tables.spec import read_table
from tests.bench.printing import markdown, parser_of, with_content

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "configs" / "tables" / "hundred-rounds.yaml"
PAGE = ROOT / "docs" / "algorithms" / "hundred-rounds.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
IN_A_ROW = 5
LIMIT = 3.0
"""Points."""


@dataclass(frozen=True)
class Curve:
    """Accuracies in percent, means over `IN_A_ROW` evaluations."""

    best: float
    lowest_after: float
    end: float

    @classmethod
    def of(cls, accuracies: Sequence[float]) -> "Curve":
        """Average each accuracy with those before it; find the best mean, and what came after."""
        means = []
        for last in range(IN_A_ROW, len(accuracies) + 1):
            means.append(statistics.fmean(accuracies[last - IN_A_ROW : last]))
        best = max(means)
        return cls(best, min(means[means.index(best) :]), means[-1])

    @property
    def falls(self) -> bool:
        return self.best - self.lowest_after > LIMIT

    def cells(self) -> list[str]:
        fall = f"{self.best - self.lowest_after:.1f}"
        return [f"{self.best:.1f}", f"**{fall}**" if self.falls else fall, f"{self.end:.1f}"]


def curve_of(folder: Path) -> Curve | None:
    """Return the curve of a run's head, or of its prototypes; None for one that has not ended."""
    run = RunFolder(folder)
    if run.summary() is None:
        return None
    accuracies = []
    for row in run.each_row():
        if row["accuracy"]:
            accuracies.append(100 * of_head_or_prototypes(row["accuracy"])["mean"])
    return Curve.of(accuracies)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path, help="where protofl table put its results")
    runs = parser.parse_args().out / "runs"
    table = read_table(TABLE)
    cells: dict[str, list[str]] = {}
    for cell in plan(table):
        curve = curve_of(runs / cell.runs[1].name)
        own = cells.setdefault(cell.row, [cell.row])
        own += curve.cells() if curve else ["–"] * 3

    heads = [""]
    for column in table.columns:
        heads += [f"{column}: best", "fall", "end"]
    page = PAGE.read_text(encoding="utf-8")
    text = with_content(page, BEGIN, f"{markdown(heads, cells.values())}\n", END)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Figures of runs as rows of text, and how a terminal, Markdown and CSV show them; the page has HTML of its own."""

import csv
import io
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protofl_common.runs.folder import TROUBLE, Accuracies, Best, RoundRow

MEASURES = {"mean": "mean", "weighted": "by samples", "worst-10%": "worst 10 %", "std": "std"}  # over clients -> head
HIDDEN = "Over all sites' samples together, also as the mean: secure aggregation hides single sites."
"""Beside figures that are no more than a mean over all samples."""


@dataclass(frozen=True)
class Table:
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    title: str = ""
    words: Collection[int] = (0,)  # columns that hold words, where the others hold numbers

    def on_terminal(self) -> Any:
        from rich.table import Table as Shown
        from rich.text import Text

        shown = Shown(title=self.title or None, caption=self.note or None)
        for number, head in enumerate(self.heads):
            shown.add_column(head, justify="left" if number in self.words else "right", overflow="fold")
        for row in self.rows:
            shown.add_row(*map(Text, row))
        return shown

    def as_text(self) -> str:
        """100 columns wide, for a log."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=100).print(self.on_terminal())
        return text.getvalue().rstrip()

    def as_markdown(self) -> Iterator[str]:
        marks = ["---" if number in self.words else "---:" for number in range(len(self.heads))]
        yield from (_line(self.heads), f"|{'|'.join(marks)}|", *map(_line, self.rows))


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def as_csv(rows: Iterable[Iterable[object]], dialect: str = "excel") -> str:
    text = io.StringIO()
    csv.writer(text, dialect, lineterminator="\n").writerows(rows)
    return text.getvalue()


def cells(
    figures: Mapping[str, float], names: Iterable[str] = MEASURES, factor: int = 100, digits: int = 2
) -> list[str]:
    """These figures as text, shares in percent by default, variances in points²; "–" for one that is hidden."""
    scales = {name: (10_000, 1) if name == "variance" else (factor, digits) for name in names}
    return [f"{by * figures[name]:.{to}f}" if name in figures else "–" for name, (by, to) in scales.items()]


def accuracy_rows(
    accuracy: Accuracies, best: Mapping[str, str], validation: Accuracies, names: Iterable[str] = MEASURES
) -> list[list[str]]:
    """A row for each way to predict, the best at its end, and one for its figures on validation data."""
    rows = []
    for kind, figures in accuracy.items():
        rows.append([kind, *cells(figures, names), best.get(kind, "–")])
        if kind in validation:
            rows.append([f"{kind}, validation", *cells(validation[kind], names), "–"])
    return rows


def metric_rows(metrics: Accuracies, digits: int) -> list[list[str]]:
    """A row for each metric beside accuracy, but for recalls of classes."""
    return [[name, *cells(one, factor=1, digits=digits)] for name, one in metrics.items() if "/recall/" not in name]


def short_best(best: Best) -> str:
    """``"75.00 @3"``: percent, and after which round; `chosen` says on which data."""
    return f"{100 * best['mean']:.2f} @{best['after-round']}"


def best_text(best: Best) -> str:
    return f"{short_best(best)} ({chosen([best])})"


def chosen(best: Iterable[Best]) -> str:
    return " and ".join(sorted({f"chosen on {one.get('chosen-on', 'test')} data" for one in best})) or "not found"


def totals(rows: Sequence[RoundRow]) -> tuple[dict[str, int], dict[str, int], float]:
    """Bytes up and down, replies by `TROUBLE`, and seconds, over all rows."""
    sizes = {way: sum(row["bytes"][way] for row in rows) for way in ("up", "down")}
    lost: dict[str, int] = {kind: sum(len(row[kind]) for row in rows) for kind in TROUBLE}
    return sizes, lost, math.fsum(row["seconds"]["total"] for row in rows)


def lost_text(numbers: Mapping[str, int]) -> str:
    """``"2 failed, 1 late"``, or ``none``."""
    return ", ".join(f"{number} {kind}" for kind, number in numbers.items() if number) or "none"

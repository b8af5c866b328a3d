"""Figures of runs as rows of text, and how a terminal, Markdown and CSV show them; the page has HTML of its own."""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table as Shown
from rich.text import Text

from protofl_common.basics.text import human_bytes, printable
from protofl_common.runs.folder import TROUBLE, Accuracies, Best, RoundRow, RunFolder, Summary, baseline_folder
from protofl_common.runs.over_clients import in_percent

Figure = TypeVar("Figure")
MEASURES = {"mean": "mean", "weighted": "by samples", "worst-10%": "worst 10 %", "std": "std"}  # over clients -> head
IN_LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}", "*": "{*}"}
    | {"<": "$<$", ">": "$>$", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "≥": r"$\geq$", "≤": r"$\leq$"}
    | {"–": "--", "…": r"\ldots{}", "|": "$|$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$", "η": r"$\eta$"}
    | {"α": r"$\alpha$", "ε": r"$\varepsilon$", "λ": r"$\lambda$", "μ": r"$\mu$", "σ": r"$\sigma$", "τ": r"$\tau$"}
)
"""A row may not begin with [ or *, which would be an option of the row's end before."""
IN_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_[<&~"})
HIDDEN = "Over all sites' samples together, also as the mean: secure aggregation hides single sites."


@dataclass(frozen=True)
class Table:
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    title: str = ""
    words: Collection[int] = (0,)  # columns that hold words, where the others hold numbers
    bold: Collection[tuple[int, int]] = ()  # (row, column) of the best figures, in LaTeX

    def on_terminal(self) -> Shown:
        shown = Shown(title=self.title or None, caption=self.note or None)
        for number, head in enumerate(map(printable, self.heads)):
            shown.add_column(Text(head), justify="left" if number in self.words else "right", overflow="fold")
        for row in self.rows:
            shown.add_row(*(Text(printable(text)) for text in row))  # a stranger's: no escapes, no markup
        return shown

    def as_text(self) -> str:
        """100 columns wide, for a log."""
        text = io.StringIO()
        Console(file=text, width=100).print(self.on_terminal())
        return text.getvalue().rstrip()

    def as_markdown(self) -> Iterator[str]:
        marks = ["---" if number in self.words else "---:" for number in range(len(self.heads))]
        yield from (_line(self.heads), f"|{'|'.join(marks)}|", *map(_line, self.rows))

    def as_latex(self) -> str:
        """A ``tabular`` for ``\\input``, below the note: with the rules of the package booktabs where it is loaded."""
        columns = "".join("l" if number in self.words else "r" for number in range(len(self.heads)))
        lines = [[re.sub(r"\B-\b", "−", cell).translate(IN_LATEX) for cell in row] for row in [self.heads, *self.rows]]
        for row, column in self.bold:
            lines[row + 1][column] = rf"\textbf{{{lines[row + 1][column]}}}"
        head, *rows = [" & ".join(line) + r" \\" for line in lines]
        rules = [rf"\providecommand{{\{name}rule}}{{\hline}}" for name in ("top", "mid", "bottom")]
        begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
        notes = [f"% {line}" for line in self.note.splitlines()]
        return "\n".join([*notes, *rules, begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", end]) + "\n"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def as_csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def cells(
    figures: Mapping[str, float], names: Iterable[str] = MEASURES, factor: int = 100, digits: int = 2
) -> list[str]:
    """These figures as text, shares in percent by default, variances in points²; "–" for one that is hidden."""
    scales = {name: (10_000, 1) if name == "variance" else (factor, digits) for name in names}
    return [f"{by * figures[name]:.{to}f}" if name in figures else "–" for name, (by, to) in scales.items()]


def accuracy_rows(
    accuracy: Accuracies, best: Mapping[str, Best], validation: Accuracies, names: Iterable[str] = MEASURES
) -> list[list[str]]:
    """A row for each way to predict, the best at its end, and one for its figures on validation data."""
    rows = []
    for kind, figures in accuracy.items():
        rows.append([kind, *cells(figures, names), short_best(best[kind]) if kind in best else "–"])
        if kind in validation:
            rows.append([f"{kind}, validation", *cells(validation[kind], names), "–"])
    return rows


def metric_rows(metrics: Accuracies, digits: int) -> list[list[str]]:
    """A row for each metric beside accuracy, but for recalls of classes; accuracies of new clients in percent."""
    shown = {name: figures for name, figures in metrics.items() if "/recall/" not in name}
    scales = {name: (100, 2) if in_percent(name) else (1, digits) for name in shown}
    return [[name, *cells(figures, MEASURES, *scales[name])] for name, figures in shown.items()]


def short_best(best: Best) -> str:
    """``"75.00 @3"``: percent, and after which round; `chosen` says on which data."""
    return f"{100 * best['mean']:.2f} @{best['after-round']}"


def best_text(best: Best) -> str:
    return f"{short_best(best)} ({chosen([best])})"


def chosen(best: Iterable[Best]) -> str:
    return " and ".join(sorted({f"chosen on {result.get('chosen-on', 'test')} data" for result in best})) or "not found"


def totals(rows: Sequence[RoundRow]) -> tuple[dict[str, int], dict[str, int], float]:
    """Bytes up and down, replies by `TROUBLE`, and seconds, over all rows."""
    sizes = {way: sum(row["bytes"][way] for row in rows) for way in ("up", "down")}
    lost: dict[str, int] = {kind: sum(len(row[kind]) for row in rows) for kind in TROUBLE}
    return sizes, lost, math.fsum(row["seconds"]["total"] for row in rows)


def audit_table(findings: Sequence[dict[str, Any]]) -> Table:
    heads = ("attack", "samples of a class", "classes", "advantage", "likeliest is a member")
    rows = [
        (
            f"{attack['attack']}{' (above chance)' if attack['above_chance'] else ''}",
            str(attack["samples"]),
            str(attack["classes"]),
            f"{attack['advantage']:+.2f} ± {3 * attack['error']:.2f}",
            f"{attack['named']} ({attack['by_chance']:.1f} by chance)",
        )
        for attack in findings
    ]
    note = (
        "Membership inference by whoever has the messages and the clients' models: 0 is guessing, 1 names all members; "
        "± three deviations of guessing. Other attacks may find more."
    )
    return Table(heads, rows, note, "what the messages tell", words=(0, 1))


# -- a run beside its baselines (the setting ``baselines``): what prototypes gained, and what they cost
COMPARED_HEADS = ("", "accuracy", "against alone", "worst 10 %", "exchanged", "models")
COMPARED_NOTE = "Mean test accuracy over the clients, after the last round; the same clients and data."


def compared(folder: Path, baselines: Iterable[str]) -> list[Summary]:
    """The baselines that have a result, in their order, and at the end the run itself; [] where that has none."""
    summaries = [RunFolder(path).summary() for path in [*(baseline_folder(folder, algo) for algo in baselines), folder]]
    runs = [summary if summary and summary["accuracy"] else None for summary in summaries]
    return [run for run in runs if run] if runs[-1] else []


def by_head(figures: Mapping[str, Figure]) -> Figure:
    """The entry of the head where there is one, else that of prototypes."""
    return figures["head"] if "head" in figures else figures["prototype"]


def is_alone(run: Summary) -> bool:
    return run["settings"]["algo"] == "local"


def harmed(runs: Sequence[Summary]) -> str:
    """Say how many clients each run leaves worse off than training alone, client by client; "" without such a run."""
    alone = next((run["accuracy-of-clients"] for run in runs if is_alone(run)), {})
    texts = []
    for run in runs:
        of_clients = {} if is_alone(run) else run["accuracy-of-clients"]
        pairs = [(own, alone[site]) for site, own in of_clients.items() if own and alone.get(site)]
        worse = sum(by_head(own) < by_head(before) for own, before in pairs)
        texts += [f"{run['algorithm']} {worse} of {len(pairs)}"] if pairs else []
    return f" Clients worse off than alone: {', '.join(texts)}." if texts else ""


def counted(names: Iterable[str]) -> str:
    """``"6 × cnn4, 4 × htcnn-3"``."""
    return ", ".join(f"{number} × {name}" for name, number in sorted(Counter(names).items()))


def sentence(runs: Sequence[Summary]) -> str:
    """``"alone 36.1 %, FedProto 73.4 %; 96 MB exchanged"``, by the run; with prototypes a point above the head."""
    texts = []
    for run in runs:
        architectures = len({client["arch"] for client in run["clients"].values()})
        over = f" over {architectures} architectures" if architectures > 1 else ""
        percent = {kind: 100 * figures["mean"] for kind, figures in run["accuracy"].items()}
        texts.append(f"{'alone' if is_alone(run) else run['algorithm'] + over} {by_head(percent):.1f} %")
        if percent.get("prototype", 0.0) > by_head(percent) + 1:
            texts[-1] += f" by its head, {percent['prototype']:.1f} % by prototypes"
    return f"{', '.join(texts)}; {human_bytes(sum(runs[-1]['bytes'].values()))} exchanged"


def side_by_side(runs: Sequence[Summary]) -> Table:
    alone = next((100 * by_head(run["accuracy"])["mean"] for run in runs if is_alone(run)), None)
    rows = []
    for run in runs:
        figures = {name: 100 * share for name, share in by_head(run["accuracy"]).items()}
        gain = "–" if alone is None or is_alone(run) else f"{figures['mean'] - alone:+.1f} points"
        worst = f"{figures['worst-10%']:.1f} %" if "worst-10%" in figures else "–"
        exchanged, models = human_bytes(sum(run["bytes"].values())), counted(c["arch"] for c in run["clients"].values())
        rows.append([run["algorithm"], f"{figures['mean']:.1f} %", gain, worst, exchanged, models])
    note = f"{COMPARED_NOTE} {HIDDEN}" if any(row[3] == "–" for row in rows) else COMPARED_NOTE
    return Table(COMPARED_HEADS, rows, note + harmed(runs), "side by side", words=(0, 5))

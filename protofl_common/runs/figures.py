"""Figures of runs as rows of text, and how a terminal, Markdown, LaTeX and CSV show them.

The page has HTML of its own.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text
from tabulate import tabulate

from protofl_common.basics.text import human_bytes, human_seconds, printable
from protofl_common.config.lists import names_in
from protofl_common.config.sections import PER_UNIT
from protofl_common.runs.folder import (
    TROUBLE,
    Accuracies,
    Best,
    RoundRow,
    Rows,
    RunFolder,
    Summary,
    baseline_folder,
    reading,
)
from protofl_common.runs.over_clients import factor, figures_of, hides_clients, in_percent
from protofl_common.tasks import Result, task_with
from protofl_common.tasks.metrics import BY_CLASS, KINDS

Figure = TypeVar("Figure")
MEASURES = {
    "mean": "mean",
    "weighted": "by samples",
    "worst-10%": "worst 10 %",
    "std": "std",
}
"""Figures over clients, and their heads."""
BOLD = "\ue000"  # of no text: marks that `IN_LATEX` turns into LaTeX, which would else be escaped
END_OF_BOLD = "\ue001"
IN_LATEX = str.maketrans({
    BOLD: r"\textbf{", END_OF_BOLD: "}",
    "[": "{[}", "*": "{*}",  # after the end of a row they would be its options
    "|": "$|$", "≤": r"$\leq$", "≥": r"$\geq$", "±": r"$\pm$", "×": r"$\times$",
    "†": r"$^\dagger$", "−": "$-$", "–": "--", "…": r"\ldots{}",
    "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$", "ε": r"$\varepsilon$",
    "η": r"$\eta$", "λ": r"$\lambda$", "μ": r"$\mu$", "σ": r"$\sigma$", "τ": r"$\tau$",
})  # fmt: skip
"""What tabulate leaves as it is; letters that mean something to LaTeX it escapes itself."""
IN_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_[<&~"})
HIDDEN = (
    "Over all sites' samples together, also as the mean: secure aggregation hides single sites."
)


def epsilon_of_ledgers(row: RoundRow) -> float | None:
    """Return the largest ε that a client's own ledger counts for this run; None if no client says.

    What all runs together have cost is in the ledger too, but no server is told.
    """
    reported = [client["epsilon"] for client in row["clients"].values() if "epsilon" in client]
    return max(reported, default=None)


def describe_epsilon(planned: float, of_ledgers: float | None, unit: str) -> str:
    """Describe the ε that was ``planned`` for the client that the run costs most.

    ``of_ledgers`` is the largest ε of the clients' own ledgers (`epsilon_of_ledgers`); None is left
    out. ``unit`` says whose privacy ε bounds: "sample" or "person", as the setting ``dp``.
    """
    text = f"ε ≤ {planned:.2f}{PER_UNIT[unit]} planned"
    if of_ledgers is not None:
        text += f", {of_ledgers:.2f} by the clients' ledgers"
    return text


@dataclass(frozen=True)
class Table:
    """A table of texts, and how each medium shows it."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    title: str = ""
    words: Collection[int] = (0,)  # columns that hold words, where the others hold numbers
    bold: Collection[tuple[int, int]] = ()  # (row, column) of the best figures, in LaTeX

    def on_terminal(self) -> TerminalTable:
        """Return the table as rich draws it on a terminal.

        Texts may come from strangers, so escape sequences are removed and markup is not read.
        """
        shown = TerminalTable(title=self.title or None, caption=self.note or None)
        for number, head in enumerate(self.heads):
            text = Text(printable(head))
            is_words = number in self.words
            shown.add_column(text, justify="left" if is_words else "right", overflow="fold")
        for row in self.rows:
            shown.add_row(*(Text(printable(text)) for text in row))
        return shown

    def show(self) -> None:
        """Print the table on the terminal."""
        Console().print(self.on_terminal())

    def as_text(self) -> str:
        """Return the table as plain text of 100 columns, for a log."""
        text = io.StringIO()
        Console(file=text, width=100).print(self.on_terminal())
        return text.getvalue().rstrip()

    def as_markdown(self) -> Iterator[str]:
        """Yield the lines of the table in Markdown, without note and title."""
        marks = ["---" if number in self.words else "---:" for number in range(len(self.heads))]
        yield _markdown_row(self.heads)
        yield f"|{'|'.join(marks)}|"
        for row in self.rows:
            yield _markdown_row(row)

    def as_latex(self) -> str:
        """Return a LaTeX ``tabular`` for ``\\input``, with the note as a comment above it.

        It has the rules of the package booktabs where that is loaded, else plain ones.
        """
        rows = [[_with_minus(text) for text in row] for row in self.rows]
        # tabulate would escape \textbf{…}: marks stand for it until `IN_LATEX` replaces them
        for row, column in self.bold:
            rows[row][column] = BOLD + rows[row][column] + END_OF_BOLD
        columns = range(len(self.heads))
        blank = ["" for _ in columns]  # without any row tabulate would drop the columns
        tabular = tabulate(
            rows or [blank],
            [_with_minus(head) for head in self.heads],
            tablefmt="latex_booktabs",
            colalign=["left" if number in self.words else "right" for number in columns],
            disable_numparse=True,
        )
        lines = [f"% {line}" for line in self.note.splitlines()]
        for rule in ("top", "mid", "bottom"):
            lines.append(rf"\providecommand{{\{rule}rule}}{{\hline}}")
        return "\n".join([*lines, tabular.translate(IN_LATEX)]) + "\n"


def _markdown_row(texts: Iterable[str]) -> str:
    """Return a row of a Markdown table, in whose texts bars are escaped."""
    escaped = [text.replace("|", "\\|") for text in texts]
    return f"| {' | '.join(escaped)} |"


def _with_minus(text: str) -> str:
    """Replace a hyphen by a minus where a letter or digit follows, and none comes before."""
    return re.sub(r"\B-\b", "−", text)


def as_csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def cells(
    name: str,
    figures: Mapping[str, float],
    measures: Iterable[str] = MEASURES,
    digits: int = 4,
) -> list[str]:
    """Return the ``measures`` of the figure ``name`` as texts; "–" stands for a missing one.

    An accuracy is shown in percent with two digits, a variance of accuracies in percentage points
    squared, and a metric as it is, with so many ``digits``.
    """
    if in_percent(name):
        digits = 2
    texts = []
    for measure in measures:
        if measure not in figures:
            texts.append("–")
        elif measure == "variance":
            texts.append(f"{factor(name) ** 2 * figures[measure]:.{digits - 1}f}")
        else:
            texts.append(f"{factor(name) * figures[measure]:.{digits}f}")
    return texts


def in_reading_order(results: Iterable[Result], figures: Mapping[str, object]) -> Iterator[str]:
    """Yield the name of each figure, the run's results first; that of validation data follows."""
    for name in dict.fromkeys([*(result.name for result in results), *figures]):
        if not name.startswith("validation/"):
            yield name
        if f"validation/{name}" in figures:
            yield f"validation/{name}"


def figure_rows(
    figures: Accuracies,
    best: Mapping[str, Best] | None = None,
    *,
    measures: Iterable[str] = MEASURES,
    digits: int = 4,
    classes: Sequence[str] = (),
    says_right: str = "accuracy",
) -> list[list[str]]:
    """Return the rows of a table of figures: a name, the ``measures``, and with ``best`` that mean.

    Recalls of single classes and errors of AUCs are left out. Figures of classes stand one after
    another, in the order of classes: clients that test different ones report them in another order.
    ``digits`` is as for `cells`; ``classes`` are the names of the classes, if they are known. Where
    the task calls the share of right predictions otherwise (`Task.says_right`), its name says so.
    """
    names_of: dict[str, list[str]] = {}  # a metric, without the number of a class -> its figures
    for name in figures:
        metric, _, number = name.rpartition("/")
        names_of.setdefault(metric if number.isdecimal() else name, []).append(name)
    rows = []
    for metric, names in names_of.items():
        if metric.endswith(("/recall", "/label-auc-error")):
            continue
        for name in sorted(names, key=lambda name: (len(name), name)):  # 9 before 10
            shown = with_class_name(name.removeprefix("validation/"), classes)
            if shown in KINDS and says_right != "accuracy":
                shown += f" ({says_right})"
            if name.startswith("validation/"):
                shown += ", validation"
            row = [shown, *cells(name, figures[name], measures, digits)]
            if best is not None:
                row.append(short_best(best[name]) if name in best else "–")
            rows.append(row)
    return rows


def with_class_name(figure: str, classes: Sequence[str]) -> str:
    """Add the name of the class to that of a figure of a single class.

    ``head/label-auc/7`` becomes ``head/label-auc/7 (Effusion)``: the number stays, as ``--what``
    and ``metrics.jsonl`` take it. Other figures, and classes without a name, stay as they are.
    """
    _, metric, number, *_ = [*figure.removeprefix("validation/").split("/"), "", ""]
    if metric in BY_CLASS and number.isdecimal() and int(number) < len(classes):
        return f"{figure} ({classes[int(number)]})"
    return figure


def results_of(run: Summary) -> dict[str, Result]:
    """Return the figure that is the run's result, for each way to predict that it has."""
    task = task_with(run["settings"])
    measured = run["metrics"]
    return {kind: task.result_of(kind, measured) for kind in run["accuracy"]}


def results_in_common(runs: Sequence[Summary]) -> list[Result]:
    """Return for each of the runs the figure by which they are compared: its result.

    It is by the head where a run has one. If the results are not all of one kind, as where a run
    lacks the metric that another one has, all are compared by the share of right predictions.
    """
    results = [_result_of(run, run["metrics"]) for run in runs]
    titles = {result.title for result in results}
    if len(titles) > 1:
        return [_result_of(run, measured=()) for run in runs]
    return results


def _result_of(run: Summary, measured: Collection[str]) -> Result:
    """Return a run's result if it has ``measured`` these metrics."""
    kind = "head" if run["accuracy"].get("head") else "prototype"
    return task_with(run["settings"]).result_of(kind, measured)


def results_of_folders(folders: Iterable[Path]) -> dict[Path, Result]:
    """Return for each finished run the figure by which they are compared (`results_in_common`).

    SettingsError for a run that is not finished, or whose summary is malformed.
    """
    summaries = {}
    for folder in folders:
        summaries[folder] = RunFolder(folder).finished_summary()
        with reading(f"{folder}: not the figures of a run"):
            results_in_common([summaries[folder]])  # so that an error names the folder
    results = results_in_common(list(summaries.values()))
    return dict(zip(summaries, results, strict=True))


def value_text(result: Result, value: float) -> str:
    """Say a result: a share of right predictions in percent, a metric as it is."""
    return f"{100 * value:.1f} %" if in_percent(result.name) else f"{value:.3f}"


def axis(result: Result) -> str:
    """Return the words at the axis of a chart of a result."""
    return f"test {result.title}, %" if in_percent(result.name) else f"test {result.title}"


def short_best(best: Best) -> str:
    """Return the best mean in percent and its round, such as "75.00 @3"."""
    return f"{100 * best['mean']:.2f} @{best['after-round']}"


def best_text(best: Best) -> str:
    """Return the best mean, its round, and on which data the round was chosen."""
    return f"{short_best(best)} ({chosen([best])})"


def chosen(best: Iterable[Best]) -> str:
    """Say on which data these rounds were chosen as the best; "not found" without any."""
    texts = {f"chosen on {result.get('chosen-on', 'test')} data" for result in best}
    return " and ".join(sorted(texts)) or "not found"


def totals(rows: Rows) -> tuple[Counter[str], Counter[str], float]:
    """Return sums over all rows: bytes up and down, lost replies by `TROUBLE`, and seconds.

    A reply that was missing in its round, but counted in a later one, is not lost.
    """
    sizes: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for row in rows:
        sizes.update(row["bytes"])
        lost.update({kind: len(row[kind]) for kind in TROUBLE})
        lost["missing"] -= len(row.get("counted-late", {}))
    seconds = fsum(row["seconds"]["total"] for row in rows)
    return sizes, lost, seconds


def lost_replies(run: Summary) -> dict[str, int]:
    """Return how many replies a finished run has lost, by what happened to them."""
    # a late reply was "missing" in its own round
    return {kind: number for kind, number in run["trouble"].items() if kind != "late"}


def final_table(summary: Summary, classes: Sequence[str] = ()) -> Table:
    """Return a run's final table: accuracies and metrics, and in the note what the run cost.

    If a metric is the run's result, it stands first. The note also says on which data the best
    round was chosen, and how many replies were lost. ``classes`` are the names of the classes.
    """
    best = summary["best-accuracy"]
    task = task_with(summary["settings"])
    notes = []
    if hides_clients(summary):
        notes.append(HIDDEN)
    notes.append(f"best mean: test {task.says_right} of the round {chosen(best.values())}")

    lost = lost_replies(summary)
    up = human_bytes(summary["bytes"]["up"])
    down = human_bytes(summary["bytes"]["down"])
    costs = [f"{up} up, {down} down", human_seconds(summary["seconds"])]
    if "epsilon" in summary:
        of_ledgers = summary.get("epsilon-of-ledgers")
        unit = str(summary["settings"]["dp"])
        costs.insert(0, describe_epsilon(summary["epsilon"], of_ledgers, unit))
    texts = [f"{number} {kind}" for kind, number in lost.items() if number]
    costs.append(f"lost replies: {', '.join(texts) or 'none'}")
    notes.append(" · ".join(costs))

    data = "the sites' own data" if summary["partition"] == "own" else summary["dataset"]
    title = f"{summary['algorithm']} on {data} after round {summary['rounds']}"
    if summary["stopped-early"]:
        title += ", stopped early"

    results = results_of(summary).values()
    metric = task.result_metric
    is_asked_for = metric in names_in(summary["settings"].get("metrics"))
    if metric and all(in_percent(result.name) for result in results) and not is_asked_for:
        notes.append(f"the {task.result_title} tells more: metrics={metric} has it measured")

    name_of_rows = "accuracy of" if task.says_right == "accuracy" else ""
    heads = (name_of_rows, *MEASURES.values(), "best mean")
    figures = figures_of(summary)
    ordered = {name: figures[name] for name in in_reading_order(results, figures)}
    rows = figure_rows(ordered, best, digits=3, classes=classes, says_right=task.says_right)
    return Table(heads, rows, "\n".join(notes), title)


def audit_table(findings: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the attacks that `protofl audit` tried, and how much each found out."""
    rows = []
    for attack in findings:
        above = " (above chance)" if attack["above_chance"] else ""
        rows.append([
            f"{attack['attack']}{above}",
            str(attack["samples"]),
            str(attack["classes"]),
            f"{attack['advantage']:+.2f} ± {3 * attack['error']:.2f}",
            f"{attack['named']} ({attack['by_chance']:.1f} by chance)",
        ])  # fmt: skip
    heads = ("attack", "samples of a class", "classes", "advantage", "likeliest is a member")
    note = (
        "Membership inference by whoever has the messages and the clients' models: 0 is guessing, "
        "1 names all members; ± three deviations of guessing. Other attacks may find more."
    )
    return Table(heads, rows, note, "what the messages tell", words=(0, 1))


# -- a run beside its baselines (the setting ``baselines``): what prototypes gained, and their cost
OTHER_NETWORKS = "other networks"
NOT_KNOWN = "not known"  # where secure aggregation has hidden the single sites
NETWORKS_NOTE = (
    f" {OTHER_NETWORKS.capitalize()}: the clients alone had other networks, which may be worth as"
    " much as the method."
)


def compared(folder: Path, baselines: Iterable[str]) -> list[Summary]:
    """Return the summaries of a run's ``baselines``, and then the run's own.

    Baselines without an accuracy are left out. [] if the run itself has no accuracy.
    """
    folders = [*(baseline_folder(folder, algo) for algo in baselines), folder]
    summaries = [RunFolder(each).summary() for each in folders]
    runs = [summary for summary in summaries if summary and summary["accuracy"]]
    return runs if summaries[-1] in runs else []


def of_head_or_prototypes(figures: Mapping[str, Figure]) -> Figure:
    """Return the figure by a model's head where there is one, else that by prototypes."""
    return figures["head"] if "head" in figures else figures["prototype"]


def is_alone(run: Summary) -> bool:
    """Return whether the clients of this run trained alone, without a federation."""
    return run["settings"]["algo"] == "local"


def networks(run: Summary) -> dict[str, str]:
    """Return the architecture of each client."""
    return {site: client["arch"] for site, client in run["clients"].items()}


def harmed(runs: Sequence[Summary]) -> str:
    """Say how many clients each run leaves with a lower accuracy than they have alone.

    Only clients with the same network in both runs are compared. The sentence begins with a blank,
    as it follows others; it is "" if in none of ``runs`` the clients train alone.
    """
    alone = next((run for run in runs if is_alone(run)), None)
    if alone is None:
        return ""
    texts = []
    for run in runs:
        if run is alone:
            continue
        are_worse = []
        # the sites that have the same network in both runs
        for site, _ in networks(run).items() & networks(alone).items():
            accuracy = run["accuracy-of-clients"].get(site)
            accuracy_alone = alone["accuracy-of-clients"].get(site)
            if accuracy and accuracy_alone:
                together = of_head_or_prototypes(accuracy)
                by_itself = of_head_or_prototypes(accuracy_alone)
                are_worse.append(together < by_itself)
        if are_worse:
            texts.append(f"{run['algorithm']} {sum(are_worse)} of {len(are_worse)}")
    if not texts:
        return ""
    measure = task_with(alone["settings"]).says_right  # "accuracy", or "exact match"
    by = "" if measure == "accuracy" else f" by {measure}"
    return f" Clients worse off than alone{by}: {', '.join(texts)}."


def counted(names: Iterable[str]) -> str:
    """Say how often each name occurs, such as "6 × cnn4, 4 × htcnn-3", in the order of names."""
    return ", ".join(f"{number} × {name}" for name, number in sorted(Counter(names).items()))


def sentence(runs: Sequence[Summary]) -> str:
    """Say in a line how good each run is, and how much the last one exchanged.

    For example "alone 36.1 %, FedProto 73.4 %; 96 MB exchanged", or "FedProto AUC 0.735; …" where
    the AUC is the result. The figure is the head's, if there is one; that of prototypes is added if
    it is higher by more than 0.01, or a percentage point.
    """
    texts = []
    for run in runs:
        name = "alone" if is_alone(run) else run["algorithm"]
        architectures = len(set(networks(run).values()))
        if architectures > 1:
            name += f" over {architectures} architectures"

        results = results_of(run)
        result = of_head_or_prototypes(results)
        mean = figures_of(run)[result.name]["mean"]
        title = "" if result.title == "accuracy" else f"{result.title} "
        text = f"{name} {title}{value_text(result, mean)}"
        other = results.get("prototype", result)
        other_mean = figures_of(run)[other.name]["mean"]
        if other.title == result.title and other_mean - mean > 0.01:
            text += f" by its head, {value_text(other, other_mean)} by prototypes"
        texts.append(text)
    exchanged = human_bytes(sum(runs[-1]["bytes"].values()))
    return f"{', '.join(texts)}; {exchanged} exchanged"


def side_by_side(runs: Sequence[Summary]) -> Table:
    """Return a table of runs of the same clients, with the gain of each over clients alone.

    The gain is given only where clients have the same networks as alone.
    """
    alone = next((run for run in runs if is_alone(run)), None)
    results = results_in_common(runs)
    rows = []
    for run, result in zip(runs, results, strict=True):
        figures = figures_of(run)[result.name]
        gain = "–"
        if alone is not None and run is not alone:
            gain = OTHER_NETWORKS
            if networks(run) == networks(alone):
                result_alone = results[runs.index(alone)]
                difference = figures["mean"] - figures_of(alone)[result_alone.name]["mean"]
                is_share = in_percent(result.name)
                gain = f"{100 * difference:+.1f} points" if is_share else f"{difference:+.3f}"
        worst = NOT_KNOWN
        if "worst-10%" in figures:
            worst = value_text(result, figures["worst-10%"])
        mean = value_text(result, figures["mean"])
        exchanged = human_bytes(sum(run["bytes"].values()))
        models = counted(networks(run).values())
        rows.append([run["algorithm"], mean, gain, worst, exchanged, models])

    title = results[-1].title
    note = f"Mean test {title} over the clients, after the last round; the same clients and data."
    if any(OTHER_NETWORKS in row for row in rows):
        note += NETWORKS_NOTE
    if any(NOT_KNOWN in row for row in rows):
        note += f" {HIDDEN}"
    heads = ("", title, "against alone", "worst 10 %", "exchanged", "models")
    words = (0, 5)  # the columns of the algorithm and of its models
    return Table(heads, rows, note + harmed(runs), "side by side", words=words)

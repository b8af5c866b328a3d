"""Accuracies over the rounds, of the mean and worst clients, by domain, of every client; and training losses."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from protofl_common.report.figures import drawing as plot
from protofl_common.report.reading import Floats, Run
from protofl_common.runs.evaluation_metrics import RECALL
from protofl_common.runs.folder import RoundRow

MEANING = {"head": "the classifier", "prototype": "the nearest prototype"}
MOST_ROWS = 200  # clients of a heat map; with more it shows the first ones


def curves(run: Run) -> Iterator[plot.Drawing]:
    if not run.kinds:
        return
    with plot.canvas() as (figure, axes):
        for index, kind in enumerate(run.kinds):
            rows, colour = run.evaluations(kind), plot.COLOURS[index]
            for name, label, dashes in (("mean", "mean", "-"), ("worst-10%", "worst 10 %", "--")):
                if name in rows[-1]["accuracy"][kind]:  # with secure aggregation there is only a mean
                    values = [100 * row["accuracy"][kind][name] for row in rows]
                    look = {"color": colour, "label": f"{kind}, {label}", **plot.markers(index, len(rows))}
                    axes.plot(_rounds(rows), values, dashes, **look)
            if validated := [row for row in rows if kind in row.get("validation", {})]:
                values = [100 * row["validation"][kind]["mean"] for row in validated]
                axes.plot(_rounds(validated), values, ":", color=colour, label=f"{kind}, validation")
        validation = any("validation" in row for row in run.rows)
        axes.set_ylabel("accuracy, %" if validation else "test accuracy, %")
        plot.round_axis(axes)
        plot.legend_below(axes, 2)
        ways = " and ".join(f"“{kind}” by {MEANING[kind]}" for kind in run.kinds)
        worst = "" if run.hides_clients else "; dashed: the mean of the worst tenth of the clients"
        caption = (
            f"Test accuracy over the clients: {ways}. Solid: the mean{worst}. "
            "Measured with what the clients received, after the round that stands below."
        )
        caption += " Dotted: the mean on the clients' validation data." if validation else ""
        yield plot.draw(figure, "accuracy-curves", "Mean and worst clients", caption)


def of_domains(run: Run) -> Iterator[plot.Drawing]:
    if run.domains and run.better and not run.hides_clients:
        rows = run.evaluations(run.better)
        lines = {
            domain: [plot.finite_mean(np.array([_accuracy(row, site, run.better) for site in sites])) for row in rows]
            for domain, sites in run.domains.items()
        }
        caption = f"Mean test accuracy over the clients of each domain, by {MEANING[run.better]}."
        unit = f"test accuracy ({run.better}), %"
        yield plot.line_chart("accuracy-of-domains", "By domain", caption, _rounds(rows), lines, unit)


def of_clients(run: Run) -> Iterator[plot.Drawing]:
    sites = [] if run.hides_clients else list(run.sites)[:MOST_ROWS]
    shown = f" The first {len(sites)} of {len(run.sites)} clients." if len(sites) < len(run.sites) else ""
    for kind in run.kinds if sites else ():
        rows = run.evaluations(kind)
        values = np.array([[_accuracy(row, site, kind) for row in rows] for site in sites])
        caption = (
            f"Test accuracy of every client by {MEANING[kind]}; the lighter, the better. "
            f"Blank: not evaluated then.{shown}"
        )
        title, unit = f"Every client ({kind})", "test accuracy, %"
        yield _over_rounds(f"accuracy-of-clients-{kind}", title, caption, unit, sites, _rounds(rows), values)


def _over_rounds(
    name: str, title: str, caption: str, unit: str, names: list[str], rounds: list[int], percent_NR: Floats
) -> plot.Drawing:
    with plot.canvas(plot.WIDTH, min(max(plot.HEIGHT, 1.2 + 0.17 * len(names)), 8.0)) as (figure, axes):
        plot.heat_map(axes, percent_NR, names, unit, vmin=0, vmax=100)
        _round_columns(axes, rounds)
        rows = zip(names, percent_NR.round(2).tolist(), strict=True)
        columns = {"after round": rounds} | {f"{name} ({unit})": values for name, values in rows}
        return plot.draw(figure, name, title, caption, columns=columns)


def _round_columns(axes: Any, rounds: Sequence[int]) -> None:
    step = next(step * ten for ten in (1, 10, 100, 1000, 10_000) for step in (1, 2, 5) if len(rounds) <= 8 * step * ten)
    chosen = [position for position, number in enumerate(rounds) if number % step == 0] or [0]
    axes.set_xticks(chosen, [str(rounds[position]) for position in chosen])
    axes.set_xlabel("after round")


def metrics(run: Run) -> Iterator[plot.Drawing]:
    rows = [row for row in run.rows if row.get("metrics")]
    names = dict.fromkeys(name for row in rows for name in row["metrics"])
    values = {name: [row["metrics"].get(name, {}).get("mean", math.nan) for row in rows] for name in names}
    if others := {name: values[name] for name in names if f"/{RECALL}/" not in name}:
        caption, unit = "Metrics that the run asked for: means over the clients.", "mean over the clients"
        yield plot.line_chart("metrics", "Other metrics", caption, _rounds(rows), others, unit, legend=2)
    first = f"{run.better}/{RECALL}/"
    if labels := sorted(int(name.removeprefix(first)) for name in names if name.startswith(first)):
        recalls = 100 * np.array([values[f"{first}{label}"] for label in labels])
        caption = f"Recall of each class by {MEANING[run.better]}: the mean over the clients with test samples of it."
        classes = [run.class_name(label) for label in labels]
        yield _over_rounds("recall", "Recall of each class", caption, "recall, %", classes, _rounds(rows), recalls)


def losses(run: Run) -> Iterator[plot.Drawing]:
    """The clients' loss and its terms, and the server's where it trains."""
    rows = [row for row in run.rounds if row["losses"]]
    names = dict.fromkeys(name for row in rows for name in row["losses"])
    if list(names) == ["total", "cross-entropy"]:  # the same numbers twice
        del names["total"]
    lines = {name: [row["losses"].get(name, math.nan) for row in rows] for name in names}
    if any("server-loss" in row.get("server", {}) for row in rows):
        lines["server's loss"] = [row.get("server", {}).get("server-loss", math.nan) for row in rows]
    if rows:
        caption = "Mean training loss over the clients' samples in each round, and the terms that it is the sum of."
        rounds = [row["round"] for row in rows]
        yield plot.line_chart("losses", "Training losses", caption, rounds, lines, "loss", below="round", powers=True)


def _rounds(rows: list[RoundRow]) -> list[int]:
    return [row["evaluated-after-round"] for row in rows]


def _accuracy(row: RoundRow, site: str, kind: str) -> float:
    """In percent; NaN where the client did not tell."""
    return 100.0 * row["clients"][site]["accuracy"].get(kind, math.nan) if site in row["clients"] else math.nan

"""Accuracies over the rounds, of the mean and worst clients, by domain, of every client; and training losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from protofl_common.report.figures.drawing import (
    COLOURS,
    HEIGHT,
    MARKERS,
    WIDTH,
    Drawing,
    canvas,
    draw,
    finite_mean,
    legend_below,
    plot_lines,
    round_axis,
    round_columns,
    some_ticks,
)
from protofl_common.report.reading import Floats, Run
from protofl_common.runs.evaluation_metrics import RECALL
from protofl_common.runs.folder import RoundRow

MEANING = {"head": "the classifier", "prototype": "the nearest prototype"}
MOST_ROWS = 200
"""Clients of a heat map; with more it shows the first ones."""


def curves(run: Run) -> list[Drawing]:
    """Mean and worst tenth of the clients, of each way to predict."""
    if not run.kinds:
        return []
    with canvas() as (figure, axes):
        for index, kind in enumerate(run.kinds):
            rows = run.evaluations(kind)
            rounds = [row["evaluated-after-round"] for row in rows]
            few = {"marker": MARKERS[index], "markevery": max(1, len(rounds) // 12)} if len(rounds) <= 60 else {}
            for name, dashes in (("mean", "-"), ("worst-10%", "--")):
                if name not in rows[-1]["accuracy"][kind]:  # with secure aggregation
                    continue
                values = [100 * row["accuracy"][kind][name] for row in rows]
                label = f"{kind}, {'mean' if name == 'mean' else 'worst 10 %'}"
                axes.plot(rounds, values, dashes, color=COLOURS[index], label=label, **few)
            if with_validation := [row for row in rows if kind in row.get("validation", {})]:
                values = [100 * row["validation"][kind]["mean"] for row in with_validation]
                rounds = [row["evaluated-after-round"] for row in with_validation]
                axes.plot(rounds, values, ":", color=COLOURS[index], label=f"{kind}, validation")
        if run.reference:
            _reference(axes, run.reference, run.kinds)
        dotted = (
            " Dotted: the mean on the clients' validation data." if any("validation" in row for row in run.rows) else ""
        )
        axes.set_ylabel("accuracy, %" if dotted else "test accuracy, %")
        round_axis(axes)
        legend_below(axes, 2)
        said = " and ".join(f"“{kind}” by {MEANING[kind]}" for kind in run.kinds)
        worst = "" if run.hides_clients else "; dashed: the mean of the worst tenth of the clients"
        caption = (
            f"Test accuracy over the clients: {said}. Solid: the mean{worst}. "
            "Measured with what the clients received, after the round that stands below."
        )
        caption += dotted
        caption += f" Grey: the mean of {run.reference.name} ({run.reference.title})." if run.reference else ""
        return [draw(figure, "accuracy-curves", "Mean and worst clients", caption)]


def _reference(axes: Any, other: Run, kinds: list[str]) -> None:
    """The mean curves of another run, in the ways to predict that both have."""
    for index, kind in enumerate(kind for kind in other.kinds if kind in kinds):
        rows = other.evaluations(kind)
        rounds, values = [row["evaluated-after-round"] for row in rows], [row["accuracy"][kind]["mean"] for row in rows]
        label = f"{kind}, other run"
        axes.plot(rounds, 100 * np.array(values), ("-", "--")[index], color="#888888", label=label, zorder=1)


def of_domains(run: Run) -> list[Drawing]:
    """The mean over each domain's clients."""
    if not run.domains or not run.better or run.hides_clients:
        return []
    rows = run.evaluations(run.better)
    rounds = [row["evaluated-after-round"] for row in rows]
    with canvas() as (figure, axes):
        of_domains = {
            domain: [finite_mean(np.array([_accuracy(row, site, run.better) for site in sites])) for row in rows]
            for domain, sites in run.domains.items()
        }
        plot_lines(axes, rounds, of_domains.items())
        axes.set_ylabel(f"test accuracy ({run.better}), %")
        round_axis(axes)
        legend_below(axes, 3)
        caption = f"Mean test accuracy over the clients of each domain, by {MEANING[run.better]}."
        return [draw(figure, "accuracy-of-domains", "By domain", caption)]


def of_clients(run: Run) -> list[Drawing]:
    """A row per client, a column per evaluation."""
    found = []
    sites = [] if run.hides_clients else list(run.sites)[:MOST_ROWS]
    shown = f" The first {len(sites)} of {len(run.sites)} clients." if len(sites) < len(run.sites) else ""
    for kind in run.kinds if sites else ():
        rows = run.evaluations(kind)
        values = np.array([[_accuracy(row, site, kind) for row in rows] for site in sites])
        rounds = [row["evaluated-after-round"] for row in rows]
        caption = (
            f"Test accuracy of every client by {MEANING[kind]}; the lighter, the better. "
            f"Blank: not evaluated then.{shown}"
        )
        title, unit = f"Every client ({kind})", "test accuracy, %"
        found.append(_heat_map(f"accuracy-of-clients-{kind}", title, caption, unit, sites, rounds, values))
    return found


def _heat_map(
    name: str, title: str, caption: str, unit: str, names: list[str], rounds: list[int], percent_NR: Floats
) -> Drawing:
    with canvas(WIDTH, min(max(HEIGHT, 1.2 + 0.17 * len(names)), 8.0)) as (figure, axes):
        image = axes.imshow(percent_NR, aspect="auto", interpolation="none", cmap="cividis", vmin=0, vmax=100)
        axes.grid(False)
        chosen, shown = some_ticks(names, 30, 12)
        axes.set_yticks(chosen, shown, fontsize=8)
        round_columns(axes, rounds)
        figure.colorbar(image, ax=axes, label=unit, pad=0.02)
        rows = zip(names, percent_NR.round(2).tolist(), strict=True)
        columns = {"after round": rounds} | {f"{name} ({unit})": values for name, values in rows}
        return draw(figure, name, title, caption, columns=columns)


def metrics(run: Run) -> list[Drawing]:
    """A line for each metric that the run asked for beside accuracy; and the recall of each class."""
    rows = [row for row in run.rows if row.get("metrics")]
    rounds = [row["evaluated-after-round"] for row in rows]
    names = dict.fromkeys(name for row in rows for name in row["metrics"])
    values = {name: [row["metrics"].get(name, {}).get("mean", math.nan) for row in rows] for name in names}
    found = []
    if others := [name for name in names if f"/{RECALL}/" not in name]:
        with canvas() as (figure, axes):
            plot_lines(axes, rounds, ((name, values[name]) for name in others))
            axes.set_ylabel("mean over the clients")
            round_axis(axes)
            legend_below(axes, 2)
            caption = "Metrics that the run asked for: means over the clients."
            found.append(draw(figure, "metrics", "Other metrics", caption))
    first = f"{run.better}/{RECALL}/"
    if of_class := {int(name.removeprefix(first)): name for name in names if name.startswith(first)}:
        classes = [run.class_name(label) for label in sorted(of_class)]
        recalls = 100 * np.array([values[of_class[label]] for label in sorted(of_class)])
        caption = f"Recall of each class by {MEANING[run.better]}: the mean over the clients with test samples of it."
        found.append(_heat_map("recall", "Recall of each class", caption, "recall, %", classes, rounds, recalls))
    return found


def losses(run: Run) -> list[Drawing]:
    """The clients' loss and its terms, and the server's where it trains."""
    rows = [row for row in run.rounds if row["losses"]]
    if not rows:
        return []
    rounds = [row["round"] for row in rows]
    lines = {
        name: [row["losses"].get(name, math.nan) for row in rows]
        for name in dict.fromkeys(name for row in rows for name in row["losses"])
    }
    if list(lines) == ["total", "cross-entropy"]:  # the same numbers twice
        del lines["total"]
    if any("server-loss" in row.get("server", {}) for row in rows):
        lines["server's loss"] = [row.get("server", {}).get("server-loss", math.nan) for row in rows]
    with canvas() as (figure, axes):
        plot_lines(axes, rounds, lines.items())
        there = [value for values in lines.values() for value in values if value > 0]
        if there and max(there) > 50 * min(there):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")  # the default is a formula, which our figures do not typeset
            axes.yaxis.set_minor_formatter("")
        axes.set_ylabel("loss")
        round_axis(axes, "round")
        legend_below(axes, 3)
        caption = "Mean training loss over the clients' samples in each round, and the terms that it is the sum of."
        return [draw(figure, "losses", "Training losses", caption)]


def _accuracy(row: RoundRow, site: str, kind: str) -> float:
    """In percent; NaN where the client did not tell."""
    return 100.0 * row["clients"][site]["accuracy"].get(kind, math.nan) if site in row["clients"] else math.nan

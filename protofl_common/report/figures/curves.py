"""Figures over the rounds: accuracies of the mean, the worst and every client, losses, time, privacy spent."""

import math
import statistics
from collections.abc import Iterable, Iterator

import numpy as np

from protofl_common.report.figures import drawing as plot
from protofl_common.report.reading import RecordedRun
from protofl_common.runs.evaluation_metrics import RECALL
from protofl_common.runs.folder import RoundRow

MEANING = {"head": "the classifier", "prototype": "the nearest prototype"}
MOST_ROWS = 200  # clients of a heat map; with more it shows the first ones


def means(run: RecordedRun) -> Iterator[plot.Drawing]:
    if not (rows := [row for row in run.rows if row["accuracy"]]):
        return
    lines = {}
    for kind in run.last:
        for name, label in (("mean", "mean"), ("worst-10%", "worst 10 %")):
            if name in run.last[kind]["accuracy"][kind]:  # with secure aggregation there is only a mean
                lines[f"{kind}, {label}"] = _percents(row["accuracy"].get(kind, {}).get(name) for row in rows)
        if any(kind in row.get("validation", {}) for row in rows):
            validation = (row.get("validation", {}).get(kind, {}).get("mean") for row in rows)
            lines[f"{kind}, validation"] = _percents(validation)
    ways = " and ".join(f"“{kind}” by {MEANING[kind]}" for kind in run.last)
    worst = "" if run.hides_clients else ", and that of the worst tenth"
    measured = "Measured with what the clients received, after the round that stands below."
    caption = f"Test accuracy over the clients, {ways}: the mean{worst}. {measured}"
    caption += " Validation: the mean on their validation data." if any("validation" in row for row in rows) else ""
    title, unit = "Mean and worst clients", "test accuracy, %"
    yield plot.line_chart("accuracy-curves", title, caption, _rounds(rows), lines, unit)


def _percents(shares: Iterable[float | None]) -> list[float]:
    return [math.nan if share is None else 100 * share for share in shares]


def of_domains(run: RecordedRun) -> Iterator[plot.Drawing]:
    if run.domains and run.better and not run.hides_clients:
        rows = run.evaluations(run.better)
        lines = {
            domain: [float(np.nanmean([_accuracy(row, site, run.better) for site in sites])) for row in rows]
            for domain, sites in run.domains.items()
        }
        caption = f"Mean test accuracy over the clients of each domain, by {MEANING[run.better]}."
        unit = f"test accuracy ({run.better}), %"
        yield plot.line_chart("accuracy-of-domains", "By domain", caption, _rounds(rows), lines, unit)


def of_clients(run: RecordedRun) -> Iterator[plot.Drawing]:
    sites = [] if run.hides_clients else list(run.sites)[:MOST_ROWS]
    shown = f" The first {len(sites)} of {len(run.sites)} clients." if len(sites) < len(run.sites) else ""
    for kind in run.last if sites else ():
        rows = run.evaluations(kind)
        values = np.array([[_accuracy(row, site, kind) for row in rows] for site in sites])
        caption = (
            f"Test accuracy of every client by {MEANING[kind]}; the lighter, the better. "
            f"Blank: not evaluated then.{shown}"
        )
        name, title = f"accuracy-of-clients-{kind}", f"Every client ({kind})"
        yield plot.heat_map(name, title, caption, values, sites, _rounds(rows), "test accuracy, %", "after round")


def metrics(run: RecordedRun) -> Iterator[plot.Drawing]:
    rows = [row for row in run.rows if row.get("metrics")]
    names = dict.fromkeys(name for row in rows for name in row["metrics"])
    values = {name: [row["metrics"].get(name, {}).get("mean", math.nan) for row in rows] for name in names}
    if others := {name: values[name] for name in names if f"/{RECALL}/" not in name}:
        caption, unit = "Metrics beside accuracy: means over the clients.", "mean over the clients"
        yield plot.line_chart("metrics", "Other metrics", caption, _rounds(rows), others, unit)
    first = f"{run.better}/{RECALL}/"
    if labels := sorted(int(name.removeprefix(first)) for name in names if name.startswith(first)):
        recalls = 100 * np.array([values[f"{first}{label}"] for label in labels])
        caption = f"Recall of each class by {MEANING[run.better]}: the mean over the clients with test samples of it."
        classes = [run.class_name(label) for label in labels]
        name, title = "recall", "Recall of each class"
        yield plot.heat_map(name, title, caption, recalls, classes, _rounds(rows), "recall, %", "after round")


def losses(run: RecordedRun) -> Iterator[plot.Drawing]:
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
        yield plot.line_chart("losses", "Training losses", caption, rounds, lines, "loss", "round")


def numbers(run: RecordedRun) -> Iterator[plot.Drawing]:
    rows = [row for row in run.rounds if any("prototypes-of-classes" in client for client in row["clients"].values())]
    if len(rows) < 2:
        return
    few = {site: [site] for site in run.sites} if len(run.sites) <= 8 else {"all clients": [*run.sites]}
    lines = {name: [_mean_number(row, sites) for row in rows] for name, sites in (run.domains or few).items()}
    caption = (
        "Average number of local prototypes per class that a client sends, by domain (FedPLVM, Figure 9). "
        "Clustering finds more of them where a class looks more varied."
    )
    title, unit = "Prototypes per class over the rounds", "prototypes per class"
    rounds = [row["round"] for row in rows]
    yield plot.line_chart("prototype-numbers", title, caption, rounds, lines, unit)


def _mean_number(row: RoundRow, sites: Iterable[str]) -> float:
    """The mean over the classes that clients have prototypes of."""
    clients = [row["clients"][site] for site in sites if site in row["clients"]]
    numbers = [number for client in clients for number in client.get("prototypes-of-classes", []) if number]
    return statistics.fmean(numbers) if numbers else math.nan


def time(run: RecordedRun) -> Iterator[plot.Drawing]:
    """A round as the server sees it; and a client's part of it, by phase."""
    if rows := [row for row in run.rounds if row["seconds"].get("clients") and row["valid"]]:
        phases = dict.fromkeys(phase for row in rows for phase in row["seconds"]["clients"])
        lines = {"whole round": [row["seconds"].get("total", math.nan) for row in rows]}
        lines["merging"] = [row["seconds"].get("aggregate", math.nan) for row in rows]
        lines |= {
            f"client: {phase}": [row["seconds"]["clients"].get(phase, 0.0) / row["valid"] for row in rows]
            for phase in phases
        }
        caption = (
            "A round as the server sees it, with the clients' work, which may take turns on one machine; the server's "
            "own merging; and the phases of a client's part, in the mean over the clients."
        )
        rounds = [row["round"] for row in rows]
        yield plot.line_chart("time-of-a-round", "Time of a round", caption, rounds, lines, "seconds", "round")


def spent(run: RecordedRun) -> Iterator[plot.Drawing]:
    after = {row["round"]: row["epsilon"] for row in run.rounds if "epsilon" in row}
    if rows := [row for row in run.rows if row["accuracy"] and row["evaluated-after-round"] in after]:
        shares = {kind: [row["accuracy"].get(kind, {}).get("mean") for row in rows] for kind in run.last}
        lines = {f"{kind}, mean": _percents(of_kind) for kind, of_kind in shares.items()}
        epsilons = [after[row["evaluated-after-round"]] for row in rows]
        caption = (
            "What each evaluation's model has cost: ε of the client that the run costs most, as if it took part in "
            "every round. With a budget for all rounds, fewer rounds need less noise: the curve is no forecast "
            "of a run with a smaller budget."
        )
        name, title = "accuracy-against-epsilon", "Accuracy for privacy spent"
        yield plot.line_chart(name, title, caption, epsilons, lines, "test accuracy, %", "ε spent")


def _rounds(rows: list[RoundRow]) -> list[int]:
    return [row["evaluated-after-round"] for row in rows]


def _accuracy(row: RoundRow, site: str, kind: str) -> float:
    """In percent; NaN where the client did not tell."""
    return 100.0 * row["clients"][site]["accuracy"].get(kind, math.nan) if site in row["clients"] else math.nan

"""The pictures of the page: each function takes the run and yields its drawings.

The captions say what each shows. A t-SNE (van der Maaten and Hinton, 2008) has few enough points, at random, that the
page is drawn in seconds; all is seeded. So few points as a t-SNE says nothing of lie by their principal components.
"""

import math
import statistics
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from markupsafe import Markup

from protofl_common.report import drawing as plot
from protofl_common.report.reading import Floats, Ints, RecordedRun
from protofl_common.runs.evaluation_metrics import RECALL
from protofl_common.runs.folder import RoundRow
from protofl_common.runs.over_clients import figures_of

MEANING = {"head": "the classifier", "prototype": "the nearest prototype"}
CLASS_COLOURS = np.array([*plot.COLOURS[:6], "#C9B400", "#7F7F7F", "#8C510A", "#7E5BBF"])
MOST_ROWS, MOST_CLIENTS = 200, 100  # clients of a heat map over rounds, and over classes; with more the first ones
FEW_POINTS, MOST_POINTS = 50, 500  # of a t-SNE, which takes a second, and two to import
NAMED_CLASSES = 40  # with more classes the global prototypes carry no names
SEED = 0


def means(run: RecordedRun) -> Iterator[Markup]:
    if not (rows := [row for row in run.rows if row["accuracy"]]):
        return
    lines = {}
    for kind in run.last:
        for part, label in (("mean", "mean"), ("worst-10%", "worst 10 %")):
            if part in run.last[kind]["accuracy"][kind]:  # with secure aggregation there is only a mean
                lines[f"{kind}, {label}"] = _over_rounds(rows, kind, part)
        if any(kind in row.get("validation", {}) for row in rows):
            lines[f"{kind}, validation"] = _over_rounds(rows, f"validation/{kind}")
    ways = " and ".join(f"“{kind}” by {MEANING[kind]}" for kind in run.last)
    worst = "" if run.hides_clients else ", and that of the worst tenth"
    measured = "Measured with what the clients received, after the round on the horizontal axis."
    caption = f"Test accuracy over {run.whose}, {ways}: the mean{worst}. {measured}"
    caption += " Points are not all of the same clients." * (len({frozenset(row["clients"]) for row in rows}) > 1)
    caption += " Validation: the mean on their validation data." if any("validation" in row for row in rows) else ""
    title, unit = "Mean and worst clients", "test accuracy, %"
    yield plot.line_chart("accuracy-curves", title, caption, _rounds(rows), lines, unit)


def _over_rounds(rows: list[RoundRow], name: str, part: str = "mean", factor: int = 100) -> list[float]:
    """In percent by default; NaN where a row has no such figure."""
    return [factor * figures_of(row).get(name, {}).get(part, math.nan) for row in rows]


def of_domains(run: RecordedRun) -> Iterator[Markup]:
    if run.domains and run.better and not run.hides_clients:
        rows = run.evaluations(run.better)
        lines = {
            domain: [float(np.nanmean([_accuracy(row, site, run.better) for site in sites])) for row in rows]
            for domain, sites in run.domains.items()
        }
        caption = f"Mean test accuracy over the clients of each domain, by {MEANING[run.better]}."
        unit = f"test accuracy ({run.better}), %"
        yield plot.line_chart("accuracy-of-domains", "By domain", caption, _rounds(rows), lines, unit)


def of_clients(run: RecordedRun) -> Iterator[Markup]:
    sites = [] if run.hides_clients else list(run.sites)[:MOST_ROWS]
    shown = f" The first {len(sites)} of {len(run.sites)} clients." if len(sites) < len(run.sites) else ""
    for kind in run.last if sites else ():
        rows = run.evaluations(kind)
        values = np.array([[_accuracy(row, site, kind) for row in rows] for site in sites])
        caption = f"Test accuracy of each client by {MEANING[kind]}; lighter is better. Blank: not evaluated.{shown}"
        name, title = f"accuracy-of-clients-{kind}", f"Every client ({kind})"
        yield plot.heat_map(name, title, caption, values, sites, _rounds(rows), "test accuracy, %", "after round")


def metrics(run: RecordedRun) -> Iterator[Markup]:
    rows = [row for row in run.rows if row.get("metrics")]
    names = dict.fromkeys(name for row in rows for name in row["metrics"])
    values = {name: _over_rounds(rows, name, factor=1) for name in names}
    if others := {name: values[name] for name in names if f"/{RECALL}/" not in name}:
        caption, unit = f"Metrics beside accuracy: means over {run.whose}.", f"mean over {run.whose}"
        yield plot.line_chart("metrics", "Other metrics", caption, _rounds(rows), others, unit)
    first = f"{run.better}/{RECALL}/"
    if labels := sorted(int(name.removeprefix(first)) for name in names if name.startswith(first)):
        recalls = 100 * np.array([values[f"{first}{label}"] for label in labels])
        caption = f"Recall of each class by {MEANING[run.better]}: the mean over the clients with test samples of it."
        classes = [run.class_name(label) for label in labels]
        name, title = "recall", "Recall of each class"
        yield plot.heat_map(name, title, caption, recalls, classes, _rounds(rows), "recall, %", "after round")


def losses(run: RecordedRun) -> Iterator[Markup]:
    rows = [row for row in run.rounds if row["losses"]]
    names = dict.fromkeys(name for row in rows for name in row["losses"])
    if {*names} == {"total", "cross-entropy"}:  # the same numbers twice
        del names["total"]
    lines = {name: [row["losses"].get(name, math.nan) for row in rows] for name in names}
    if any("server-loss" in row.get("server", {}) for row in rows):
        lines["server's loss"] = [row.get("server", {}).get("server-loss", math.nan) for row in rows]
    if rows:
        caption = "Mean training loss over the clients' samples in each round, and the terms of which it is the sum."
        rounds = [row["round"] for row in rows]
        yield plot.line_chart("losses", "Training losses", caption, rounds, lines, "loss", "round")


def samples(run: RecordedRun) -> Iterator[Markup]:
    if sites := [site for site, facts in run.sites.items() if facts.get("train-classes")][:MOST_CLIENTS]:
        counts_CS = np.array([run.sites[site]["train-classes"] for site in sites], dtype=np.float64).T
        names = [run.class_name(label) for label in range(len(counts_CS))]
        left_out = f" {len(run.sites) - len(sites)} clients are not shown." if len(sites) < len(run.sites) else ""
        caption = f"Training samples of each client and class; blank: none (FedTGP, Figures 7 to 11).{left_out}"
        counts_CS[counts_CS == 0] = np.nan
        name, title = "distribution", "Training samples of each class"
        yield plot.heat_map(name, title, caption, counts_CS, names, sites, "training samples", "client")


def margins(run: RecordedRun) -> Iterator[Markup]:
    """Averaging shrinks margins, trained prototypes keep them. The paper normalises those of each method; not here."""
    clients_SC = np.array([*run.margins[-1]["clients"].values()] if run.margins else [], dtype=np.float64)
    if not np.isfinite(clients_SC).any():
        return
    last = run.margins[-1]
    names = [run.class_name(label) for label in range(clients_SC.shape[1])]
    global_C = np.array(last["global"] or [None] * len(names), dtype=np.float64)
    values_RC = np.stack([global_C, np.nanmax(clients_SC, axis=0), *clients_SC[:MOST_CLIENTS]])
    rows = ["global", "largest", *list(last["clients"])[:MOST_CLIENTS]]
    caption = (
        f"After round {last['round']}: the distance from a class's prototype to the nearest of another class, among "
        "the global prototypes and each client's (FedTGP, Figure 1). The second row has each class's largest margin "
        "at any client; where the first is darker, merging has moved the classes together."
    )
    name, title, unit = "margins-by-class", "Prototype margins by class", "margin (Euclidean)"
    yield plot.heat_map(name, title, caption, values_RC, rows, names, unit, "class")


def prototypes(run: RecordedRun) -> Iterator[Markup]:
    own, merged = run.client_prototypes, run.global_prototypes
    if own is None or merged is None or len(own.labels) + len(merged.labels) < 5:
        return
    if own.values.shape[1] != merged.values.shape[1]:
        return
    chosen = _chosen(merged.labels, MOST_POINTS // 3)
    shown = _chosen(own.labels, MOST_POINTS - len(chosen))
    labels, merged_labels = own.labels[shown], merged.labels[chosen]
    places, method = _map(np.concatenate([own.values[shown], merged.values[chosen]]))
    some = f" {len(shown)} of {len(own.labels)} client prototypes." if len(shown) < len(own.labels) else ""
    caption = (
        f"{method} of the prototypes after round {own.round} (FedTGP, Figure 5): a circle "
        f"for each client and class, a triangle for each global prototype, coloured and named by class.{some}"
    )
    with plot.canvas(plot.WIDTH, 4.3) as (figure, axes):
        clients, server = places[: len(shown)], places[len(shown) :]
        colours, merged_colours = (CLASS_COLOURS.take(each, mode="wrap") for each in (labels, merged_labels))
        axes.scatter(*clients.T, s=16, c=colours, alpha=0.75, linewidths=0, label="client prototypes")
        look = {"marker": "^", "edgecolors": plot.INK, "linewidths": 0.9, "label": "global ones"}
        axes.scatter(*server.T, s=60, c=merged_colours, **look)
        _name_classes(run, axes, server, merged_labels)
        figure.legend(loc="outside lower center", ncols=2)
        yield plot.draw(figure, "prototypes-map", "Prototypes of clients and server", caption)


def _map(values_ND: Floats) -> tuple[Floats, str]:
    """The places [N, 2] of vectors, and the method, which begins the caption."""
    if len(values_ND) < FEW_POINTS:
        centred_ND = values_ND - values_ND.mean(axis=0)
        places = centred_ND @ np.linalg.svd(centred_ND, full_matrices=False)[2][:2].T
        return np.pad(places, ((0, 0), (0, 2 - places.shape[1]))), "The first two principal components"
    from sklearn.manifold import TSNE

    perplexity, start = min(30.0, (len(values_ND) - 1) / 3), "pca" if values_ND.shape[1] > 1 else "random"
    spread = float(np.abs(values_ND).max()) or 1.0
    method = TSNE(perplexity=perplexity, init=start, max_iter=500, random_state=SEED)
    return np.asarray(method.fit_transform((values_ND / spread).astype(np.float32))), "t-SNE"


def _chosen(labels: Ints, most: int) -> Ints:
    return np.sort(np.random.default_rng(SEED).choice(len(labels), min(most, len(labels)), replace=False))


def _name_classes(run: RecordedRun, axes: Any, places: Floats, labels: Ints) -> None:
    """Each class's name once, beside its first place; distances in the map have no unit, so its axes carry none."""
    present = np.unique(labels).tolist()
    for label in present if len(present) <= NAMED_CLASSES else ():
        look: dict[str, Any] = {"xytext": (5, 4), "textcoords": "offset points", "fontsize": 10, "weight": "bold"}
        name = axes.annotate(plot.short(run.class_name(label)), places[labels == label][0], **look)
        name.set_gid(f"class-name-{label}")  # the page gives it a rim
    axes.set(xticks=[], yticks=[])
    axes.margins(0.08)
    axes.spines[:].set_visible(False)


def numbers(run: RecordedRun) -> Iterator[Markup]:
    rows = [row for row in run.rounds if any("prototypes-of-classes" in client for client in row["clients"].values())]
    if len(rows) < 2:
        return
    few = {site: [site] for site in run.sites} if len(run.sites) <= 8 else {"all clients": [*run.sites]}
    lines = {name: list[float]() for name in run.domains or few}
    for row, (name, sites) in product(rows, (run.domains or few).items()):
        clients = [row["clients"][site] for site in sites if site in row["clients"]]
        of_classes = [number for client in clients for number in client.get("prototypes-of-classes", []) if number]
        lines[name].append(statistics.fmean(of_classes) if of_classes else math.nan)
    caption = (
        "Average number of local prototypes per class that a client sends, by domain (FedPLVM, Figure 9). "
        "Clustering finds more of them where a class looks more varied."
    )
    title, unit = "Prototypes per class over the rounds", "prototypes per class"
    yield plot.line_chart("prototype-numbers", title, caption, [row["round"] for row in rows], lines, unit)


def time(run: RecordedRun) -> Iterator[Markup]:
    if rows := [row for row in run.rounds if row["seconds"].get("clients") and row["valid"]]:
        lines = {"whole round": [row["seconds"].get("total", math.nan) for row in rows]}
        lines["merging"] = [row["seconds"].get("aggregate", math.nan) for row in rows]
        lines |= {
            f"client: {phase}": [row["seconds"]["clients"].get(phase, math.nan) / row["valid"] for row in rows]
            for phase in dict.fromkeys(phase for row in rows for phase in row["seconds"]["clients"])
        }
        caption = (
            "The whole round as the server sees it, in which clients on one machine may take turns; the server's own "
            "merging; and each phase of a client's work, averaged over the clients."
        )
        rounds = [row["round"] for row in rows]
        yield plot.line_chart("time-of-a-round", "Time of a round", caption, rounds, lines, "seconds", "round")


def spent(run: RecordedRun) -> Iterator[Markup]:
    after = {row["round"]: row["epsilon"] for row in run.rounds if "epsilon" in row}
    if rows := [row for row in run.rows if row["accuracy"] and row["evaluated-after-round"] in after]:
        lines = {f"{kind}, mean": _over_rounds(rows, kind) for kind in run.last}
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

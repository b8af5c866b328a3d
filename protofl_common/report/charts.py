"""The pictures of the page: each function takes the run and yields its drawings.

The captions say what each shows. A t-SNE (van der Maaten and Hinton, 2008) has few enough points,
at random, that the page is drawn in seconds; all is seeded. So few points as a t-SNE says nothing
of lie by their principal components.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from protofl_common.config.sections import PER_UNIT
from protofl_common.report import drawing as plot
from protofl_common.report.reading import Floats, Ints, RecordedRun
from protofl_common.runs.folder import RoundRow
from protofl_common.runs.over_clients import figures_of
from protofl_common.tasks.metrics import BY_CLASS, LABEL_AUC, RECALL

MEANING = {"head": "the classifier", "prototype": "the nearest prototype"}
CLASS_COLOURS = np.array([*plot.COLOURS[:6], "#C9B400", "#7F7F7F", "#8C510A", "#7E5BBF"])
MOST_ROWS = 200  # clients of a heat map over rounds; with more the first ones
MOST_CLIENTS = 100  # clients of a heat map over classes; with more the first ones
FEW_POINTS = 50  # fewer are not worth a t-SNE, which takes a second, and two to import
MOST_POINTS = 500  # of a t-SNE
NAMED_CLASSES = 40  # with more classes the global prototypes carry no names
SEED = 0


def means(run: RecordedRun) -> Iterator[Markup]:
    rows = [row for row in run.rows if row["accuracy"]]
    if not rows:
        return
    lines = {}
    for kind in run.last:
        for part, label in (("mean", "mean"), ("worst-10%", "worst 10 %")):
            if (
                part in run.last[kind]["accuracy"][kind]
            ):  # with secure aggregation there is only a mean
                lines[f"{kind}, {label}"] = _over_rounds(rows, kind, part)
        if any(kind in row.get("validation", {}) for row in rows):
            lines[f"{kind}, validation"] = _over_rounds(rows, f"validation/{kind}")

    ways = " and ".join(f"“{kind}” by {MEANING[kind]}" for kind in run.last)
    worst = "" if run.hides_clients else ", and that of the worst tenth"
    caption = (
        f"Test accuracy over {run.whose}, {ways}: the mean{worst}. Measured with what the clients "
        "received, after the round on the horizontal axis."
    )
    if len({frozenset(row["clients"]) for row in rows}) > 1:
        caption += " Points are not all of the same clients."
    if any("validation" in row for row in rows):
        caption += " Validation: the mean on their validation data."
    yield plot.line_chart(
        "accuracy-curves",
        "Mean and worst clients",
        caption,
        _rounds(rows),
        lines,
        "test accuracy, %",
    )


def _over_rounds(
    rows: list[RoundRow], name: str, part: str = "mean", factor: int = 100
) -> list[float]:
    """Return a figure of each row, in percent by default; NaN where a row has no such figure."""
    return [factor * figures_of(row).get(name, {}).get(part, math.nan) for row in rows]


def of_domains(run: RecordedRun) -> Iterator[Markup]:
    if not run.domains or not run.better or run.hides_clients:
        return
    rows = run.evaluations(run.better)
    lines = {}
    for domain, sites in run.domains.items():
        accuracies_RS = np.array(
            [[_accuracy(row, site, run.better) for site in sites] for row in rows]
        )
        lines[domain] = [float(np.nanmean(of_row)) for of_row in accuracies_RS]
    yield plot.line_chart(
        "accuracy-of-domains",
        "By domain",
        f"Mean test accuracy over the clients of each domain, by {MEANING[run.better]}.",
        _rounds(rows),
        lines,
        f"test accuracy ({run.better}), %",
    )


def of_clients(run: RecordedRun) -> Iterator[Markup]:
    if run.hides_clients or not run.sites:
        return
    sites = list(run.sites)[:MOST_ROWS]
    shown = ""
    if len(sites) < len(run.sites):
        shown = f" The first {len(sites)} of {len(run.sites)} clients."
    for kind in run.last:
        rows = run.evaluations(kind)
        values_SR = np.array([[_accuracy(row, site, kind) for row in rows] for site in sites])
        yield plot.heat_map(
            f"accuracy-of-clients-{kind}",
            f"Every client ({kind})",
            f"Test accuracy of each client by {MEANING[kind]}; lighter is better. Blank: not "
            f"evaluated.{shown}",
            values_SR,
            sites,
            _rounds(rows),
            "test accuracy, %",
            "after round",
        )


def metrics(run: RecordedRun) -> Iterator[Markup]:
    rows = [row for row in run.rows if row.get("metrics")]
    values: dict[str, list[float]] = {}
    for row in rows:
        for name in row["metrics"]:
            if name not in values:
                values[name] = _over_rounds(rows, name, factor=1)

    others = {}
    for name, line in values.items():
        if not any(f"/{metric}/" in name for metric in BY_CLASS):
            others[name] = line
    if others:
        yield plot.line_chart(
            "metrics",
            "Other metrics",
            f"Metrics beside accuracy: means over {run.whose}.",
            _rounds(rows),
            others,
            f"mean over {run.whose}",
        )

    for metric, words in {RECALL: "Recall of each class", LABEL_AUC: "AUC of each label"}.items():
        first = f"{run.better}/{metric}/"
        labels = sorted(int(name.removeprefix(first)) for name in values if name.startswith(first))
        if not labels:
            continue
        yield plot.heat_map(
            metric,
            words,
            f"{words} by {MEANING[run.better]}: the mean over the clients with test samples of it.",
            100 * np.array([values[f"{first}{label}"] for label in labels]),
            [run.class_name(label) for label in labels],
            _rounds(rows),
            f"{words.split()[0]}, %",
            "after round",
        )


def losses(run: RecordedRun) -> Iterator[Markup]:
    rows = [row for row in run.rounds if row["losses"]]
    if not rows:
        return
    names = _in_any(row["losses"] for row in rows)
    if set(names) == {"total", "cross-entropy"}:  # the same numbers twice
        names.remove("total")
    lines = {name: [row["losses"].get(name, math.nan) for row in rows] for name in names}
    of_server = [row.get("server", {}) for row in rows]
    if "server-loss" in _in_any(of_server):
        lines["server's loss"] = [figures.get("server-loss", math.nan) for figures in of_server]
    yield plot.line_chart(
        "losses",
        "Training losses",
        "Mean training loss over the clients' samples in each round, and the terms of which it is "
        "the sum.",
        [row["round"] for row in rows],
        lines,
        "loss",
        "round",
    )


def _in_any(figures: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the names that occur in any row, in the order in which they first do."""
    return list(dict.fromkeys(name for of_row in figures for name in of_row))


def samples(run: RecordedRun) -> Iterator[Markup]:
    counted = [site for site, facts in run.sites.items() if facts.get("train-classes")]
    sites = counted[:MOST_CLIENTS]
    if not sites:
        return
    left_out = ""
    if len(sites) < len(run.sites):
        left_out = f" {len(run.sites) - len(sites)} clients are not shown."
    counts_CS = np.array([run.sites[site]["train-classes"] for site in sites], dtype=np.float64).T
    counts_CS[counts_CS == 0] = np.nan
    yield plot.heat_map(
        "distribution",
        "Training samples of each class",
        "Training samples of each client and class; blank: none (FedTGP, Figures 7 to 11)."
        f"{left_out}",
        counts_CS,
        [run.class_name(label) for label in range(len(counts_CS))],
        sites,
        "training samples",
        "client",
    )


def margins(run: RecordedRun) -> Iterator[Markup]:
    """Draw the margins of classes: averaging shrinks them, trained prototypes keep them.

    The paper normalises the margins of each method; not here.
    """
    if not run.margins:
        return
    last = run.margins[-1]
    clients_SC = np.array([*last["clients"].values()], dtype=np.float64)
    if not np.isfinite(clients_SC).any():
        return
    classes = clients_SC.shape[1]
    global_C = np.array(last["global"] or [None] * classes, dtype=np.float64)
    largest_C = np.nanmax(clients_SC, axis=0)
    caption = (
        f"After round {last['round']}: the distance from a class's prototype to the nearest of "
        "another class, among the global prototypes and each client's (FedTGP, Figure 1). The "
        "second row has each class's largest margin at any client; where the first is darker, "
        "merging has moved the classes together."
    )
    yield plot.heat_map(
        "margins-by-class",
        "Prototype margins by class",
        caption,
        np.stack([global_C, largest_C, *clients_SC[:MOST_CLIENTS]]),
        ["global", "largest", *list(last["clients"])[:MOST_CLIENTS]],
        [run.class_name(label) for label in range(classes)],
        "margin (Euclidean)",
        "class",
    )


def prototypes(run: RecordedRun) -> Iterator[Markup]:
    """Draw the prototypes of the clients and of the server as points of one map."""
    own = run.client_prototypes
    merged = run.global_prototypes
    # a map of fewer than five points shows nothing
    if own is None or merged is None or len(own.labels) + len(merged.labels) < 5:
        return
    if own.values.shape[1] != merged.values.shape[1]:  # vectors of two spaces have no common map
        return

    # the server's get a third of the points at most, so that many clients cannot crowd them out,
    # nor they the clients'
    of_server = _chosen(merged.labels, MOST_POINTS // 3)
    of_clients = _chosen(own.labels, MOST_POINTS - len(of_server))
    labels = own.labels[of_clients]
    merged_labels = merged.labels[of_server]
    places, method = _map(np.concatenate([own.values[of_clients], merged.values[of_server]]))
    clients = places[: len(labels)]
    server = places[len(labels) :]

    shown = ""
    if len(labels) < len(own.labels):
        shown = f" {len(labels)} of {len(own.labels)} client prototypes."
    caption = (
        f"{method} of the prototypes after round {own.round} (FedTGP, Figure 5): a circle "
        f"for each client and class, a triangle for each global prototype, coloured and named by "
        f"class.{shown}"
    )
    with plot.canvas(plot.WIDTH, 4.3) as (figure, axes):
        colours = CLASS_COLOURS.take(labels, mode="wrap")
        merged_colours = CLASS_COLOURS.take(merged_labels, mode="wrap")
        look = {"alpha": 0.75, "linewidths": 0, "label": "client prototypes"}
        axes.scatter(*clients.T, s=16, c=colours, **look)
        look = {"marker": "^", "edgecolors": plot.INK, "linewidths": 0.9, "label": "global ones"}
        axes.scatter(*server.T, s=60, c=merged_colours, **look)
        _name_classes(run, axes, server, merged_labels)
        figure.legend(loc="outside lower center", ncols=2)
        yield plot.draw(figure, "prototypes-map", "Prototypes of clients and server", caption)


def _map(values_ND: Floats) -> tuple[Floats, str]:
    """Return the places [N, 2] of vectors, and the method, which begins the caption."""
    if len(values_ND) < FEW_POINTS:
        centred_ND = values_ND - values_ND.mean(axis=0)
        directions_ND = np.linalg.svd(centred_ND, full_matrices=False)[2][:2]
        places = centred_ND @ directions_ND.T
        missing = 2 - places.shape[1]
        return np.pad(places, ((0, 0), (0, missing))), "The first two principal components"

    from sklearn.manifold import TSNE

    method = TSNE(
        perplexity=min(30.0, (len(values_ND) - 1) / 3),
        init="pca" if values_ND.shape[1] > 1 else "random",
        max_iter=500,
        random_state=SEED,
    )
    spread = float(np.abs(values_ND).max()) or 1.0
    return np.asarray(method.fit_transform((values_ND / spread).astype(np.float32))), "t-SNE"


def _chosen(labels: Ints, most: int) -> Ints:
    """Choose at most so many positions at random, in ascending order."""
    count = min(most, len(labels))
    return np.sort(np.random.default_rng(SEED).choice(len(labels), count, replace=False))


def _name_classes(run: RecordedRun, axes: Any, places: Floats, labels: Ints) -> None:
    """Write each class's name once, beside its first place.

    Distances in the map have no unit, so its axes carry none.
    """
    present = np.unique(labels).tolist()
    look: dict[str, Any] = {
        "xytext": (5, 4),
        "textcoords": "offset points",
        "fontsize": 10,
        "weight": "bold",
    }
    if len(present) <= NAMED_CLASSES:
        for label in present:
            first = places[labels == label][0]
            name = axes.annotate(plot.short(run.class_name(label)), first, **look)
            name.set_gid(f"class-name-{label}")  # the page gives it a rim
    axes.set(xticks=[], yticks=[])
    axes.margins(0.08)
    axes.spines[:].set_visible(False)


def numbers(run: RecordedRun) -> Iterator[Markup]:
    rows = [row for row in run.rounds if _counts_prototypes(row)]
    if len(rows) < 2:
        return
    groups: Mapping[str, Sequence[str]] = run.domains
    if not groups and len(run.sites) <= 8:
        groups = {site: [site] for site in run.sites}
    elif not groups:
        groups = {"all clients": [*run.sites]}
    lines = {
        name: [_prototypes_per_class(row, sites) for row in rows] for name, sites in groups.items()
    }
    yield plot.line_chart(
        "prototype-numbers",
        "Prototypes per class over the rounds",
        "Average number of local prototypes per class that a client sends, by domain (FedPLVM, "
        "Figure 9). Clustering finds more of them where a class looks more varied.",
        [row["round"] for row in rows],
        lines,
        "prototypes per class",
    )


def _counts_prototypes(row: RoundRow) -> bool:
    return any("prototypes-of-classes" in client for client in row["clients"].values())


def _prototypes_per_class(row: RoundRow, sites: Sequence[str]) -> float:
    """Return the mean over these clients and their classes; NaN where they sent none."""
    counts: list[int] = []
    for site in sites:
        if site in row["clients"]:
            counts += row["clients"][site].get("prototypes-of-classes", [])
    sent = [count for count in counts if count]
    return statistics.fmean(sent) if sent else math.nan


def time(run: RecordedRun) -> Iterator[Markup]:
    rows = [row for row in run.rounds if row["seconds"].get("clients") and row["valid"]]
    if not rows:
        return
    lines = {
        "whole round": [row["seconds"].get("total", math.nan) for row in rows],
        "merging": [row["seconds"].get("aggregate", math.nan) for row in rows],
    }
    for phase in _in_any(row["seconds"]["clients"] for row in rows):
        lines[f"client: {phase}"] = [
            row["seconds"]["clients"].get(phase, math.nan) / row["valid"] for row in rows
        ]
    caption = (
        "The whole round as the server sees it, in which clients on one machine may take turns; "
        "the server's own merging; and each phase of a client's work, averaged over the clients."
    )
    yield plot.line_chart(
        "time-of-a-round",
        "Time of a round",
        caption,
        [row["round"] for row in rows],
        lines,
        "seconds",
        "round",
    )


def spent(run: RecordedRun) -> Iterator[Markup]:
    after = {row["round"]: row["epsilon"] for row in run.rounds if "epsilon" in row}
    rows = [row for row in run.rows if row["accuracy"] and row["evaluated-after-round"] in after]
    if not rows:
        return
    caption = (
        "What each evaluation's model has cost: ε of the client that the run costs most, as if it "
        "took part in every round. With a budget for all rounds, fewer rounds need less noise: "
        "the curve is no forecast of a run with a smaller budget."
    )
    yield plot.line_chart(
        "accuracy-against-epsilon",
        "Accuracy for privacy spent",
        caption,
        [after[row["evaluated-after-round"]] for row in rows],
        {f"{kind}, mean": _over_rounds(rows, kind) for kind in run.last},
        "test accuracy, %",
        f"ε spent{PER_UNIT[str(run.settings['dp'])]}",
    )


def _rounds(rows: list[RoundRow]) -> list[int]:
    return [row["evaluated-after-round"] for row in rows]


def _accuracy(row: RoundRow, site: str, kind: str) -> float:
    """Return a client's accuracy in percent; NaN where the client did not tell."""
    if site not in row["clients"]:
        return math.nan
    return 100.0 * row["clients"][site]["accuracy"].get(kind, math.nan)

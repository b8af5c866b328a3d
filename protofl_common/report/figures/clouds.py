"""Who has which training samples (FedTGP, Figures 7 to 11); prototypes: their margins, and maps.

A map is a t-SNE (van der Maaten and Hinton, 2008; FedTGP, Figure 5) of few enough points, at random, that the
page is drawn in seconds; all is seeded. So few points as a t-SNE says nothing of lie by their principal components.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from protofl_common.report.figures import drawing as plot
from protofl_common.report.reading import Floats, Ints, RecordedRun

CLASS_COLOURS = (*plot.COLOURS[:6], "#C9B400", "#7F7F7F", "#8C510A", "#7E5BBF")
MOST_CLIENTS = 100  # of a heat map; with more it shows the first ones
FEW_POINTS, MOST_POINTS = 50, 500  # of a t-SNE, which takes a second, and two to import
NAMED_CLASSES = 40  # with more classes the global prototypes carry no names
SEED = 0


def samples(run: RecordedRun) -> Iterator[plot.Drawing]:
    if sites := [site for site, facts in run.sites.items() if facts.get("train-classes")][:MOST_CLIENTS]:
        counts_CS = np.array([run.sites[site]["train-classes"] for site in sites], dtype=np.float64).T
        names = [run.class_name(label) for label in range(len(counts_CS))]
        left_out = f" {len(run.sites) - len(sites)} clients are not shown." if len(sites) < len(run.sites) else ""
        caption = f"Training samples of each client and class; blank: none (FedTGP, Figures 7 to 11).{left_out}"
        counts_CS[counts_CS == 0] = np.nan
        name, title = "distribution", "Training samples of each class"
        yield plot.heat_map(name, title, caption, counts_CS, names, sites, "training samples", "client")


def margins(run: RecordedRun) -> Iterator[plot.Drawing]:
    """The least Euclidean distance of a class's prototype to those of other classes in the same set (FedTGP, Figure 1).

    Averaging shrinks it, trained prototypes keep it. The paper normalises the margins of each method; these are not.
    """
    clients_SC = np.array([*run.margins[-1]["clients"].values()] if run.margins else [], dtype=np.float64)
    if not np.isfinite(clients_SC).any():
        return
    last = run.margins[-1]
    names = [run.class_name(label) for label in range(clients_SC.shape[1])]
    global_C = np.array(last["global"] or [None] * len(names), dtype=np.float64)
    values_RC = np.stack([global_C, np.nanmax(clients_SC, axis=0), *clients_SC[:MOST_CLIENTS]])
    rows = ["global", "largest", *list(last["clients"])[:MOST_CLIENTS]]
    caption = (
        f"After round {last['round']}: the least distance of a class's prototype to those of the other classes, in the "
        "global set, and in each client's own (FedTGP, Figure 1). Where the first row is darker than the second, which "
        "has the largest of all clients, merging has moved the classes together."
    )
    name, title, unit = "margins-by-class", "Prototype margins by class", "margin (Euclidean)"
    yield plot.heat_map(name, title, caption, values_RC, rows, names, unit, "class")


def prototypes(run: RecordedRun) -> Iterator[plot.Drawing]:
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
        f"{method} of the prototypes{f' after round {own.round}' if own.round else ''} (FedTGP, Figure 5): a circle "
        f"for each client and class, a triangle for each global prototype, coloured and named by class.{some}"
    )
    with plot.canvas(plot.WIDTH, 4.3) as (figure, axes):
        clients, server = places[: len(shown)], places[len(shown) :]
        axes.scatter(*clients.T, s=16, c=_colours(labels), alpha=0.75, linewidths=0, label="client prototypes")
        look = {"marker": "^", "edgecolors": plot.INK, "linewidths": 0.9, "label": "global ones"}
        axes.scatter(*server.T, s=60, c=_colours(merged_labels), **look)
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
    if len(labels) <= most:
        return np.arange(len(labels))
    return np.sort(np.random.default_rng(SEED).choice(len(labels), most, replace=False))


def _colours(labels: Ints) -> list[str]:
    return [CLASS_COLOURS[label % len(CLASS_COLOURS)] for label in labels.tolist()]


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

"""Clouds of points: who has which training samples (FedTGP, Figures 7 to 11), t-SNE of prototypes.

t-SNE (van der Maaten and Hinton, 2008; FedTGP, Figure 5) takes few enough points, at random, that the page is
drawn in seconds; all is seeded.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from protofl_common.report.figures import drawing as plot
from protofl_common.report.reading import Floats, Ints, Run

CLASS_COLOURS = (*plot.COLOURS[:6], "#C9B400", "#7F7F7F", "#8C510A", "#7E5BBF")
MOST_CLIENTS = 100  # of the figure of training samples; with more it shows the first ones
MOST_POINTS = 500  # of one t-SNE, which takes a second
NAMED_CLASSES = 40  # with more classes the global prototypes carry no names
SEED = 0


def samples(run: Run) -> Iterator[plot.Drawing]:
    sites = [site for site, facts in run.sites.items() if facts.get("train-classes")][:MOST_CLIENTS]
    if not sites:
        return
    counts_SC = np.array([run.sites[site]["train-classes"] for site in sites], dtype=np.int64)
    classes, largest = counts_SC.shape[1], max(1, int(counts_SC.max()))
    names = [run.class_name(label) for label in range(classes)]
    wide = len(sites) > 12 or classes > 25
    height = min(1.4 + 0.29 * max(classes, 6), 9.0)
    with plot.canvas(11.0 if wide else plot.WIDTH, height) as (figure, axes):
        across, up = (740.0 if wide else 290.0) / len(sites), 72 * (height - 1.4) / classes
        area = max(6.0, 0.9 * min(across, up, 26.0)) ** 2  # in points², of the largest bubble
        many = int((counts_SC > 0).sum()) > plot.MANY_POINTS
        for index, (name, members) in enumerate((run.domains or {"": sites}).items()):
            rows = np.array([row for row, site in enumerate(sites) if site in members], dtype=np.int64)
            row, label = np.nonzero(counts_SC[rows])
            sizes, colour = area * counts_SC[rows][row, label] / largest, plot.COLOURS[index % len(plot.COLOURS)]
            axes.scatter(rows[row], label, s=sizes, color=colour, alpha=0.9, linewidths=0, rasterized=many)
            if name:
                axes.scatter([], [], s=60, color=colour, linewidths=0, label=plot.short(name))
        ticks, texts = plot.some_ticks(sites, 40 if wide else 12, 10)
        axes.set_xticks(ticks, texts, rotation=90 if len(sites) > 6 else 0, fontsize=9)
        axes.set_yticks(*plot.some_ticks(names, 30, 12), fontsize=9)
        axes.set(xlim=(-0.7, len(sites) - 0.3), ylim=(-0.8, classes - 0.2), ylabel="class")
        for count in (largest,) if largest < 8 else (largest // 4, largest):
            text = f"{count} sample{'s' * (count > 1)}"
            axes.scatter([], [], s=area * count / largest, color=plot.INK, linewidths=0, label=text)
        look = {"loc": "outside lower center", "labelspacing": 1.2, "borderpad": 0.8}
        figure.legend(*axes.get_legend_handles_labels(), ncols=8 if wide else 3, **look)
        left_out = f" {len(run.sites) - len(sites)} clients are not shown." if len(sites) < len(run.sites) else ""
        caption = (
            "The area of a bubble is the number of training samples that a client has of a class "
            f"(FedTGP, Figures 7 to 11).{' Colours are domains.' if run.domains else ''}{left_out}"
        )
        of_classes = zip(names, counts_SC.T.tolist(), strict=True)
        shown = {"client": sites} | {f"{name} (training samples)": counts for name, counts in of_classes}
        yield plot.draw(figure, "distribution", "Training samples of each class", caption, columns=shown, wide=wide)


def prototypes(run: Run) -> Iterator[plot.Drawing]:
    own, merged = run.client_prototypes, run.global_prototypes
    if own is None or merged is None or len(own.labels) + len(merged.labels) < 5:
        return
    if own.values.shape[1] != merged.values.shape[1]:
        return
    chosen = _chosen(merged.labels, MOST_POINTS // 3)
    shown = _chosen(own.labels, MOST_POINTS - len(chosen))
    own_labels, labels = own.labels[shown], merged.labels[chosen]
    places = _tsne(np.concatenate([own.values[shown], merged.values[chosen]]))
    clients, server = places[: len(shown)], places[len(shown) :]
    with plot.canvas(plot.WIDTH, 4.3) as (figure, axes):
        axes.scatter(*clients.T, s=16, c=_colours(own_labels), alpha=0.75, linewidths=0, label="client prototypes")
        look = {"marker": "^", "edgecolors": plot.INK, "linewidths": 0.9, "label": "global ones"}
        axes.scatter(*server.T, s=60, c=_colours(labels), **look)
        _name_classes(run, axes, server, labels)
        figure.legend(loc="outside lower center", ncols=2)
        few = len(shown) < len(own.labels)
        some = f" {len(shown)} of {len(own.labels)} client prototypes are shown." if few else ""
        after = f" after round {own.round}" if own.round else ""
        caption = (
            f"t-SNE of the prototypes{after} (FedTGP, Figure 5): a circle for each client and class, a triangle "
            f"for each global prototype, coloured and named by class.{some}"
        )
        owners = [own.sites[owner] if owner < len(own.sites) else "" for owner in own.owners[shown].tolist()]
        (x, y), classes = places.T.tolist(), np.concatenate([own_labels, labels]).tolist()
        columns = {"of": [*owners, *["global"] * len(labels)], "class": [run.class_name(label) for label in classes]}
        columns |= {"x (no unit)": x, "y (no unit)": y}
        yield plot.draw(figure, "prototypes-tsne", "Prototypes of clients and server", caption, columns=columns)


def _tsne(values_ND: Floats) -> Floats:
    from sklearn.manifold import TSNE

    perplexity, start = min(30.0, (len(values_ND) - 1) / 3), "pca" if values_ND.shape[1] > 1 else "random"
    spread = float(np.abs(values_ND).max()) or 1.0
    method = TSNE(perplexity=perplexity, init=start, max_iter=500, random_state=SEED)
    return np.asarray(method.fit_transform((values_ND / spread).astype(np.float32)))


def _chosen(labels: Ints, most: int) -> Ints:
    if len(labels) <= most:
        return np.arange(len(labels))
    return np.sort(np.random.default_rng(SEED).choice(len(labels), most, replace=False))


def _colours(labels: Ints) -> list[str]:
    return [CLASS_COLOURS[label % len(CLASS_COLOURS)] for label in labels.tolist()]


def _name_classes(run: Run, axes: Any, places: Floats, labels: Ints) -> None:
    """Each class's name once, beside its first place; distances in the map have no unit, so its axes carry none."""
    present = np.unique(labels).tolist()
    for label in present if len(present) <= NAMED_CLASSES else ():
        look: dict[str, Any] = {"xytext": (5, 4), "textcoords": "offset points", "fontsize": 10, "weight": "bold"}
        name = axes.annotate(plot.short(run.class_name(label)), places[labels == label][0], **look)
        name.set_gid(f"class-name-{label}")  # the page gives it a rim
    axes.set(xticks=[], yticks=[])
    axes.margins(0.08)
    axes.spines[:].set_visible(False)

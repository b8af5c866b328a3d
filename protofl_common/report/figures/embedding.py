"""t-SNE of prototypes and of test features (FedTGP, Figures 5 and 6; van der Maaten and Hinton, 2008).

Few enough points are taken, at random, that the page is drawn in seconds; all is seeded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from protofl_common.report.figures.drawing import CLASS_COLOURS, INK, WIDTH, Columns, Drawing, canvas, draw, short
from protofl_common.report.reading import Floats, Ints, Run, Vectors

MOST_POINTS = 500
"""Of one t-SNE, which takes a second."""
NAMED_CLASSES = 40
"""With more classes the global prototypes carry no names."""
SEED = 0


def prototypes(run: Run) -> list[Drawing]:
    """Client prototypes as circles, global ones as triangles, in one map."""
    own, merged = run.client_prototypes, run.global_prototypes
    if own is None or merged is None or len(own.labels) + len(merged.labels) < 5:
        return []
    if own.values.shape[1] != merged.values.shape[1]:
        return []
    chosen = _chosen(merged.labels, MOST_POINTS // 3)
    merged = Vectors(merged.values[chosen], merged.labels[chosen], merged.owners[chosen])
    shown = _chosen(own.labels, MOST_POINTS - len(merged.labels))
    places = _tsne(np.concatenate([own.values[shown], merged.values]))
    clients, server = places[: len(shown)], places[len(shown) :]
    with canvas(WIDTH, 4.3) as (figure, axes):
        axes.scatter(
            *clients.T, s=16, c=_colours(own.labels[shown]), alpha=0.75, linewidths=0, label="client prototypes"
        )
        axes.scatter(
            *server.T, s=60, marker="^", c=_colours(merged.labels), edgecolors=INK, linewidths=0.9, label="global ones"
        )
        _name_classes(run, axes, server, merged.labels)
        _bare(figure, axes)
        some = (
            f" {len(shown)} of {len(own.labels)} client prototypes are shown." if len(shown) < len(own.labels) else ""
        )
        after = f" after round {own.round}" if own.round else ""
        caption = (
            f"t-SNE of the prototypes{after} (FedTGP, Figure 5): a circle for each client and class, a triangle "
            f"for each global prototype, coloured and named by class.{some}"
        )
        owners = [*_owners(own, shown), *["global"] * len(merged.labels)]
        columns = _columns(run, places, owners, np.concatenate([own.labels[shown], merged.labels]))
        return [draw(figure, "prototypes-tsne", "Prototypes of clients and server", caption, columns=columns)]


def test_features(run: Run) -> list[Drawing]:
    """The features of test samples that clients have sent."""
    features = run.test_features
    if features is None or len(features.labels) < 5:
        return []
    shown = _chosen(features.labels, MOST_POINTS)
    labels = features.labels[shown]
    places = _tsne(features.values[shown])
    with canvas(WIDTH, 4.3) as (figure, axes):
        axes.scatter(*places.T, s=11, c=_colours(labels), alpha=0.8, linewidths=0)
        present = np.unique(labels)
        middles = np.array([np.median(places[labels == label], axis=0) for label in present])
        _name_classes(run, axes, middles, present)
        _bare(figure, axes, legend=False)
        caption = (
            f"t-SNE of {len(shown)} test samples' features from {len(np.unique(features.owners))} clients (FedTGP, "
            "Figure 6), coloured by class and named at the median of each."
        )
        columns = _columns(run, places, _owners(features, shown), labels)
        return [draw(figure, "features-tsne", "Test features", caption, columns=columns)]


def _tsne(values_ND: Floats) -> Floats:
    """[N, 2]."""
    from sklearn.manifold import TSNE

    spread = float(np.abs(values_ND).max()) or 1.0
    method = TSNE(
        perplexity=min(30.0, (len(values_ND) - 1) / 3),
        init="pca" if values_ND.shape[1] > 1 else "random",
        max_iter=500,
        random_state=SEED,
    )
    places: Floats = method.fit_transform((values_ND / spread).astype(np.float32))
    return places


def _columns(run: Run, places_N2: Floats, owners: list[str], labels: Ints) -> Columns:
    x, y = places_N2.T.tolist()
    return {
        "of": owners,
        "class": [run.class_name(label) for label in labels.tolist()],
        "x (no unit)": x,
        "y (no unit)": y,
    }


def _owners(vectors: Vectors, shown: Ints) -> list[str]:
    """Their names, as far as they are known."""
    return [vectors.sites[owner] if owner < len(vectors.sites) else "" for owner in vectors.owners[shown].tolist()]


def _chosen(labels: Ints, most: int) -> Ints:
    """Positions of at most ``most`` points, in order."""
    if len(labels) <= most:
        return np.arange(len(labels))
    return np.sort(np.random.default_rng(SEED).choice(len(labels), most, replace=False))


def _colours(labels: Ints) -> list[str]:
    return [CLASS_COLOURS[label % len(CLASS_COLOURS)] for label in labels.tolist()]


def _name_classes(run: Run, axes: Any, places: Floats, labels: Ints) -> None:
    """Each class's name once, beside its first place."""
    if len(np.unique(labels)) > NAMED_CLASSES:
        return
    for label in np.unique(labels).tolist():
        place = places[labels == label][0]
        text = short(run.class_name(label))
        name = axes.annotate(text, place, xytext=(5, 4), textcoords="offset points", fontsize=10, weight="bold")
        name.set_gid(f"class-name-{label}")  # the page gives it a rim


def _bare(figure: Any, axes: Any, legend: bool = True) -> None:
    """Distances in the map have no unit, so its axes carry none."""
    axes.set(xticks=[], yticks=[])
    axes.margins(0.08)
    axes.spines[:].set_visible(False)
    if legend:
        figure.legend(loc="outside lower center", ncols=2)

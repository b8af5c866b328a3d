"""The clients' data: training samples of each class (FedTGP, Figures 7 to 11), similarities of backbones (FedPCL)."""

from __future__ import annotations

from typing import Final

import numpy as np

from protofl_common.report.figures.drawing import (
    COLOURS,
    INK,
    MANY_POINTS,
    WIDTH,
    Drawing,
    canvas,
    draw,
    ink_on,
    short,
    some_ticks,
)
from protofl_common.report.reading import Run

MOST = 100
"""Clients of the figure; with more it shows the first ones."""
MOST_COLUMNS = 16
"""Clients of the backbones' figure; with more, columns are domains, where there are any, else the first clients."""
KEY: Final = "backbone-similarity"


def bubbles(run: Run) -> list[Drawing]:
    """A bubble for each client and class, whose area is the number of samples."""
    known = [site for site, facts in run.sites.items() if facts.get("train-classes")]
    if not known:
        return []
    sites = known[:MOST]
    counts_SC = np.array([run.sites[site]["train-classes"] for site in sites], dtype=np.int64)
    classes, largest = counts_SC.shape[1], max(1, int(counts_SC.max()))
    names = [run.class_name(label) for label in range(classes)]
    wide = len(sites) > 12 or classes > 25
    height = min(1.4 + 0.29 * max(classes, 6), 9.0)
    with canvas(11.0 if wide else WIDTH, height) as (figure, axes):
        across, up = (740.0 if wide else 290.0) / len(sites), 72 * (height - 1.4) / classes
        area = max(6.0, 0.9 * min(across, up, 26.0)) ** 2  # in points², of the largest bubble
        many = int((counts_SC > 0).sum()) > MANY_POINTS
        for index, (name, members) in enumerate((run.domains or {"": list(sites)}).items()):
            rows = np.array([row for row, site in enumerate(sites) if site in members], dtype=np.int64)
            row, label = np.nonzero(counts_SC[rows])
            sizes, colour = area * counts_SC[rows][row, label] / largest, COLOURS[index % len(COLOURS)]
            axes.scatter(rows[row], label, s=sizes, color=colour, alpha=0.9, linewidths=0, rasterized=many)
            if name:
                axes.scatter([], [], s=60, color=colour, linewidths=0, label=short(name))
        ticks, texts = some_ticks(sites, 40 if wide else 12, 10)
        axes.set_xticks(ticks, texts, rotation=90 if len(sites) > 6 else 0, fontsize=9)
        ticks, texts = some_ticks(names, 30, 12)
        axes.set_yticks(ticks, texts, fontsize=9)
        axes.set_xlim(-0.7, len(sites) - 0.3)
        axes.set_ylim(-0.8, classes - 0.2)
        axes.set_ylabel("class")
        for count in (largest,) if largest < 8 else (largest // 4, largest):
            text = f"{count} sample{'s' * (count > 1)}"
            axes.scatter([], [], s=area * count / largest, color=INK, linewidths=0, label=text)
        handles, labels = axes.get_legend_handles_labels()
        columns = 8 if wide else 3
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, labelspacing=1.2, borderpad=0.8)
        left_out = f" {len(run.sites) - len(sites)} clients are not shown." if len(sites) < len(run.sites) else ""
        coloured = " Colours are domains." if run.domains else ""
        caption = (
            "The area of a bubble is the number of training samples that a client has of a class "
            f"(FedTGP, Figures 7 to 11).{coloured}{left_out}"
        )
        of_classes = zip(names, counts_SC.T.tolist(), strict=True)
        shown = {"client": sites} | {f"{name} (training samples)": counts for name, counts in of_classes}
        title = "Training samples of each class"
        return [draw(figure, "distribution", title, caption, columns=shown, wide=wide)]


def similarity(run: Run) -> list[Drawing]:
    """How much of a client's prototypes each frozen backbone alone explains (FedPCL, Figure 3).

    Rows: backbones; columns: clients, or domains of many clients.
    """
    similarities = {site: facts[KEY] for site, facts in run.sites.items() if facts.get(KEY)}
    names = [str(name) for name in run.facts.get("backbones", [])]
    if not similarities or not names:
        return []
    columns = {site: [site] for site in list(similarities)[:MOST_COLUMNS]}
    if len(similarities) > MOST_COLUMNS and run.domains:
        columns = {name: [site for site in sites if site in similarities] for name, sites in run.domains.items()}
        columns = {name: sites for name, sites in columns.items() if sites}
    values_KS = np.array(
        [
            np.mean([np.array(similarities[site], dtype=np.float64) for site in sites], axis=0)
            for sites in columns.values()
        ]
    ).T
    of_site = {site: name for name, members in run.domains.items() for site in members}
    labels = [f"{site} · {of_site[site]}" if site in of_site else site for site in columns]
    with canvas(WIDTH, 2.2 + 0.45 * len(names)) as (figure, axes):
        low = min(0.0, float(values_KS.min()))
        image = axes.imshow(values_KS, aspect="auto", interpolation="none", cmap="cividis", vmin=low, vmax=1)
        axes.grid(False)
        axes.set_yticks(*some_ticks(names, 20, 16))
        chosen, texts = some_ticks(labels, 20, 22)
        axes.set_xticks(chosen, texts, rotation=90, fontsize=9)
        for (row, column), value in np.ndenumerate(values_KS):
            size = 8.5 if len(columns) <= 10 else 7.5
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=size, color=ink_on(value))
        figure.colorbar(image, ax=axes, label="similarity", pad=0.02)
        caption = (
            "Similarity (inner product of unit vectors, mean over the classes) of the prototypes that one frozen "
            "backbone alone gives and those of all backbones together (FedPCL, Figure 3). Rows: backbones; columns: "
            f"{'domains' if columns.keys() <= run.domains.keys() else 'clients'}."
        )
        of_backbones = {f"{name} (similarity)": values for name, values in zip(names, values_KS.tolist(), strict=True)}
        title = "Which backbone the prototypes rely on"
        return [draw(figure, "backbones", title, caption, columns={"": labels, **of_backbones})]

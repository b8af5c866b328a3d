"""How much of a client's prototypes each frozen backbone alone explains (FedPCL, Figure 3)."""

from __future__ import annotations

import numpy as np

from protofl_common.report.figures.drawing import WIDTH, Drawing, canvas, draw, ink_on, some_ticks
from protofl_common.report.reading import Run

MOST_CLIENTS = 16
"""With more, columns are domains, where there are any, else the first clients."""
KEY = "backbone-similarity"


def similarity(run: Run) -> list[Drawing]:
    """Rows: backbones; columns: clients, or domains of many clients."""
    told = {site: facts[KEY] for site, facts in run.sites.items() if facts.get(KEY)}
    names = [str(name) for name in run.facts.get("backbones", [])]
    if not told or not names:
        return []
    columns = {site: [site] for site in list(told)[:MOST_CLIENTS]}
    if len(told) > MOST_CLIENTS and run.domains:
        columns = {name: [site for site in sites if site in told] for name, sites in run.domains.items()}
        columns = {name: sites for name, sites in columns.items() if sites}
    values_KS = np.array(
        [np.mean([np.array(told[site], dtype=np.float64) for site in sites], axis=0) for sites in columns.values()]
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
        return [draw(figure, "backbones", "Which backbone the prototypes rely on", caption)]

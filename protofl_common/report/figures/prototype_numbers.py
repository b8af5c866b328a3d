"""How many prototypes the clients send, where a class may have several (FedPLVM, Figure 9)."""

from __future__ import annotations

from typing import Final

import numpy as np

from protofl_common.report.figures.drawing import (
    WIDTH,
    Drawing,
    canvas,
    class_columns,
    draw,
    finite_mean,
    ink_on,
    legend_below,
    plot_lines,
    round_axis,
    some_ticks,
)
from protofl_common.report.reading import Floats, Run
from protofl_common.runs.folder import RoundRow

KEY: Final = "prototypes-of-classes"
MOST_CLASSES = 40


def over_rounds(run: Run) -> list[Drawing]:
    """The mean over a domain's clients and their classes, round by round."""
    rows = _rows(run)
    if len(rows) < 2:
        return []
    rounds = [row["round"] for row in rows]
    with canvas() as (figure, axes):
        of_groups = {name: [finite_mean(_table(row, sites)) for row in rows] for name, sites in _groups(run).items()}
        plot_lines(axes, rounds, of_groups.items())
        axes.set_ylabel("prototypes per class")
        axes.set_ylim(bottom=0)
        round_axis(axes)
        legend_below(axes, 3)
        caption = (
            "Average number of local prototypes per class that a client sends, by domain (FedPLVM, Figure 9). "
            "Clustering finds more of them where a class looks more varied."
        )
        return [draw(figure, "prototype-numbers", "Prototypes per class over the rounds", caption)]


def by_class(run: Run) -> list[Drawing]:
    """In the last round: the mean over a domain's clients, of each class."""
    rows = _rows(run)
    if not rows:
        return []
    groups = _groups(run)
    tables = [_table(rows[-1], sites) for sites in groups.values()]
    values_GC = np.array([[finite_mean(of_class) for of_class in table.T] for table in tables])[:, :MOST_CLASSES]
    if not np.isfinite(values_GC).any():
        return []
    classes = [run.class_name(label) for label in range(values_GC.shape[1])]
    with canvas(WIDTH, min(1.6 + 0.34 * len(groups), 8.0)) as (figure, axes):
        image = axes.imshow(values_GC, aspect="auto", interpolation="none", cmap="cividis", vmin=0)
        axes.grid(False)
        class_columns(axes, classes)
        chosen, names = some_ticks(list(groups), 30)
        axes.set_yticks(chosen, names)
        if len(classes) <= 12 and len(groups) <= 20:
            most = float(np.nanmax(values_GC))
            for (row, label), value in np.ndenumerate(values_GC):
                if np.isfinite(value):
                    ink = ink_on(value / most)
                    axes.text(label, row, f"{value:.1f}", ha="center", va="center", fontsize=8.5, color=ink)
        figure.colorbar(image, ax=axes, label="prototypes", pad=0.02)
        first = f", the first {MOST_CLASSES} classes" if len(classes) == MOST_CLASSES else ""
        caption = (
            f"Average number of local prototypes of each class in round {rows[-1]['round']}, by domain{first}. "
            "Blank: nobody holds the class there."
        )
        of_groups = zip(groups, values_GC.tolist(), strict=True)
        columns = {"class": classes} | {f"{name} (prototypes)": values for name, values in of_groups}
        return [draw(figure, "prototype-numbers-by-class", "Prototypes by class and domain", caption, columns=columns)]


def _rows(run: Run) -> list[RoundRow]:
    return [row for row in run.rounds if any(KEY in client for client in row["clients"].values())]


def _groups(run: Run) -> dict[str, list[str]]:
    """Domains, or a few single clients, or all of them together."""
    if run.domains:
        return run.domains
    return {site: [site] for site in run.sites} if len(run.sites) <= 8 else {"all clients": list(run.sites)}


def _table(row: RoundRow, sites: list[str]) -> Floats:
    """[S, C]; NaN where a client has no prototype of a class."""
    clients = row["clients"]
    counted = [clients[site][KEY] for site in sites if site in clients and KEY in clients[site]]
    length = max((len(client.get(KEY, [])) for client in clients.values()), default=0)
    table = np.array(counted, dtype=np.float64).reshape(len(counted), length)
    table[table == 0] = np.nan
    return table

"""Prototype margins (FedTGP, Figure 1): how far the prototypes of a class are from those of the other classes.

The margin of a class is the least Euclidean distance of its prototype to the prototypes of other classes in the same
set, a client's or the global one. The paper compares each class's global margin with the largest one among the clients:
averaging shrinks it, trained prototypes keep it. The paper normalises the margins of each method; here they are shown
as they are.
"""

from __future__ import annotations

import numpy as np

from protofl_common.report.figures.drawing import (
    COLOURS,
    MANY_POINTS,
    Drawing,
    canvas,
    class_columns,
    draw,
    finite_mean,
    legend_below,
    line_style,
    round_axis,
)
from protofl_common.report.reading import Floats, Run
from protofl_common.runs.folder import MarginRow


def by_class(run: Run) -> list[Drawing]:
    """After the last round: every client's margin of each class, the largest, and the global one."""
    if not run.margins:
        return []
    clients_SC, global_C = _tables(run.margins[-1])
    if not np.isfinite(clients_SC).any():
        return []
    classes, best_C = clients_SC.shape[1], _largest(clients_SC)
    with canvas() as (figure, axes):
        labels = np.arange(classes)
        row, label = np.nonzero(np.isfinite(clients_SC))
        jitter = (row / max(1, len(clients_SC) - 1) - 0.5) * 0.4
        size = 16 if classes <= 40 else 7
        look = {"color": COLOURS[5], "alpha": 0.8, "linewidths": 0, "rasterized": len(row) > MANY_POINTS}
        axes.scatter(label + jitter, clients_SC[row, label], s=size, label="clients", **look)
        axes.scatter(
            labels, best_C, s=8 * size, marker="_", linewidths=1.8, color=COLOURS[0], label="largest among clients"
        )
        axes.scatter(labels, global_C, s=3 * size, marker="^", color=COLOURS[3], linewidths=0, label="global")
        names = [run.class_name(label) for label in range(classes)]
        class_columns(axes, names)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("margin (Euclidean)")
        legend_below(axes, 3)
        caption = (
            f"After round {run.margins[-1]['round']}: the least distance of a class's prototype to those of the other "
            "classes, in each client's own set and in the global set (FedTGP, Figure 1). A triangle below the bar: "
            "merging has moved the classes together."
        )
        shown = {"global": global_C, "largest among clients": best_C}
        shown |= dict(zip(run.margins[-1]["clients"], clients_SC, strict=True))
        columns = {"class": names} | {f"{name} (Euclidean)": values.tolist() for name, values in shown.items()}
        return [draw(figure, "margins-by-class", "Prototype margins by class", caption, columns=columns)]


def over_rounds(run: Run) -> list[Drawing]:
    """Their means over the classes, round by round."""
    if len(run.margins) < 2:
        return []
    rounds = [row["round"] for row in run.margins]
    tables = [_tables(row) for row in run.margins]
    lines = {
        "largest among clients": [finite_mean(_largest(clients_SC)) for clients_SC, _ in tables],
        "mean of clients": [finite_mean(clients_SC) for clients_SC, _ in tables],
        "global": [finite_mean(global_C) for _, global_C in tables],
    }
    if not np.isfinite(lines["mean of clients"]).any():
        return []
    with canvas() as (figure, axes):
        for (name, values), colour in zip(lines.items(), (0, 5, 3), strict=True):
            axes.plot(rounds, values, label=name, **line_style(colour, len(rounds)))
        axes.set_ylim(bottom=0)
        axes.set_ylabel("margin (Euclidean)")
        round_axis(axes)
        legend_below(axes, 3)
        caption = (
            "The margins of the figure by class, averaged over the classes. The global line below the largest of the "
            "clients is the “margin shrink” that FedTGP describes (Figure 1)."
        )
        return [draw(figure, "margins-over-rounds", "Prototype margins over the rounds", caption)]


def _tables(row: MarginRow) -> tuple[Floats, Floats]:
    """Margins of the clients [S, C] and of the global prototypes [C], NaN where there is none."""
    clients, owned = row["clients"], row["global"]
    clients_SC = np.array(list(clients.values()), dtype=np.float64)
    return clients_SC, np.full(clients_SC.shape[1], np.nan) if owned is None else np.array(owned, dtype=np.float64)


def _largest(clients_SC: Floats) -> Floats:
    """[C], NaN where no client has one."""
    lowest = np.where(np.isnan(clients_SC), -np.inf, clients_SC).max(axis=0)
    found: Floats = np.where(np.isfinite(lowest), lowest, np.nan)
    return found

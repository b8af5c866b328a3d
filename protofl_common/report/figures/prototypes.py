"""Prototypes: their margins (FedTGP, Figure 1), numbers (FedPLVM, Figure 9), and backbones (FedPCL, Figure 3).

The margin of a class is the least Euclidean distance of its prototype to the prototypes of other classes in the same
set, a client's or the global one. FedTGP compares each class's global margin with the largest one among the clients:
averaging shrinks it, trained prototypes keep it. The paper normalises the margins of each method; here they are shown
as they are.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from protofl_common.report.figures import drawing as plot
from protofl_common.report.reading import Floats, Run
from protofl_common.runs.folder import MarginRow, RoundRow

NUMBERS: Final = "prototypes-of-classes"
SIMILARITY: Final = "backbone-similarity"
MOST_COLUMNS = 16  # clients in the backbones' figure; of more, domains, or the first ones


def margins_by_class(run: Run) -> Iterator[plot.Drawing]:
    if not run.margins or not np.isfinite((tables := _margins(run.margins[-1]))[0]).any():
        return
    clients_SC, global_C = tables
    names, best_C = [run.class_name(label) for label in range(clients_SC.shape[1])], _largest(clients_SC)
    with plot.canvas() as (figure, axes):
        labels, size = np.arange(len(names)), 16 if len(names) <= 40 else 7
        row, label = np.nonzero(np.isfinite(clients_SC))
        jitter = (row / max(1, len(clients_SC) - 1) - 0.5) * 0.4
        look = {"color": plot.COLOURS[5], "alpha": 0.8, "linewidths": 0, "rasterized": len(row) > plot.MANY_POINTS}
        axes.scatter(label + jitter, clients_SC[row, label], s=size, label="clients", **look)
        look = {"marker": "_", "linewidths": 1.8, "color": plot.COLOURS[0]}
        axes.scatter(labels, best_C, s=8 * size, label="largest among clients", **look)
        axes.scatter(labels, global_C, s=3 * size, marker="^", color=plot.COLOURS[3], linewidths=0, label="global")
        plot.class_columns(axes, names)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("margin (Euclidean)")
        plot.legend_below(axes, 3)
        caption = (
            f"After round {run.margins[-1]['round']}: the least distance of a class's prototype to those of the other "
            "classes, in each client's own set and in the global set (FedTGP, Figure 1). A triangle below the bar: "
            "merging has moved the classes together."
        )
        shown = {"global": global_C, "largest among clients": best_C}
        shown |= dict(zip(run.margins[-1]["clients"], clients_SC, strict=True))
        columns = {"class": names} | {f"{name} (Euclidean)": values.tolist() for name, values in shown.items()}
        yield plot.draw(figure, "margins-by-class", "Prototype margins by class", caption, columns=columns)


def margins_over_rounds(run: Run) -> Iterator[plot.Drawing]:
    tables = [_margins(row) for row in run.margins]
    lines = {
        "largest among clients": [plot.finite_mean(_largest(clients_SC)) for clients_SC, _ in tables],
        "mean of clients": [plot.finite_mean(clients_SC) for clients_SC, _ in tables],
        "global": [plot.finite_mean(global_C) for _, global_C in tables],
    }
    if len(tables) > 1 and np.isfinite(lines["mean of clients"]).any():
        caption = (
            "The margins of the figure by class, averaged over the classes. The global line below the largest of the "
            "clients is the “margin shrink” that FedTGP describes (Figure 1)."
        )
        title, rounds = "Prototype margins over the rounds", [row["round"] for row in run.margins]
        unit, styles = "margin (Euclidean)", (0, 5, 3)
        yield plot.line_chart("margins-over-rounds", title, caption, rounds, lines, unit, from_zero=True, styles=styles)


def _margins(row: MarginRow) -> tuple[Floats, Floats]:
    """Margins of the clients [S, C] and of the global prototypes [C], NaN where there is none."""
    clients_SC = np.array(list(row["clients"].values()), dtype=np.float64)
    owned = row["global"] or [None] * clients_SC.shape[1]
    return clients_SC, np.array(owned, dtype=np.float64)


def _largest(clients_SC: Floats) -> Floats:
    lowest = np.where(np.isnan(clients_SC), -np.inf, clients_SC).max(axis=0)
    return np.asarray(np.where(np.isfinite(lowest), lowest, np.nan))


def numbers_over_rounds(run: Run) -> Iterator[plot.Drawing]:
    if len(rows := _rows_with_numbers(run)) > 1:
        lines = {name: [plot.finite_mean(_numbers(row, sites)) for row in rows] for name, sites in _groups(run).items()}
        caption = (
            "Average number of local prototypes per class that a client sends, by domain (FedPLVM, Figure 9). "
            "Clustering finds more of them where a class looks more varied."
        )
        title, rounds = "Prototypes per class over the rounds", [row["round"] for row in rows]
        unit = "prototypes per class"
        yield plot.line_chart("prototype-numbers", title, caption, rounds, lines, unit, from_zero=True)


def _rows_with_numbers(run: Run) -> list[RoundRow]:
    return [row for row in run.rounds if any(NUMBERS in client for client in row["clients"].values())]


def _groups(run: Run) -> dict[str, list[str]]:
    few = {site: [site] for site in run.sites} if len(run.sites) <= 8 else {"all clients": list(run.sites)}
    return run.domains or few


def _numbers(row: RoundRow, sites: list[str]) -> Floats:
    """[S, C]; NaN where a client has no prototype of a class."""
    clients = row["clients"]
    counted = [clients[site][NUMBERS] for site in sites if site in clients and NUMBERS in clients[site]]
    length = max((len(client.get(NUMBERS, [])) for client in clients.values()), default=0)
    table = np.array(counted, dtype=np.float64).reshape(len(counted), length)
    table[table == 0] = np.nan
    return table


def similarity(run: Run) -> Iterator[plot.Drawing]:
    """How much of the prototypes of clients (or domains, of many) each frozen backbone alone explains."""
    similarities = {site: facts[SIMILARITY] for site, facts in run.sites.items() if facts.get(SIMILARITY)}
    names = [str(name) for name in run.facts.get("backbones", [])]
    if not similarities or not names:
        return
    columns = {site: [site] for site in list(similarities)[:MOST_COLUMNS]}
    if len(similarities) > MOST_COLUMNS and run.domains:
        members = {name: [site for site in sites if site in similarities] for name, sites in run.domains.items()}
        columns = {name: sites for name, sites in members.items() if sites}
    of_columns = [np.array([similarities[site] for site in sites], dtype=np.float64) for sites in columns.values()]
    values_KS = np.array([similarities_SK.mean(axis=0) for similarities_SK in of_columns]).T
    of_site = {site: name for name, members in run.domains.items() for site in members}
    labels = [f"{site} · {of_site[site]}" if site in of_site else site for site in columns]
    with plot.canvas(plot.WIDTH, 2.2 + 0.45 * len(names)) as (figure, axes):
        plot.heat_map(axes, values_KS, names, "similarity", vmin=min(0.0, float(values_KS.min())), vmax=1)
        chosen, texts = plot.some_ticks(labels, 20, 22)
        axes.set_xticks(chosen, texts, rotation=90, fontsize=9)
        plot.number_cells(axes, values_KS, 2, 8.5 if len(columns) <= 10 else 7.5)
        caption = (
            "Similarity (inner product of unit vectors, mean over the classes) of the prototypes that one frozen "
            "backbone alone gives and those of all backbones together (FedPCL, Figure 3). Rows: backbones; columns: "
            f"{'domains' if columns.keys() <= run.domains.keys() else 'clients'}."
        )
        of_backbones = {f"{name} (similarity)": values for name, values in zip(names, values_KS.tolist(), strict=True)}
        title = "Which backbone the prototypes rely on"
        yield plot.draw(figure, "backbones", title, caption, columns={"": labels, **of_backbones})

"""The cost of a run: bytes on the wire, and seconds."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from protofl_common.report.figures.drawing import COLOURS, Drawing, canvas, draw, legend_below, plot_lines, round_axis
from protofl_common.report.reading import Run
from protofl_common.runs.folder import RoundRow

PHASES: dict[str, Literal["total", "exchange", "aggregate"]] = {
    "whole round": "total",
    "messages and clients": "exchange",
    "merging": "aggregate",
}
MOST_BARS = 200
"""Of more rounds areas are drawn: bars would be thinner than a pixel, and thousands of shapes."""
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def traffic(run: Run) -> list[Drawing]:
    """Bytes up and down, round by round."""
    rows = run.rounds
    largest = max((max(row["bytes"].values()) for row in rows), default=0)
    if not largest:
        return []
    scale, unit = next((scale, unit) for scale, unit in UNITS if largest >= scale)
    rounds = [row["round"] for row in rows]
    with canvas() as (figure, axes):
        ways = {"up, from the clients": "up", "down, to the clients": "down"}
        plot_lines(axes, rounds, ((name, [row["bytes"][way] / scale for row in rows]) for name, way in ways.items()))
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{unit} a round, all clients")
        round_axis(axes, "round")
        legend_below(axes, 2)
        caption = "Payload of all messages of a round: prototypes and weights, without Flower's own overhead."
        return [draw(figure, "traffic", "Bytes on the wire", caption)]


def time(run: Run) -> list[Drawing]:
    """Seconds of a round as the server sees it, and of the phases of a client's part in it."""
    rows = [row for row in run.rounds if row["seconds"].get("clients") and row["valid"]]
    if not rows:
        return []
    rounds = [row["round"] for row in rows]
    return [_of_server(rounds, rows), _of_clients(rounds, rows)]


def _of_server(rounds: list[int], rows: list[RoundRow]) -> Drawing:
    with canvas() as (figure, axes):
        found = {name: [row["seconds"].get(key, math.nan) for row in rows] for name, key in PHASES.items()}
        plot_lines(axes, rounds, found.items())
        axes.set_ylim(bottom=0)
        axes.set_ylabel("seconds")
        round_axis(axes, "round")
        legend_below(axes, 3)
        caption = (
            "A round as the server sees it: sending, the clients' work (which may take turns on one machine) and "
            "waiting for replies; and the server's own merging."
        )
        return draw(figure, "time", "Time of a round", caption)


def _of_clients(rounds: list[int], rows: list[RoundRow]) -> Drawing:
    phases = list(dict.fromkeys(phase for row in rows for phase in row["seconds"]["clients"]))
    values = [[row["seconds"]["clients"].get(phase, 0.0) / row["valid"] for row in rows] for phase in phases]
    with canvas() as (figure, axes):
        colours = [COLOURS[index % len(COLOURS)] for index in range(len(phases))]
        if len(rounds) > MOST_BARS:
            axes.stackplot(rounds, values, colors=colours, labels=phases, linewidth=0)
        else:
            width = 0.8 if len(rounds) <= 30 else 1.0
            bottoms = np.cumsum([np.zeros(len(rows)), *values], axis=0)
            for phase, seconds, bottom, colour in zip(phases, values, bottoms, colours, strict=False):
                axes.bar(rounds, seconds, width, bottom=bottom, color=colour, linewidth=0, label=phase)
        axes.set_ylabel("seconds per client")
        round_axis(axes, "round")
        legend_below(axes, 3)
        caption = "Seconds that a client takes for its part of a round, by phase; the mean over the clients."
        named = zip(phases, values, strict=True)
        columns = {"round": rounds} | {f"{phase} (seconds per client)": seconds for phase, seconds in named}
        return draw(figure, "time-of-clients", "Time of a client", caption, columns=columns)

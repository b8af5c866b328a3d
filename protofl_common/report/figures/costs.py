"""What a run costs: bytes on the wire, and seconds."""

from __future__ import annotations

import numpy as np

from protofl_common.report.figures.drawing import (
    COLOURS,
    INK,
    Drawing,
    canvas,
    draw,
    legend_below,
    line_style,
    round_axis,
)
from protofl_common.report.reading import Run

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
        for index, (way, name) in enumerate((("up", "up, from the clients"), ("down", "down, to the clients"))):
            values = [row["bytes"][way] / scale for row in rows]
            axes.plot(rounds, values, label=name, **line_style(index, len(rounds)))
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{unit} a round, all clients")
        round_axis(axes, "round")
        legend_below(axes, 2)
        caption = "Payload of all messages of a round: prototypes and weights, without Flower's own overhead."
        return [draw(figure, "traffic", "Bytes on the wire", caption)]


def time(run: Run) -> list[Drawing]:
    """Seconds of a round, and of the phases of a client's part in it."""
    rows = [row for row in run.rounds if row["seconds"].get("clients") and row["valid"]]
    if not rows:
        return []
    rounds = [row["round"] for row in rows]
    phases = list(dict.fromkeys(phase for row in rows for phase in row["seconds"]["clients"]))
    values = [[row["seconds"]["clients"].get(phase, 0.0) / row["valid"] for row in rows] for phase in phases]
    with canvas() as (figure, axes):
        bottom = np.zeros(len(rows))
        for index, (phase, seconds) in enumerate(zip(phases, values, strict=True)):
            colour = COLOURS[index % len(COLOURS)]
            axes.bar(rounds, seconds, 1.0, bottom=bottom, color=colour, linewidth=0, label=phase)
            bottom += np.array(seconds)
        total = [row["seconds"]["total"] for row in rows]
        aggregate = [row["seconds"].get("aggregate", 0.0) for row in rows]
        axes.plot(rounds, total, color=INK, linewidth=1.6, label="whole round")
        axes.plot(rounds, aggregate, ":", color=INK, linewidth=1.6, label="server's merging")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("seconds")
        if bottom.max() and max(total) > 8 * bottom.max():
            axes.set_yscale("symlog", linthresh=float(bottom.max()))
        round_axis(axes, "round")
        legend_below(axes, 4)
        caption = (
            "Bars: seconds of a client's phases, mean over the clients. Lines: the whole round as the server sees it, "
            "waiting and clients that take turns on one machine included, and its own merging."
        )
        return [draw(figure, "time", "Time of a round", caption)]

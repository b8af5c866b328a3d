"""Training losses over the rounds."""

from __future__ import annotations

import math

from protofl_common.report.figures.drawing import Drawing, canvas, draw, legend_below, plot_lines, round_axis
from protofl_common.report.reading import Run


def losses(run: Run) -> list[Drawing]:
    """The clients' loss and its terms, and the server's where it trains."""
    rows = [row for row in run.rounds if row["losses"]]
    if not rows:
        return []
    rounds = [row["round"] for row in rows]
    lines = {
        name: [row["losses"].get(name, math.nan) for row in rows]
        for name in dict.fromkeys(name for row in rows for name in row["losses"])
    }
    if list(lines) == ["total", "cross-entropy"]:  # the same numbers twice
        del lines["total"]
    if any("server-loss" in row.get("server", {}) for row in rows):
        lines["server's loss"] = [row.get("server", {}).get("server-loss", math.nan) for row in rows]
    with canvas() as (figure, axes):
        plot_lines(axes, rounds, lines.items())
        there = [value for values in lines.values() for value in values if value > 0]
        if there and max(there) > 50 * min(there):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")  # the default is a formula, which our figures do not typeset
            axes.yaxis.set_minor_formatter("")
        axes.set_ylabel("loss")
        round_axis(axes, "round")
        legend_below(axes, 3)
        caption = "Mean training loss over the clients' samples in each round, and the terms that it is the sum of."
        return [draw(figure, "losses", "Training losses", caption)]

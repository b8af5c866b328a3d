"""The cost of a run: bytes on the wire, seconds, and privacy: ε, and images made from prototypes."""

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from protofl_common.report.figures import drawing as plot
from protofl_common.report.reading import Run

MOST_BARS = 200  # of more rounds areas are drawn: bars would be thinner than a pixel, and thousands of shapes
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def traffic(run: Run) -> Iterator[plot.Drawing]:
    rows = run.rounds
    if largest := max((max(row["bytes"].values()) for row in rows), default=0):
        scale, unit = next((scale, unit) for scale, unit in UNITS if largest >= scale)
        ways = {"up, from the clients": "up", "down, to the clients": "down"}
        lines = {name: [row["bytes"][way] / scale for row in rows] for name, way in ways.items()}
        caption = "Payload of all messages of a round: prototypes and weights, without Flower's own overhead."
        rounds, unit = [row["round"] for row in rows], f"{unit} a round, all clients"
        yield plot.line_chart(
            "traffic", "Bytes on the wire", caption, rounds, lines, unit, below="round", legend=2, from_zero=True
        )


def time(run: Run) -> Iterator[plot.Drawing]:
    rows = [row for row in run.rounds if row["seconds"].get("clients") and row["valid"]]
    if not rows:
        return
    rounds = [row["round"] for row in rows]
    parts: dict[str, Literal["total", "exchange", "aggregate"]] = {
        "whole round": "total",
        "messages and clients": "exchange",
        "merging": "aggregate",
    }
    lines = {name: [row["seconds"].get(key, math.nan) for row in rows] for name, key in parts.items()}
    caption = (
        "A round as the server sees it: sending, the clients' work (which may take turns on one machine) and "
        "waiting for replies; and the server's own merging."
    )
    yield plot.line_chart("time", "Time of a round", caption, rounds, lines, "seconds", below="round", from_zero=True)
    phases = list(dict.fromkeys(phase for row in rows for phase in row["seconds"]["clients"]))
    values = [[row["seconds"]["clients"].get(phase, 0.0) / row["valid"] for row in rows] for phase in phases]
    with plot.canvas() as (figure, axes):
        colours = [plot.COLOURS[index % len(plot.COLOURS)] for index in range(len(phases))]
        if len(rounds) > MOST_BARS:
            axes.stackplot(rounds, values, colors=colours, labels=phases, linewidth=0)
        else:
            width = 0.8 if len(rounds) <= 30 else 1.0
            bottoms = np.cumsum([np.zeros(len(rows)), *values], axis=0)
            for phase, heights, bottom, colour in zip(phases, values, bottoms, colours, strict=False):
                axes.bar(rounds, heights, width, bottom=bottom, color=colour, linewidth=0, label=phase)
        axes.set_ylabel("seconds per client")
        plot.round_axis(axes, "round")
        plot.legend_below(axes, 3)
        caption = "Seconds that a client takes for its part of a round, by phase; the mean over the clients."
        named = {f"{phase} (seconds per client)": heights for phase, heights in zip(phases, values, strict=True)}
        yield plot.draw(figure, "time-of-clients", "Time of a client", caption, columns={"round": rounds, **named})


def spent(run: Run) -> Iterator[plot.Drawing]:
    after = {row["round"]: row["epsilon"] for row in run.rounds if "epsilon" in row}
    if not after:
        return
    with plot.canvas() as (figure, axes):
        for index, kind in enumerate(run.kinds):
            rows = [row for row in run.evaluations(kind) if row["evaluated-after-round"] in after]
            epsilons = [after[row["evaluated-after-round"]] for row in rows]
            means = [100 * row["accuracy"][kind]["mean"] for row in rows]
            axes.plot(epsilons, means, label=f"{kind}, mean", **plot.line_style(index, len(rows)))
        axes.set_xlabel("ε spent")
        axes.set_ylabel("test accuracy, %")
        plot.legend_below(axes, 2)
        caption = (
            "What each evaluation's model has cost: ε of the client that the run costs most, as if it took part in "
            "every round. With a budget for all rounds, fewer rounds need less noise: the curve is no forecast "
            "of a run with a smaller budget."
        )
        yield plot.draw(figure, "accuracy-against-epsilon", "Accuracy for privacy spent", caption)


def inversions(run: Run) -> Iterator[plot.Drawing]:
    """A row for each image made from a prototype, beside the training and test samples most like it."""
    if run.inversions is None:
        return
    facts, images_N3CHW = run.inversions
    gap = max(1, images_N3CHW.shape[3] // 8)
    around = np.pad(images_N3CHW, ((0, 0), (0, 0), (0, 0), (0, gap), (0, gap)), constant_values=255)
    rows, columns, channels, height, width = around.shape
    pixels = around.transpose(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels)
    classes = [run.class_name(fact["label"]) for fact in facts]
    with plot.canvas(plot.WIDTH, min(1.0 + 0.55 * rows, 8.0)) as (figure, axes):
        axes.imshow(pixels if channels == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=255, interpolation="none")
        axes.grid(False)
        axes.set_xticks(width * (np.arange(columns) + 0.5) - gap / 2, ("made", "training", "test"))
        named = zip(facts, classes, strict=True)
        names = [f"{plot.short(fact['site'])}, {plot.short(name, 8)} ({fact['samples']})" for fact, name in named]
        axes.set_yticks(height * (np.arange(rows) + 0.5) - gap / 2, names)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        best = max(facts, key=lambda fact: fact["alike"])
        caption = (
            "Images made from the prototypes alone, with the client's model, and the training and test samples of the "
            f"class that are most like them; in brackets the class's training samples. The {rows} that are most like a "
            f"training sample; at most their correlation is {best['alike']:.2f}, where that with a test sample, which "
            f"the client has not trained with, is {best['other']:.2f}."
        )
        shown = {
            "client": [fact["site"] for fact in facts],
            "class": classes,
            "training samples of the class": [fact["samples"] for fact in facts],
            "correlation with a training sample": [fact["alike"] for fact in facts],
            "correlation with a test sample": [fact["other"] for fact in facts],
        }
        yield plot.draw(figure, "inversions", "Images made from prototypes", caption, columns=shown)

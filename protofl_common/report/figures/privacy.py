"""Privacy: accuracy for the privacy spent, and images made from prototypes."""

from __future__ import annotations

import numpy as np

from protofl_common.report.figures.drawing import WIDTH, Drawing, canvas, draw, legend_below, line_style, short
from protofl_common.report.reading import Run


def spent(run: Run) -> list[Drawing]:
    """Accuracy against ε, a point for each evaluation."""
    after = {row["round"]: row["epsilon"] for row in run.rounds if "epsilon" in row}
    if not after:
        return []
    with canvas() as (figure, axes):
        for index, kind in enumerate(run.kinds):
            rows = [row for row in run.evaluations(kind) if row["evaluated-after-round"] in after]
            epsilons = [after[row["evaluated-after-round"]] for row in rows]
            means = [100 * row["accuracy"][kind]["mean"] for row in rows]
            axes.plot(epsilons, means, label=f"{kind}, mean", **line_style(index, len(rows)))
        axes.set_xlabel("ε spent")
        axes.set_ylabel("test accuracy, %")
        legend_below(axes, 2)
        caption = (
            "What each evaluation's model has cost: ε of the client that the run costs most, as if it took part in "
            "every round. With a budget for all rounds, fewer rounds need less noise: the curve is no forecast "
            "of a run with a smaller budget."
        )
        return [draw(figure, "accuracy-against-epsilon", "Accuracy for privacy spent", caption)]


def inversions(run: Run) -> list[Drawing]:
    """A row for each image made from a prototype, beside the training and test samples most like it."""
    if run.inversions is None:
        return []
    facts, images_N3CHW = run.inversions
    gap = max(1, images_N3CHW.shape[3] // 8)
    around = np.pad(images_N3CHW, ((0, 0), (0, 0), (0, 0), (0, gap), (0, gap)), constant_values=255)
    rows, columns, channels, height, width = around.shape
    pixels = around.transpose(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels)
    with canvas(WIDTH, min(1.0 + 0.55 * rows, 8.0)) as (figure, axes):
        axes.imshow(pixels if channels == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=255, interpolation="none")
        axes.grid(False)
        axes.set_xticks(width * (np.arange(columns) + 0.5) - gap / 2, ("made", "training", "test"))
        names = [f"{short(one['site'])}, {short(run.class_name(one['label']), 8)} ({one['samples']})" for one in facts]
        axes.set_yticks(height * (np.arange(rows) + 0.5) - gap / 2, names)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        best = max(facts, key=lambda one: one["alike"])
        caption = (
            "Images made from the prototypes alone, with the client's model, and the training and test samples of the "
            f"class that are most like them; in brackets the class's training samples. The {rows} that are most like a "
            f"training sample; at most their correlation is {best['alike']:.2f}, where that with a test sample, which "
            f"the client has not trained with, is {best['other']:.2f}."
        )
        columns = {
            "client": [one["site"] for one in facts],
            "class": [run.class_name(one["label"]) for one in facts],
            "training samples of the class": [one["samples"] for one in facts],
            "correlation with a training sample": [one["alike"] for one in facts],
            "correlation with a test sample": [one["other"] for one in facts],
        }
        return [draw(figure, "inversions", "Images made from prototypes", caption, columns=columns)]

"""Figures for a paper: several methods side by side, and what a run's models say of test samples.

They are made from the files of finished runs, in the style of the page:

    import protofl

    methods = {"FedAvg": ["runs/a-1", "runs/a-2"], "FedProto": ["runs/b-1", "runs/b-2"]}
    protofl.figures.curves(methods).save("figures")     # curves.svg, curves.pdf
    protofl.figures.boxes(methods).figure               # of matplotlib, to change it
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from protofl_common.config.options import SettingsError
from protofl_common.report import drawing as plot
from protofl_common.report.charts import CLASS_COLOURS, Drawings, drawn_rows, places_in_map
from protofl_common.report.reading import Floats, Ints, RecordedRun
from protofl_common.runs.figures import axis, results_of_folders
from protofl_common.runs.folder import RunFolder, baseline_folder
from protofl_common.runs.over_clients import evaluations, factor, figures_of, in_percent

Methods = Mapping[str, Iterable[str | Path]]
"""A method's name -> the folders of its finished runs, one for each seed."""
_FOLDERS = TypeAdapter(Annotated[list[Path], Field(min_length=1)])
MOST_SAMPLES = 1000  # of a map; a t-SNE of so many takes a few seconds


class HiddenClients(SettingsError):
    """Raised where single clients' figures are asked for, and a run has only their mean."""


def save_curves_and_boxes(methods: Methods, what: str, folder: Path, prefix: str = "") -> None:
    """Write the figures `curves` and `boxes` of ``what`` into the folder, as SVG and PDF.

    Boxes are left out where secure aggregation hides the clients of a run. The names of the files
    begin with ``prefix``.
    """
    curves(methods, what).save(folder, f"{prefix}curves")
    with suppress(HiddenClients):
        boxes(methods, what).save(folder, f"{prefix}boxes")


def curves(methods: Methods, what: str = "") -> plot.Drawing:
    """Draw a figure over the rounds: the mean over the runs of each method, and a band.

    The band is the standard deviation over the runs, where there are several. ``what`` is as in a
    table: ``head``, ``prototype``, ``head/auc``, …; for "" it is the head's accuracy where a run
    has that, and the prototypes' otherwise; of several labels a sample it is the AUC if all runs
    have one. SettingsError for a run that lacks the figure, or is not finished.
    """
    figures, unit = _chosen(methods, what)
    measured: dict[str, list[dict[int, float]]] = {}  # method -> of each run the mean by round
    rounds: set[int] = set()
    for name, of_method in figures.items():
        measured[name] = [_means_of_rounds(*run) for run in of_method.items()]
        rounds.update(*measured[name])
    places = sorted(rounds)

    lines = {}
    bands = {}
    for name, runs in measured.items():
        # R rounds, S runs; NaN where a run was not measured, so that the mean has a gap there, too
        values_RS = np.array([[run.get(place, math.nan) for run in runs] for place in places])
        lines[name] = values_RS.mean(axis=1).tolist()
        if len(runs) > 1:
            deviations_R = values_RS.std(axis=1, ddof=1)
            bands[name] = (lines[name] - deviations_R, lines[name] + deviations_R)
    return plot.line_chart(
        "curves",
        "Over the rounds",
        "Mean over the clients and seeds; the band is the standard deviation over the seeds.",
        places,
        lines,
        unit,
        bands=bands,
    )


def of_methods(run: RecordedRun) -> Drawings:
    """Draw the mean result of the run and of each of its baselines over the rounds.

    Nothing is drawn of a run without baselines, or of one that is not finished.
    """
    if len(run.compared) < 2:
        return
    methods = {}
    for summary in run.compared[:-1]:  # the last is the run's own
        folder = baseline_folder(run.folder.resolve(), str(summary["settings"]["algo"]))
        methods[summary["algorithm"]] = [folder]
    yield replace(
        curves({**methods, run.algorithm: [run.folder]}),
        name="accuracy-of-methods",
        title="The run and its baselines",
        caption=f"Mean over {run.averaged_over}, by each model's head (by prototypes where an "
        "algorithm trains no head): the same clients and data, one seed.",
    )


def boxes(methods: Methods, what: str = "") -> plot.Drawing:
    """Draw how a figure is spread over the clients after the last round: a box for each method.

    A box goes from the first to the third quartile, with the median in it; its whiskers end at the
    farthest client within one and a half times its length. Every client of every run is a point.
    ``what`` is as for `curves`; HiddenClients for a run of secure aggregation.
    """
    figures, unit = _chosen(methods, what)
    values: dict[str, list[float]] = {}  # method -> the figures of all clients of all its runs
    for name, of_method in figures.items():
        values[name] = []
        for run in of_method.items():
            values[name] += _figures_of_clients(*run)
    names = [plot.short(name, 24) for name in values]
    width = max(plot.WIDTH, 1.2 + 0.6 * len(names))  # inches: 1.2 for the axis, 0.6 for each box
    with plot.canvas(width, plot.HEIGHT) as (figure, axes):
        axes.boxplot(
            list(values.values()),
            widths=0.6,
            showfliers=False,  # all clients are drawn as points below
            medianprops={"color": plot.INK, "linewidth": 2},
        )

        generator = np.random.default_rng(0)  # seeded: the same runs give the same figure
        for place, in_box in enumerate(values.values(), start=1):  # boxes stand at 1, 2, …
            shifts = generator.uniform(-0.15, 0.15, len(in_box))  # lest points cover each other
            colour = plot.COLOURS[(place - 1) % len(plot.COLOURS)]
            axes.plot(place + shifts, in_box, "o", color=colour, markersize=3.5, alpha=0.7)

        axes.set_xticks(
            range(1, len(names) + 1), names, rotation=30, ha="right", rotation_mode="anchor"
        )
        axes.set_ylabel(unit)
        return plot.Drawing(
            figure,
            "boxes",
            "Over the clients",
            "A point for each client and seed after the last round; the box has the quartiles and "
            "the median.",
        )


def confusion(labels_N: Ints, predicted_N: Ints, classes: Sequence[str]) -> plot.Drawing:
    """Draw the confusion matrix of N samples and C classes.

    A cell has the percentage of the row's class that is predicted as the column's.
    """
    counts_CC = np.zeros((len(classes), len(classes)))  # [label, predicted label]
    np.add.at(counts_CC, (labels_N, predicted_N), 1)
    samples_C1 = counts_CC.sum(axis=1, keepdims=True)
    samples_C1 = np.maximum(1, samples_C1)  # a class without samples must not divide by 0
    counts_CC[counts_CC == 0] = np.nan  # drawn as a blank cell
    return plot.heat_map(
        "confusion",
        "Confusion matrix",
        "Percent of the test samples of each class (row) that are predicted as each (column); "
        "blank: none.",
        100 * counts_CC / samples_C1,
        classes,
        classes,
        "% of the class's samples",
        "predicted class",
        "class",
    )


def features(
    features_ND: Floats, labels_N: Ints, classes: Sequence[str], clients_N: Ints | None = None
) -> plot.Drawing:
    """Draw a map of samples by their features: t-SNE, or principal components of few samples.

    ``features_ND`` are D features of each of N samples. A point has the colour of its class and,
    with ``clients_N``, the marker of its client; markers repeat after eight clients. At most
    `MOST_SAMPLES` samples are drawn, chosen at random by a fixed seed.
    """
    chosen = drawn_rows(labels_N, MOST_SAMPLES)
    places_N2, method = places_in_map(features_ND[chosen])
    labels_N = labels_N[chosen]
    owners_N = np.zeros_like(labels_N) if clients_N is None else clients_N[chosen]
    with plot.canvas(plot.WIDTH, 4.3) as (figure, axes):
        colours = CLASS_COLOURS.take(labels_N, mode="wrap")
        for owner in np.unique(owners_N):
            is_owned = owners_N == owner
            axes.scatter(
                *places_N2[is_owned].T,
                s=14,
                c=colours[is_owned],
                marker=plot.MARKERS[owner % len(plot.MARKERS)],
                alpha=0.75,
                linewidths=0,
            )
        plot.name_classes(
            axes,
            labels_N,
            classes.__getitem__,
            places_N2,
            fontsize=9,
            ha="center",
            va="center",
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
        )
        shown = ""
        if len(chosen) < len(features_ND):
            shown = f" {len(chosen):,} of {len(features_ND):,} samples."
        caption = f"{method} of the features of test samples, coloured by class.{shown}"
        return plot.Drawing(figure, "features", "Features of test samples", caption)


def _folders(methods: Methods) -> dict[str, list[Path]]:
    """Return the folders of each method's runs; SettingsError for a method without a list of them.

    A text is a list of letters to Python, and would be read as that many folders.
    """
    found: dict[str, list[Path]] = {}
    for name, folders in methods.items():
        try:
            found[name] = _FOLDERS.validate_python(folders)  # it may be what a `glob` yields
        except ValidationError:
            wanted = "must be a list of run folders, as ['runs/a-1', 'runs/a-2']"
            raise SettingsError(f"{name}: {folders!r}: {wanted}") from None
    return found


def _chosen(methods: Methods, what: str) -> tuple[dict[str, dict[Path, str]], str]:
    """Return the figure that is drawn of each method's runs, by their folders, and the axis' words.

    Where ``what`` is "", some runs may be drawn by the head and others by prototypes; but of all it
    is an accuracy, or of all an AUC.
    """
    folders_of_method = _folders(methods)
    every_folder = list(chain(*folders_of_method.values()))
    names = dict.fromkeys(every_folder, what)
    unit = what
    if not what:
        for folder, result in results_of_folders(every_folder).items():
            names[folder] = result.name
            unit = axis(result)
    elif in_percent(what):
        unit += ", %"
    figures = {}
    for method, folders in folders_of_method.items():
        figures[method] = {folder: names[folder] for folder in folders}
    return figures, unit


def _means_of_rounds(folder: Path, name: str) -> dict[int, float]:
    """Return the mean of a run's figure over the clients, by the round after which it was measured.

    Accuracies are in percent, other metrics as they are. SettingsError for a run that never
    measured it.
    """
    means = {}
    for row in RunFolder(folder).each_row():
        figures = figures_of(row)
        if name in figures:
            means[row["evaluated-after-round"]] = factor(name) * figures[name]["mean"]
    if not means:
        raise SettingsError(f"{folder}: no evaluation of {name}")
    return means


def _figures_of_clients(folder: Path, name: str) -> list[float]:
    """Return each client's figure at the run's last evaluation; accuracies in percent.

    Clients without the figure are left out. HiddenClients if none has it; SettingsError if the last
    evaluation lacks it.
    """
    row = next(evaluations(RunFolder(folder).each_row(latest_first=True)), None)
    if row is None or name not in figures_of(row):
        raise SettingsError(f"{folder}: no evaluation of {name} after the last round")
    values = []
    for client in row["clients"].values():
        figures = figures_of(client)
        if name in figures:
            values.append(factor(name) * figures[name])
    if not values:
        raise HiddenClients(f"{folder}: secure aggregation hides single clients: no boxes")
    return values

"""How every figure looks, and how it gets into the page.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision can tell apart; lines differ in
dashes and markers too. Text and axes take the colour of the page's text (`INK` becomes ``currentColor``), so a figure
suits a light and a dark page. Text stays text.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from protofl_common.report.reading import Floats

Columns = Mapping[str, Sequence[object]]
"""Name, with its unit -> texts and numbers, all of one length."""
INK = "#010203"
"""Stands for the colour of the page's text."""
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D1F", "#999999")
CLASS_COLOURS = (*COLOURS[:6], "#C9B400", "#7F7F7F", "#8C510A", "#7E5BBF")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
MANY_POINTS = 1200
"""A cloud of more points is embedded as pixels, lest the page grow by megabytes."""
WIDTH, HEIGHT = 4.8, 3.3
"""Inches of a figure in one column; text is 10 points high, so it can be read on a telephone too."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "protofl",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "grid.color": "#8884",
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Drawing:
    """A figure of the page."""

    name: str
    """Of the figure, in a word or two with hyphens: its anchor in the page."""
    title: str
    caption: str
    """How to read it; plain text."""
    svg: str
    data: str
    """What it shows, as tab-separated values with a line of names, for a spreadsheet."""
    wide: bool = False
    """Takes the whole width of a desk's screen, and scrolls sideways on a telephone."""


@contextmanager
def canvas(width: float = WIDTH, height: float = HEIGHT) -> Iterator[tuple[Any, Any]]:
    """A figure of this size in inches with one set of axes, in our style."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


def draw(
    figure: Any, name: str, title: str, caption: str, *, columns: Columns | None = None, wide: bool = False
) -> Drawing:
    """The figure as SVG inside HTML: its ids made unique in the page, no outside references.

    ``columns``: what it shows; None: its lines.
    """
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    text = io.StringIO()
    nothing: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(text, format="svg", metadata=nothing, dpi=180)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', head)
    assert box is not None
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = body.replace("url(#", f"url(#{name}-").replace("xlink:href=", "href=")
    body = body.replace('href="#', f'href="#{name}-')
    body = body.replace(INK, "currentColor")
    alt = escape(f"{title}. {caption}", quote=True)
    least = f' style="min-width:{70 * figure.get_size_inches()[0]:.0f}px"' if wide else ""
    svg = f'<svg viewBox="{box[1]}" role="img" aria-label="{alt}"{least}>{body}'
    return Drawing(name, title, caption, svg, _as_tsv(columns or _of_lines(figure.axes[0])), wide)


def _of_lines(axes: Any) -> Columns:
    """A column for each line, blank where it has no point."""
    lines = [
        (f"{line.get_label()} ({axes.get_ylabel()})", dict(zip(*line.get_data(), strict=True))) for line in axes.lines
    ]
    places = sorted({place for _, line in lines for place in line})
    return {axes.get_xlabel(): places} | {name: [line.get(place, math.nan) for place in places] for name, line in lines}


def _as_tsv(columns: Columns) -> str:
    text = io.StringIO()
    writer = csv.writer(text, "excel-tab", lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows(map(_cell, row) for row in zip(*columns.values(), strict=True))
    return text.getvalue()


def _cell(value: object) -> str:
    """Blank for NaN. Names come from clients: none is a formula of the spreadsheet."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    text = str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def as_file(drawing: Drawing) -> str:
    """The figure as a file of its own, dark on white."""
    return drawing.svg.replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="color:#222;background:#fff" ', 1
    )


def line_style(index: int, points: int) -> dict[str, Any]:
    """Colour, dashes and, for few points, a marker of the ``index``-th line."""
    style: dict[str, Any] = {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[(index // len(COLOURS) + index) % len(DASHES)],
    }
    if points <= 60:
        style |= {"marker": MARKERS[index % len(MARKERS)], "markevery": max(1, points // 12)}
    return style


def plot_lines(axes: Any, rounds: Sequence[int], lines: Iterable[tuple[str, Sequence[float]]]) -> None:
    """A line per (name, values), values in the order of ``rounds``, each in the next style."""
    for index, (name, values) in enumerate(lines):
        axes.plot(rounds, values, label=name, **line_style(index, len(rounds)))


def class_columns(axes: Any, names: Sequence[str]) -> None:
    """Some of the classes' names below the columns 0, 1, 2, …; upright where they are long."""
    chosen, shown = some_ticks(names, 20, 10)
    axes.set_xticks(chosen, shown, rotation=90 if max(map(len, shown)) > 2 else 0)
    axes.set_xlabel("class")


def ink_on(share: float) -> str:
    """The colour of a number on a cell that is ``share`` (0 … 1) up the scale of colours, dark to light.

    Not pure black: that is what SVG leaves out, and the page puts its own ink in its place.
    """
    return "#111111" if share > 0.55 else "#ffffff"


def finite_mean(values: Floats) -> float:
    """The mean of the numbers among ``values``; NaN where there are none."""
    there = values[np.isfinite(values)]
    return float(there.mean()) if there.size else float("nan")


def legend_below(axes: Any, columns: int) -> None:
    """The legend under the axes, where it hides nothing; long names are cut."""
    handles, names = axes.get_legend_handles_labels()
    longest = int(14 * axes.figure.get_figwidth()) // columns
    axes.figure.legend(handles, [short(name, longest) for name in names], loc="outside lower center", ncols=columns)


def round_axis(axes: Any, label: str = "after round") -> None:
    """Whole numbers under the axes."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def round_columns(axes: Any, rounds: Sequence[int]) -> None:
    """Some of the rounds, at even distances, under the columns of a heat map."""
    step = next(step * ten for ten in (1, 10, 100, 1000, 10_000) for step in (1, 2, 5) if len(rounds) <= 8 * step * ten)
    chosen = [position for position, number in enumerate(rounds) if number % step == 0] or [0]
    axes.set_xticks(chosen, [str(rounds[position]) for position in chosen])
    axes.set_xlabel("after round")


def short(text: str, longest: int = 14) -> str:
    """A name that fits beside an axis."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def some_ticks(names: Sequence[str], most: int, longest: int = 14) -> tuple[list[int], list[str]]:
    """Positions and names of at most ``most`` ticks, evenly chosen."""
    step = -(-len(names) // most)
    chosen = list(range(0, len(names), step))
    return chosen, [short(names[index], longest) for index in chosen]

"""How every figure looks, and how it gets into the page.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision can tell apart; lines differ in
dashes and markers too. Text and axes take the colour of the page's text (`INK` becomes ``currentColor``), so a figure
suits a light and a dark page. Text stays text.
"""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from protofl_common.report.reading import Floats
from protofl_common.runs.figures import as_csv

Columns = Mapping[str, Sequence[object]]  # name, with its unit -> texts and numbers, all of one length
INK = "#010203"  # stands for the colour of the page's text
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D1F", "#999999")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
MANY_POINTS = 1200  # a cloud of more points is embedded as pixels, lest the page grow by megabytes
WIDTH, HEIGHT = 4.8, 3.3  # inches of one column: 10 points can be read on a telephone
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "protofl",
    "pdf.fonttype": 42,  # outlines that publishers accept
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "grid.color": "#8884",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Drawing:
    name: str  # of the figure, in a word or two with hyphens: its anchor in the page
    title: str
    caption: str  # how to read it; plain text
    svg: str
    data: str  # what it shows, as tab-separated values with a line of names, for a spreadsheet
    wide: bool = False  # takes the whole width of a desk's screen, and scrolls sideways on a telephone


@contextmanager
def canvas(width: float = WIDTH, height: float = HEIGHT) -> Iterator[tuple[Any, Any]]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


def draw(
    figure: Any, name: str, title: str, caption: str, *, columns: Columns | None = None, wide: bool = False
) -> Drawing:
    """The figure as SVG in HTML, with ids of its own and no outside references; ``columns``: its data, or its lines."""
    for part in (figure, *figure.axes):
        part.patch.set_alpha(0)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")), dpi=180)
    whole = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
    head, body = whole[whole.index("<svg") :].split(">", 1)
    box = head.partition('viewBox="')[2].partition('"')[0]
    for old, new in (
        (r'\bid="', f'id="{name}-'),
        (r"url\(#", f"url(#{name}-"),
        ("xlink:href=", "href="),
        ('href="#', f'href="#{name}-'),
        (INK, "currentColor"),
    ):
        body = re.sub(old, new, body)
    least = f' style="min-width:{70 * figure.get_size_inches()[0]:.0f}px"' if wide else ""
    alt = escape(f"{title}. {caption}", quote=True)
    svg = f'<svg viewBox="{box}" role="img" aria-label="{alt}"{least}>{body}'
    shown = columns or _of_lines(figure.axes[0])
    rows = [list(shown), *zip(*shown.values(), strict=True)]
    return Drawing(name, title, caption, svg, as_csv((map(_cell, row) for row in rows), "excel-tab"), wide)


def line_chart(
    name: str,
    title: str,
    caption: str,
    rounds: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    unit: str,
    *,
    below: str = "after round",
    legend: int = 3,
    from_zero: bool = False,
    powers: bool = False,
    styles: Sequence[int] = (),
) -> Drawing:
    """A line per name over the rounds, in these ``styles``; ``powers``: wide ranges on a logarithmic axis."""
    with canvas() as (figure, axes):
        for index, (label, values) in enumerate(lines.items()):
            axes.plot(rounds, values, label=label, **line_style(styles[index] if styles else index, len(rounds)))
        if from_zero:
            axes.set_ylim(bottom=0)
        positive = [value for values in lines.values() for value in values if value > 0]
        if powers and positive and max(positive) > 50 * min(positive):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")  # the default is a formula, which our figures do not typeset
            axes.yaxis.set_minor_formatter("")
        axes.set_ylabel(unit)
        round_axis(axes, below)
        legend_below(axes, legend)
        return draw(figure, name, title, caption)


def heat_map(axes: Any, values_RC: Floats, rows: Sequence[str], unit: str, **scale: Any) -> None:
    """Cells in colours from dark to light, the names of some rows beside them, and the scale."""
    image = axes.imshow(values_RC, aspect="auto", interpolation="none", cmap="cividis", **scale)
    axes.grid(False)
    axes.set_yticks(*some_ticks(rows, 30, 14), fontsize=9)
    axes.figure.colorbar(image, ax=axes, label=unit, pad=0.02)


def number_cells(axes: Any, values_RC: Floats, digits: int, size: float) -> None:
    """The number in each cell of a heat map, in an ink that stands out; none for NaN."""
    most = float(np.nanmax(values_RC))
    for (row, column), value in np.ndenumerate(values_RC):
        if np.isfinite(value):  # not pure black, which SVG leaves out, so that the page puts its own ink in its place
            ink = "#111111" if value > 0.55 * most else "#ffffff"
            axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=size, color=ink)


def _of_lines(axes: Any) -> Columns:
    unit, drawn = axes.get_ylabel(), axes.lines
    lines = [(f"{line.get_label()} ({unit})", dict(zip(*line.get_data(), strict=True))) for line in drawn]
    places = sorted({place for _, line in lines for place in line})
    return {axes.get_xlabel(): places} | {name: [line.get(place, math.nan) for place in places] for name, line in lines}


def _cell(value: object) -> str:
    """Blank for NaN. Names come from clients: none is a formula of the spreadsheet."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    text = str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def line_style(index: int, points: int) -> dict[str, Any]:
    """Colour, dashes and, for few points, a marker of the ``index``-th line."""
    dashes = DASHES[(index // len(COLOURS) + index) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes, **markers(index, points)}


def markers(index: int, points: int) -> dict[str, Any]:
    return {"marker": MARKERS[index % len(MARKERS)], "markevery": max(1, points // 12)} if points <= 60 else {}


def class_columns(axes: Any, names: Sequence[str]) -> None:
    chosen, shown = some_ticks(names, 20, 10)
    axes.set_xticks(chosen, shown, rotation=90 if max(map(len, shown)) > 2 else 0)
    axes.set_xlabel("class")


def finite_mean(values: Floats) -> float:
    present = values[np.isfinite(values)]
    return float(present.mean()) if present.size else math.nan


def legend_below(axes: Any, columns: int) -> None:
    handles, names = axes.get_legend_handles_labels()
    longest = int(14 * axes.figure.get_figwidth()) // columns
    axes.figure.legend(handles, [short(name, longest) for name in names], loc="outside lower center", ncols=columns)


def round_axis(axes: Any, label: str = "after round") -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def short(text: str, longest: int = 14) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def some_ticks(names: Sequence[str], most: int, longest: int = 14) -> tuple[list[int], list[str]]:
    """Positions and names of at most ``most`` ticks, evenly chosen."""
    chosen = list(range(0, len(names), -(-len(names) // most)))
    return chosen, [short(names[index], longest) for index in chosen]

"""How every figure looks, and how it gets into the page.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision can tell apart; lines differ in
dashes and markers too. Text and axes take the colour of the page's text (`INK` becomes ``currentColor``), so a figure
suits a light and a dark page. Text stays text.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from protofl_common.report.reading import Floats

Names = Sequence[str] | Sequence[int]
Lines = Mapping[str, Sequence[float]]  # a line's name -> its values over the rounds
FIGURE = """<figure id="{0}"><h3>{1}</h3>
<div class="box">{2}</div><figcaption>{3}</figcaption></figure>
"""
INK = "#010203"  # stands for the colour of the page's text
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D1F", "#999999")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
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


@contextmanager
def canvas(width: float = WIDTH, height: float = HEIGHT) -> Iterator[tuple[Any, Any]]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


def draw(figure: Any, name: str, title: str, caption: str) -> Markup:
    """The figure as SVG in HTML, with ids of its own and no outside references.

    ``name``, in a word or two with hyphens, is its anchor in the page; ``caption`` says how to read it, in plain text.
    """
    for part in (figure, *figure.axes):
        part.patch.set_alpha(0)
    figure.get_layout_engine().execute(figure)  # here once, or `savefig` draws all twice for it
    figure.set_layout_engine(None)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")), dpi=180)
    whole = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
    head, body = whole[whole.index("<svg") :].split(">", 1)
    box = head.partition('viewBox="')[2].partition('"')[0]
    body = body.replace("xlink:href=", "href=").replace(INK, "currentColor")
    body = re.sub(r'\bid="|url\(#|href="#', rf"\g<0>{name}-", body)
    svg = f'<svg viewBox="{box}" role="img" aria-label="{escape(f"{title}. {caption}")}">{body}'
    return Markup(FIGURE).format(name, title, Markup(svg), caption)


def line_chart(
    name: str, title: str, caption: str, places: Sequence[float], lines: Lines, unit: str, below: str = "after round"
) -> Markup:
    """A line per name over rounds, or other places; losses and times of wide range on a logarithmic axis."""
    with canvas() as (figure, axes):
        for index, (label, values) in enumerate(lines.items()):
            look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)]}
            look |= {"linestyle": DASHES[(index // len(COLOURS) + index) % len(DASHES)]}
            if len(places) <= 60:
                look |= {"marker": MARKERS[index % len(MARKERS)], "markevery": max(1, len(places) // 12)}
            axes.plot(np.array(places)[known := ~np.isnan(values)], np.array(values)[known], label=label, **look)
        positive = [value for values in lines.values() for value in values if value > 0]
        if unit in ("loss", "seconds") and positive and max(positive) > 50 * min(positive):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")  # the default is a formula, which our figures do not typeset
            axes.yaxis.set_minor_formatter("")
        axes.set(xlabel=below, ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=below.endswith("round"), nbins=8))
        many = 3 if max(map(len, lines)) <= 16 else 2
        names = [short(label, int(14 * WIDTH) // many) for label in lines]
        figure.legend(axes.lines, names, loc="outside lower center", ncols=many)
        return draw(figure, name, title, caption)


def heat_map(
    name: str, title: str, caption: str, values_RC: Floats, rows: Names, columns: Names, unit: str, below: str
) -> Markup:
    """Cells from dark to light, blank for NaN; from 0, and per cent to 100."""
    texts = [str(column) for column in columns]
    with canvas(WIDTH, min(max(HEIGHT, 1.2 + 0.17 * len(rows)), 8.0)) as (figure, axes):
        look = {"aspect": "auto", "interpolation": "none", "cmap": "cividis", "vmax": 100 if "%" in unit else None}
        image = axes.imshow(values_RC, vmin=0, **look)
        axes.grid(False)
        axes.set_yticks(*some_ticks([str(row) for row in rows], 30), fontsize=9)
        axes.set_xticks(*some_ticks(texts, 12, 10), rotation=90 if max(map(len, texts)) > 4 else 0, fontsize=9)
        axes.set_xlabel(below)
        figure.colorbar(image, ax=axes, label=unit, pad=0.02)
        return draw(figure, name, title, caption)


def short(text: str, longest: int = 14) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def some_ticks(names: Sequence[str], most: int, longest: int = 14) -> tuple[list[int], list[str]]:
    """Positions and names of at most ``most`` ticks, evenly chosen."""
    chosen = list(range(0, len(names), -(-len(names) // most)))
    return chosen, [short(names[index], longest) for index in chosen]

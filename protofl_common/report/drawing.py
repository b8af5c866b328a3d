"""How every figure looks, and how it gets into the page or into files of its own.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision can tell
apart; lines differ in dashes and markers too. Text and axes take the colour of the page's text
(`INK` becomes ``currentColor``), so a figure suits a light and a dark page. Text stays text.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from protofl_common.basics.files import replacing
from protofl_common.report.reading import Floats, Ints

Names = Sequence[str] | Sequence[int]
Lines = Mapping[str, Sequence[float]]  # a line's name -> its values over the rounds
FIGURE = """<figure id="{0}"><h3>{1}</h3>
<div class="box">{2}</div><figcaption>{3}</figcaption></figure>
"""
INK = "#010203"  # stands for the colour of the page's text
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D1F")
DASHES = ("-", "--", "-.", ":")  # seven colours and four dashes: the first 28 lines all differ
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
WIDTH = 4.8  # inches of one column: 10 points can be read on a telephone
HEIGHT = 3.3  # inches
NAMED_CLASSES = 40  # with more classes a map of points carries no names
MOST_NUMBERED_CELLS = 120  # of a heat map; in more of them no number can be read
FORMATS = ("svg", "pdf")
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "protofl",
    "pdf.fonttype": 42,  # outlines that publishers accept
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#8884",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}


@contextmanager
def in_style() -> Iterator[None]:
    """Set the report's style in the block; letters that its font lacks raise no warnings there."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a browser has other fonts
        yield


@contextmanager
def canvas(width: float = WIDTH, height: float = HEIGHT) -> Iterator[tuple[Any, Any]]:
    """Give a matplotlib figure of this size in inches, and its axes, in the report's style.

    The style is set only within the block, so all parts of the figure must be made there.
    """
    with in_style():
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


@dataclass(frozen=True)
class Drawing:
    """A finished figure, which the page shows and `save` writes into files.

    ``name``, in a word or two with hyphens, is its anchor in the page and the name of its files;
    ``caption`` says how to read it, in plain text.
    """

    figure: Any  # of matplotlib
    name: str
    title: str
    caption: str

    def as_html(self) -> Markup:
        """Return the figure as SVG in HTML, with ids of its own and no outside references."""
        text = io.StringIO()
        with in_style():
            for part in (self.figure, *self.figure.axes):
                part.patch.set_alpha(0)  # lets the page's own background through
            layout = self.figure.get_layout_engine()
            layout.execute(self.figure)  # now, or `savefig` would draw all twice for it
            self.figure.set_layout_engine(None)
            self.figure.savefig(text, format="svg", dpi=180)

        # the metadata have the date, and addresses of other sites
        whole = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
        # what stands before the tag <svg …> is left out, and of the tag only its viewBox is kept
        opening_tag, body = whole[whole.index("<svg") :].split(">", 1)
        view_box = opening_tag.partition('viewBox="')[2].partition('"')[0]
        body = body.replace("xlink:href=", "href=").replace(INK, "currentColor")
        # one page has many figures: ids, and references to them, begin with the name of theirs
        body = re.sub(r'\bid="|url\(#|href="#', rf"\g<0>{self.name}-", body)
        label = escape(f"{self.title}. {self.caption}")
        svg = f'<svg viewBox="{view_box}" role="img" aria-label="{label}">{body}'
        return Markup(FIGURE).format(self.name, self.title, Markup(svg), self.caption)

    def save(self, folder: str | Path, name: str = "") -> list[Path]:
        """Write NAME.svg and NAME.pdf into the folder, and return their paths.

        NAME is ``name``, or the figure's own if that is "". The same figure gives the same bytes,
        whenever it is drawn: the files have no date.
        """
        files = []
        for kind in FORMATS:
            file = Path(folder) / f"{name or self.name}.{kind}"
            key_of_date = "Date" if kind == "svg" else "CreationDate"
            with in_style(), replacing(file) as beside:
                self.figure.savefig(beside, format=kind, metadata={key_of_date: None}, dpi=300)
            files.append(file)
        return files


def line_chart(
    name: str,
    title: str,
    caption: str,
    places: Sequence[float],
    lines: Lines,
    unit: str,
    below: str = "after round",
    bands: Mapping[str, tuple[Floats, Floats]] | None = None,
) -> Drawing:
    """Draw a line per name; `Drawing` says what ``name``, ``title`` and ``caption`` are for.

    ``places`` are the positions on the horizontal axis, one for each value of a line: rounds, or
    what ``below``, the words under that axis, says. If these end in "round", only whole numbers are
    marked. ``unit`` stands at the vertical axis, which is logarithmic for losses that differ by a
    factor of more than 50. A value of NaN, of a round that was not measured, is left out.
    ``bands`` has the lower and the upper edge of the band around a line.
    """
    with canvas() as (figure, axes):
        for index, (label, values) in enumerate(lines.items()):
            is_known = ~np.isnan(values)
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(
                np.array(places)[is_known],
                np.array(values)[is_known],
                color=colour,
                linestyle=DASHES[index % len(DASHES)],
                marker=MARKERS[index % len(MARKERS)],
                markevery=max(1, len(places) // 12),  # about 12 on each line
            )
            if bands and label in bands:
                axes.fill_between(places, *bands[label], color=colour, alpha=0.18, linewidth=0)

        positive = [value for values in lines.values() for value in values if value > 0]
        if unit == "loss" and positive and max(positive) > 50 * min(positive):
            axes.set_yscale("log")
            # by default ticks would be formulas such as 10², which our figures do not typeset
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        axes.set(xlabel=below, ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=below.endswith("round"), nbins=8))

        names = [short(label, 33) for label in lines]  # two of them have room beside each other
        figure.legend(axes.lines, names, loc="outside lower center", ncols=2)
        return Drawing(figure, name, title, caption)


def heat_map(
    name: str,
    title: str,
    caption: str,
    values_RC: Floats,
    rows: Names,
    columns: Names,
    unit: str,
    below: str,
    beside: str = "",
) -> Drawing:
    """Draw numbers [R, C], of R rows and C columns, as cells from dark to light; NaN is left blank.

    ``rows`` and ``columns`` are their names; ``below`` stands under the axis of columns, ``beside``
    at that of rows. The scale has the range of the numbers, but begins at 0 where they are whole,
    as counts are. Where the cells are few, each also has its number.
    """
    # inches: 1.2 for the other axis and its names, and 0.17 for each row; at most 8
    height = min(max(HEIGHT, 1.2 + 0.17 * len(rows)), 8.0)
    column_names = list(map(str, columns))
    rotation = 90 if max(map(len, column_names)) > 4 else 0  # longer ones would touch each other
    are_counts = bool((values_RC[~np.isnan(values_RC)] % 1 == 0).all())
    with canvas(WIDTH, height) as (figure, axes):
        image = axes.imshow(
            values_RC,
            vmin=0 if are_counts else None,
            aspect="auto",
            interpolation="none",
            cmap="cividis",
        )
        axes.grid(False)
        axes.set_yticks(*some_ticks(list(map(str, rows)), 30), fontsize=9)
        axes.set_xticks(*some_ticks(column_names, 12, 10), rotation=rotation, fontsize=9)
        axes.set_xlabel(below)
        axes.set_ylabel(beside)
        figure.colorbar(image, ax=axes, label=unit, pad=0.02)
        has_wide_cells = values_RC.shape[1] <= 12  # wide enough for a number
        if has_wide_cells and values_RC.size <= MOST_NUMBERED_CELLS:
            decimals = 1 if "%" in unit else 2
            _number_cells(axes, image, values_RC, 0 if are_counts else decimals)
        return Drawing(figure, name, title, caption)


def name_classes(
    axes: Any, labels: Ints, names: Callable[[int], str], places: Floats, **look: Any
) -> None:
    """Write the name of each class into a map, in the middle of the points of the class.

    Each point of the map has one of the ``labels`` and one of the ``places``; ``look`` says how
    matplotlib writes. With more than `NAMED_CLASSES` classes no names are written. The axes lose
    their ticks and frame, as distances in the map have no unit.
    """
    present = np.unique(labels)
    if len(present) <= NAMED_CLASSES:
        for label in present:
            middle = np.median(places[labels == label], axis=0)
            name = axes.annotate(short(names(label)), middle, weight="bold", **look)
            name.set_gid(f"class-name-{label}")  # the page gives it a rim
    axes.set(xticks=[], yticks=[])
    axes.margins(0.08)
    axes.spines[:].set_visible(False)


def _number_cells(axes: Any, image: Any, values_RC: Floats, decimals: int) -> None:
    """Write each number into its cell: white where the cell is dark, else black."""
    for row, column in np.argwhere(~np.isnan(values_RC)):
        value = values_RC[row, column]
        is_light = image.norm(value) > 0.5  # on the colour scale, from 0 (dark) to 1 (light)
        axes.text(
            column,
            row,
            f"{value:.{decimals}f}",
            color="#111111" if is_light else "#FFFFFF",
            fontsize=8,
            ha="center",
            va="center",
        )


def short(text: str, longest: int = 14) -> str:
    """Cut a text that has more than ``longest`` characters, and end it with an ellipsis."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def some_ticks(names: Sequence[str], most: int, longest: int = 14) -> tuple[list[int], list[str]]:
    """Return positions and names of at most ``most`` ticks, evenly chosen."""
    step = -(-len(names) // most)  # rounded up
    chosen = list(range(0, len(names), step))
    return chosen, [short(names[index], longest) for index in chosen]

"""A report read back: its tags, texts, tables and figures, and what these are drawn from."""

import re
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

from protofl_common.report import drawing
from protofl_common.report.reading import RecordedRun
from protofl_common.report.style import POLICY

VOID = {"meta", "br", "hr", "img", "link", "input"}
LOADING = {"src", "href", "srcset", "data", "action", "xlink:href", "poster"}
FORBIDDEN = {"script", "iframe", "object", "embed", "link", "base", "form", "video", "audio"}


class Page(HTMLParser):
    """A page whose tags are closed in order and that loads nothing; AssertionError otherwise."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []  # tags that are not closed yet, the innermost last
        self.tags: list[tuple[str, dict[str, str]]] = []  # with their attributes
        self.ids: list[str] = []
        self.figures: dict[str, str] = {}  # id -> the texts in it
        self.tables: list[list[list[str]]] = []  # rows of cells, the head first
        self.texts: list[str] = []
        self.feed(self.source)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        self.assert_self_contained()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag, and begin the figure, table, row or cell that it stands for."""
        values = {name: value or "" for name, value in attrs}
        self.tags.append((tag, values))
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "figure":
            self.figures[values["id"]] = ""
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open[-1] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        self.texts.append(data)
        if "figure" in self.open:
            self.figures[list(self.figures)[-1]] += data + "\n"
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    @property
    def sections(self) -> list[str]:
        """Return the ids of the page's sections, in order."""
        return [attrs["id"] for tag, attrs in self.tags if tag == "section"]

    def svg(self, figure: str) -> str:
        """Return the ``<svg>`` element of the figure with this id, as text."""
        svg_in_figure = rf'<figure id="{re.escape(figure)}".*?(<svg.*?</svg>)'
        return re.search(svg_in_figure, self.source, re.DOTALL)[1]

    def marks(self, figure: str) -> list[int]:
        """Return how many marks each scatter plot of a figure has, in the order drawn."""
        _before, *clouds = re.split(r'<g id="[^"]*PathCollection_\d+"', self.svg(figure))
        numbers = []
        for cloud in clouds:
            until_next_group = cloud.split('<g id="')[0]
            group = re.sub(r"<defs>.*?</defs>", "", until_next_group, flags=re.DOTALL)
            # a marker that is defined once is drawn by <use>, any other as a <path> of its own
            numbers.append(group.count("<use ") or group.count("<path "))
        return numbers

    def table(self, *heads: str) -> list[list[str]]:
        """Return the rows below the head of the one table whose head begins with ``heads``."""
        (found,) = [table for table in self.tables if tuple(table[0][: len(heads)]) == heads]
        _head, *rows = found
        return rows

    def assert_self_contained(self) -> None:
        """Nothing is loaded from anywhere, no script runs, no id stands twice.

        Every figure could be drawn and has a caption, and every drawing a text for screen readers.
        """
        assert len(set(self.ids)) == len(self.ids), sorted(self.ids)
        for tag, attrs in self.tags:
            assert tag not in FORBIDDEN, tag
            if tag == "svg":
                assert attrs["role"] == "img"
                assert attrs["aria-label"]
            for name, value in attrs.items():
                assert not name.startswith("on"), name  # onclick and the like run a script
                self.assert_loads_nothing(name, value)
        (style,) = re.findall(r"<style>(.*?)</style>", self.source, re.DOTALL)
        assert "url(" not in style
        assert "@import" not in style
        assert "A figure could not be drawn" not in self.source
        assert [tag for tag, _ in self.tags].count("figcaption") == len(self.figures)
        assert self.source.count(POLICY) == 1

    def assert_loads_nothing(self, name: str, value: str) -> None:
        """The addresses in an attribute's value are places of this page, or an image in itself."""
        places = []
        if name in LOADING and not value.startswith("data:image/png;base64,"):
            places.append(value)
        if name != "aria-label":  # is read aloud only
            places += re.findall(r"url\(([^)]*)\)", value)
        for place in places:
            assert place.startswith("#"), place[:80]
            assert place[1:] in self.ids, place


def chart_arguments(
    function: Callable[[RecordedRun], Iterable[object]], folder: Path, chart: str
) -> list[Any]:
    """Return the positional arguments with which a ``function`` of the report draws its last chart.

    The report is of the run in ``folder``, and ``chart`` is ``"line_chart"`` or ``"heat_map"``.
    """
    with patch.object(drawing, chart, wraps=getattr(drawing, chart)) as made:
        assert list(function(RecordedRun(folder)))
    return list(made.call_args.args)

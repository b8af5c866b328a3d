"""The drawing of what an algorithm exchanges, as SVG.

It shows a client, a server, and an arrow for each entry of the algorithm's row.
"""

from html import escape
from textwrap import wrap

from protofl_common.algorithms.base import Algorithm
from protofl_common.wire.schema import Declared

USUAL = {  # docs/algorithms/index.md says so
    "all weights of the model": "",
    "a prototype of each class": "",
    "a prototype of each class, with the number of samples behind it": " with counts",
}
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 540 {height}" \
font-family="Helvetica, sans-serif" role="img">
<title>{title}</title>
<style>
text {{ font-size: 14px; fill: #1f2430 }} .strong {{ font-weight: bold }} \
.small {{ font-size: 12.5px; fill: #4a5260 }}
.paper {{ fill: #ffffff }} .box {{ fill: #f3f6fa; stroke: #8a94a3 }} \
path {{ fill: none; stroke-width: 2 }}
.up {{ stroke: #a3470f }} .down {{ stroke: #22609f }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e8ebf0 }} .small {{ fill: #b9c1cc }} .paper {{ fill: #23272f }} \
.box {{ fill: #2f3540; stroke: #8a94a3 }}
.up {{ stroke: #f0a36b }} .down {{ stroke: #7db4ee }}
}}
</style>
<rect class="paper" width="540" height="{height}" rx="8"/>"""


def alternative(row: Algorithm, stays: str) -> str:
    """Return the drawing in words."""
    up, down = in_words(row.exchange.up), in_words(row.exchange.down)
    travels = f"Up and down: {up}" if up == down else f"Up: {up}. Down: {down}"
    return f"{travels}. At the client stays: {stays}."


def drawing(row: Algorithm, stays: str) -> str:
    """Return the SVG of one row of the catalog; ``stays`` says what never leaves a client."""
    arrows = [("up", name, entry.words) for name, entry in row.exchange.up.items()]
    arrows += [("down", name, entry.words) for name, entry in row.exchange.down.items()]
    middle: list[str] = []
    y = 42  # of the next arrow, in pixels from the top
    for direction, name, words in arrows:
        explained = wrap(words, 38)
        middle += _arrow(y, direction, name, explained)
        y += 36 + 15 * len(explained)
    stay = wrap(f"stays: {stays}", 19)
    height = max(y - 12, 72 + 16 * len(stay), 92)
    lines = [HEAD.format(height=height, title=escape(f"{row.title}. {alternative(row, stays)}"))]
    for x, width, name in ((10, 150, "client"), (450, 80, "server")):
        size = f'width="{width}" height="{height - 20}"'
        lines.append(f'<rect class="box" x="{x}" y="10" {size} rx="6"/>')
        lines.append(f'<text class="strong" x="{x + 12}" y="34">{name}</text>')
    for i, text in enumerate(stay):
        lines.append(f'<text class="small" x="22" y="{56 + 16 * i}">{escape(text)}</text>')
    if not arrows:
        middle = ['<text x="305" y="50" text-anchor="middle">nothing travels</text>']
    return "\n".join([*lines, *middle, "</svg>"])


def _arrow(y: int, direction: str, name: str, explained: list[str]) -> list[str]:
    """Return an arrow at this height, with its name above and the explanation below."""
    line = f"M444 {y} H168 m8 -5 l-8 5 l8 5"
    if direction == "up":
        line = f"M166 {y} H442 m-8 -5 l8 5 l-8 5"
    named = f'<tspan class="strong">{escape(name.replace("_", " "))}</tspan>'
    lines = [
        f'<path class="{direction}" d="{line}"/>',
        f'<text x="305" y="{y - 7}" text-anchor="middle">{named}</text>',
    ]
    small = '<text class="small" x="305" y="{}" text-anchor="middle">{}</text>'
    return lines + [small.format(y + 16 + 15 * i, escape(text)) for i, text in enumerate(explained)]


def in_words(declared: Declared) -> str:
    """Return each entry by its name and, unless it is as usual, its words."""
    entries = [f"{name.replace('_', ' ')} ({entry.words})" for name, entry in declared.items()]
    text = ", ".join(entries) or "nothing"
    for words, short in USUAL.items():
        text = text.replace(f" ({words})", short)
    return text

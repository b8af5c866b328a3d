"""The drawing of what an algorithm exchanges, as SVG: a client, a server, and an arrow for each entry of its row."""

from html import escape
from textwrap import wrap

from protofl_common.experiment.catalog import Algorithm
from protofl_common.wire.schema import Declared

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="Helvetica, Arial, sans-serif" role="img">
<title>{title}</title>
<style>
text {{ font-size: 14px; fill: #1f2430 }} .strong {{ font-weight: bold }} .small {{ font-size: 12.5px; fill: #4a5260 }}
.paper {{ fill: #ffffff }} .box {{ fill: #f3f6fa; stroke: #8a94a3 }} path {{ fill: none; stroke-width: 2 }}
.up {{ stroke: #a3470f }} .down {{ stroke: #22609f }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e8ebf0 }} .small {{ fill: #b9c1cc }} .paper {{ fill: #23272f }} .box {{ fill: #2f3540; stroke: #8a94a3 }}
.up {{ stroke: #f0a36b }} .down {{ stroke: #7db4ee }}
}}
</style>
<rect class="paper" width="760" height="{height}" rx="8"/>"""
STEP = 46


def alternative(row: Algorithm, stays: str) -> str:
    """Return the drawing in words."""
    return f"Up: {_names(row.exchange.up)}. Down: {_names(row.exchange.down)}. At the client stays: {stays}."


def drawing(row: Algorithm, stays: str) -> str:
    """Return the SVG of one row of the catalog; ``stays`` says what never leaves a client."""
    arrows = [("up", name, entry.words) for name, entry in row.exchange.up.items()]
    arrows += [("down", name, entry.words) for name, entry in row.exchange.down.items()]
    kept = wrap(f"stays: {stays}", 24)
    height = max(40 + STEP * len(arrows), 76 + 18 * len(kept), 96)
    lines = [HEAD.format(height=height, title=escape(f"{row.title}. {alternative(row, stays)}"))]
    for x, width, name in ((16, 190, "client"), (624, 120, "server")):
        lines += [f'<rect class="box" x="{x}" y="16" width="{width}" height="{height - 32}" rx="6"/>']
        lines += [f'<text class="strong" x="{x + 14}" y="42">{name}</text>']
    lines += [f'<text class="small" x="30" y="{66 + 18 * i}">{escape(text)}</text>' for i, text in enumerate(kept)]
    for i, arrow in enumerate(arrows):
        lines += _arrow(50 + STEP * i, *arrow)
    if not arrows:
        lines += ['<text x="415" y="52" text-anchor="middle">nothing travels</text>']
    return "\n".join([*lines, "</svg>"])


def _arrow(y: int, direction: str, name: str, words: str) -> tuple[str, ...]:
    line = f"M214 {y} H614 m-9 -5 l9 5 l-9 5" if direction == "up" else f"M616 {y} H216 m9 -5 l-9 5 l9 5"
    named = f'<tspan class="strong">{escape(name.replace("_", " "))}</tspan>'
    return (
        f'<path class="{direction}" d="{line}"/>',
        f'<text x="415" y="{y - 8}" text-anchor="middle">{named}</text>',
        f'<text class="small" x="415" y="{y + 17}" text-anchor="middle">{escape(words)}</text>',
    )


def _names(declared: Declared) -> str:
    return ", ".join(f"{name.replace('_', ' ')} ({entry.words})" for name, entry in declared.items()) or "nothing"

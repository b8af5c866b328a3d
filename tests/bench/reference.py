"""What documents and pyproject.toml say of the code, made from it.

``python -m tests.bench.reference`` writes it: the pages in ``docs/reference``; of a page in
``docs/algorithms`` the drawing and the end; the tables of data sets, partitions and a node's keys;
and ``[tool.flwr.app.config]`` of pyproject.toml, where Flower reads the defaults. A test compares
what is committed with what this makes, so it cannot go stale. Nothing here depends on the machine,
on the Python version, or on other packages that are installed.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_type_hints

from protofl_common.algorithms.base import Algorithm
from protofl_common.config.datasets import DATASETS, PARTITIONS, partitions_that_read
from protofl_common.config.options import key_of, range_text
from protofl_common.config.sections import SECTIONS
from protofl_common.experiment.catalog import CATALOG, options_of_a_run
from protofl_common.experiment.node import LIMITED, NODE_ROWS
from protofl_common.tools.cli import COMMANDS
from protofl_common.tools.cli.list import lists
from protofl_common.wire.schema import Vectors, Weights
from tests.bench.travels import alternative, drawing, in_words
from tests.support.commands import parsers_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MADE = "<!-- Generated below by `make docs`. -->"
BESIDE, END = "<!-- Made from which.md. -->", "<!-- end -->"
TRAVELS = "<!-- Made from the code and the algorithms' pages. -->"
DATA_SETS = "<!-- Made from the rows of data sets. -->"
NODE = "<!-- Made from the keys of a node config. -->"
SETTINGS, SETTINGS_END = "# Made from the code by `make docs`.", "# Made until here."
SHARES = "<!-- Made from the rows of partitions. -->"
TYPES = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}
FEW = 8
"""More choices than these are left to the page of choices."""


def pages() -> dict[str, str]:
    """Return the content of each file that is made, whole or in part, by its path in ``docs``."""
    made: dict[str, Iterable[str]] = {
        "reference/settings.md": settings(),
        "reference/choices.md": choices(),
        "reference/commands.md": commands(),
        "algorithms/index.md": [_between(_written("index"), TRAVELS, _what_travels()).rstrip()],
        "data.md": [_data().rstrip()],
        "security.md": [_security().rstrip()],
        "../pyproject.toml": [_pyproject().rstrip()],
    }
    for name, row in CATALOG.items():
        made[f"algorithms/{name}.md"] = algorithm(name, row)
        made[f"algorithms/travels/{name}.svg"] = [drawing(row, _stays(name))]
    return {file: "\n".join(lines) + "\n" for file, lines in made.items()}


def settings() -> Iterator[str]:
    """Yield the lines of the page of all general settings, by section."""
    yield from _head("Settings", "Every key of a run's configuration, with its default.")
    yield (
        "*Changes* says what a setting changes: "
        "the result; the data; the name and place of the results; the machine;"
    )
    yield (
        "who is waited for; the display. "
        "A key with ✓ may also stand in a site's node config, which then counts."
    )
    for section in SECTIONS.values():
        yield from ("", f"## {str(section.__doc__).rstrip('.')}", "")
        yield from _options(section, "")


def algorithm(name: str, row: Algorithm) -> Iterator[str]:
    """Yield the page of an algorithm as it is written, and below it settings and code.

    In what is written, the drawing's words and the comparison with others are made anew.
    """
    written, _, _ = _written(name).partition(MADE)
    image = f"](travels/{name}.svg)"
    in_words = f"![{alternative(row, _stays(name))}{image}"
    written = re.sub(rf"!\[.*{re.escape(image)}", lambda _: in_words, written)
    written = _between(written, BESIDE, _beside_others(row.title))
    yield from (written.rstrip(), "", MADE, "", "## Settings", "")
    if fields(row.hparams):
        yield from _options(row.hparams, f"{name}.", changes=False)
    else:
        yield "This algorithm has no settings of its own."
    yield from ("", f"{row.title}: {_paper(name)}. {' '.join(_facts(row))}", "")
    halves = [f"{half.partition(':')[0].replace('.', '/')}.py" for half in (row.client, row.server)]
    client, server = (f"[`{file}`](../../{file})" for file in halves)
    yield f"Code: client {client}, server {server}."


def _written(name: str) -> str:
    return (DOCS / "algorithms" / f"{name}.md").read_text(encoding="utf-8")


def _between(text: str, mark: str, lines: Iterable[str], end: str = END) -> str:
    """Return ``text`` with these lines from ``mark`` to the next ``end``."""
    made = "\n".join((mark, *lines, end))
    return re.sub(f"{mark}.*?{end}", lambda _: made, text, flags=re.DOTALL)


def _what_travels() -> Iterator[str]:
    """Yield the table of all algorithms in ``index.md``: rows of the catalog, and what stays."""
    _, explained = lists()["algorithms"]
    rows = []
    for name, row in CATALOG.items():
        down = in_words(row.exchange.down)
        up = in_words(row.exchange.up)
        (differ,) = re.findall(r"Different networks: (\w+)\.", explained[name])
        goes_up = "the same"
        if up != down:
            goes_up = up
            for brackets in re.findall(r" \(.*?\)", up):
                if brackets in down:  # and so explained there
                    goes_up = goes_up.replace(brackets, "")
        rows.append((f"[`{name}`]({name}.md)", _paper(name), differ, down, goes_up, _stays(name)))
    return _table(("`algo`", "paper", "different networks", "down", "up", "stays"), rows)


def _beside_others(title: str) -> Iterator[str]:
    """Yield an algorithm's accuracies in four situations, between training alone and FedAvg."""
    page = (DOCS / "notebook" / "2026-11-which.md").read_text(encoding="utf-8")
    _, _, measured = page.partition("<!-- measured -->")
    first = re.search(r"(?m)(^\|.*\n)+", measured)
    first_table = first[0] if first else ""
    final = re.sub(r" \(\d+\.\d\)", "", first_table)  # without accuracies after ten rounds

    names_and_situations = slice(1, 6)  # cells of a line, before which there is an empty one
    heads, *rows = [line.split("|")[names_and_situations] for line in final.splitlines()]
    shown = []
    for cells in rows:
        cells = [cell.strip() for cell in cells]
        if cells[0] == title:
            shown.append(tuple(cells))
        elif cells[0] in ("Local", "FedAvg"):  # without deviations
            shown.append(tuple(cell.partition(" ±")[0] for cell in cells))
    yield from _table(tuple(cell.strip() for cell in heads), shown)


def _paper(name: str) -> str:
    """Return an algorithm's paper, with the link of its page if that has one."""
    link = re.search(r"\]\((https://(?:arxiv|doi|openaccess)[^)]*)\)", _written(name))
    return f"[{CATALOG[name].paper}]({link[1]})" if link else CATALOG[name].paper


def _stays(name: str) -> str:
    """Return what never leaves a client, as the words of the drawing on the page say at their end.

    AssertionError if the page has no such drawing.
    """
    stays = re.search(rf"At the client stays: (.*)\.\]\(travels/{name}\.svg\)", _written(name))
    wanted = f"![… At the client stays: ….](travels/{name}.svg)"
    assert stays, f"docs/algorithms/{name}.md lacks its drawing: {wanted}"
    return stays[1]


def _data() -> str:
    """Return the page of data with its tables of data sets in files, and of partitions."""
    text = (DOCS / "data.md").read_text(encoding="utf-8")
    names: dict[str, str] = {}
    for name, row in DATASETS.items():
        names[row.files] = f"{names.get(row.files, '')} `{name}`".strip()
    sets = [(named, files) for files, named in names.items() if files]
    text = _between(text, DATA_SETS, _table(("name", "files in `data-dir`"), sets))
    shares = [(f"`{name}`", _plain(row.help)) for name, row in PARTITIONS.items()]
    return _between(text, SHARES, _table(("name", "a client's share"), shares))


def choices() -> Iterator[str]:
    """Yield the page of all names that a setting can take."""
    yield from _head("Names that settings take", "What `protofl list` prints.")
    for name, (setting, entries) in lists().items():
        if name == "algorithms":  # they have a page; other packages' would stand here, too
            continue
        key = re.split("[:;]", setting)[0]
        yield from ("", f"## {name.capitalize()}", "", f"`{key}`", "")
        rows = [(f"`{choice}`", _plain(said)) for choice, said in entries.items()]
        yield from _table(("name", ""), rows)


def commands() -> Iterator[str]:
    """Yield the page of all subcommands with their arguments."""
    what = "What `protofl COMMAND --help` prints, beside `--help` itself."
    yield from _head("Command line", what)
    for name in COMMANDS:
        parser, *actions = parsers_of(name)
        yield from _command("##", parser)
        for action in actions:
            yield from _command("###", action)


def _command(level: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    text = str(parser.description).strip()
    yield from ("", f"{level} {parser.prog}", "", "```text", text, "```", "")
    yield from _table(("argument", ""), (_argument(action) for action in parser._actions[1:]))


def _head(title: str, source: str) -> tuple[str, ...]:
    return (f"# {title}", "", MADE, "", source)


def _options(section: type, prefix: str, changes: bool = True) -> Iterator[str]:
    """Yield the table of a section's settings; ``changes``: with the column of that name."""
    hints = get_type_hints(section)
    heads = ["key", "default", "values", "meaning"]
    if changes:
        heads.insert(-1, "changes")
    rows = []
    for field in fields(section):
        key = prefix + key_of(field.name)
        values = _values(hints[field.name], field.metadata)
        row = [f"`{key}`", f"`{json.dumps(field.default)}`", values, _plain(_meaning(key, field))]
        if changes:
            of_sites_too = " ✓" if field.metadata["site"] else ""
            row.insert(-1, field.metadata["affects"] + of_sites_too)
        rows.append(tuple(row))
    return _table(tuple(heads), rows)


def _values(kind: type, legal: Any) -> str:
    """Return which values a setting takes; ``legal`` is the metadata of its field."""
    if legal["choices"] is None:
        text = TYPES[kind] + range_text(legal)
        for words, sign in (("at least", "≥"), ("at most", "≤"), ("above", ">")):
            text = text.replace(words, sign)
        return text
    if len(legal["choices"]) > FEW:
        others = f", or {legal['or_words']}" if legal["or_words"] else ""
        return f"[a name](../reference/choices.md){others}"
    return ", ".join(f"`{choice}`" for choice in legal["choices"])


def _meaning(key: str, setting: Field[Any]) -> str:
    """Return the help of a setting, after the names of the partitions that alone read it."""
    readers = ", ".join(partitions_that_read(key))
    return ": ".join(filter(None, (readers, setting.metadata["help"])))


def _security() -> str:
    """Return the page of security with its table of all keys of a node config."""
    rows = []
    for key, row in NODE_ROWS.items():
        default = "" if row.default is None else f"`{json.dumps(row.default)}`"
        limits = ", ".join(f"`{setting}`" for setting, limit in LIMITED.items() if limit == key)
        meaning = f"the most that a run may ask of {limits}; {row.help}" if limits else row.help
        rows.append((f"`{key}`", default, meaning))
    for key, setting in options_of_a_run().items():
        if setting.metadata["site"]:
            rows.append((f"`{key}`", "", setting.metadata["site"]))
    text = (DOCS / "security.md").read_text(encoding="utf-8")
    return _between(text, NODE, _table(("key", "default", ""), rows))


def _pyproject() -> str:
    """Return pyproject.toml with every key of a run's configuration, its default and meaning."""
    lines = ["[tool.flwr.app.config]"]
    for section in SECTIONS.values():
        lines += [f"# -- {str(section.__doc__).rstrip('.')}", *_toml(section, "")]
    for name, row in CATALOG.items():
        if fields(row.hparams):
            lines += ["", f"[tool.flwr.app.config.{name}]", *_toml(row.hparams, f"{name}.")]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return _between(text, SETTINGS, lines, SETTINGS_END)


def _toml(section: type, prefix: str) -> Iterator[str]:
    """Yield the lines of a section in TOML, with their comments in one column."""
    for field in fields(section):
        key = key_of(field.name)
        assignment = f"{key} = {json.dumps(field.default, ensure_ascii=False)}"
        yield f"{assignment:28} # {_meaning(prefix + key, field)}"


def _facts(row: Algorithm) -> Iterator[str]:
    yield f"Loss terms in the metrics: {', '.join(row.losses) or 'none'}."
    yield from _merged(row)
    if row.frozen_backbones:
        yield "The method uses frozen backbones unless `backbones` says otherwise."


def _merged(row: Algorithm) -> Iterator[str]:
    """Yield what the setting ``merging`` does in an algorithm."""
    entries = row.exchange.up.values()
    sends_vectors = any(isinstance(entry, Vectors) for entry in entries)
    averaged = ["weights"] if any(isinstance(entry, Weights) for entry in entries) else []
    if sends_vectors and row.averages_prototypes:
        averaged.append("prototypes")
    if averaged:
        yield f"The setting `merging` says how the server averages {' and '.join(averaged)}."
    if sends_vectors and not row.averages_prototypes:
        yield (
            "If `merging` is `median` or `trimmed-mean`, the server first leaves out, in each"
            " class, the prototypes of the clients that are least like the others. Each client has"
            " one vote, no matter how many prototypes it sends."
        )
    if not entries:
        yield "`merging` has no effect."


def _argument(action: argparse.Action) -> tuple[str, str]:
    """Return an argument's names with its value, and its help or else its choices."""
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    named = " ".join(filter(None, (", ".join(action.option_strings), value)))
    explained = (action.help or "").replace("%%", "%") or ", ".join(action.choices or ())
    return f"`{_plain(named)}`", _plain(explained)


def _plain(text: str) -> str:
    """Return ``text`` as a cell of a table that shows it as it stands."""
    return text.replace("|", r"\|").replace("<", "&lt;")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")

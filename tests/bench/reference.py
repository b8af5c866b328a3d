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
    """A file in ``docs`` -> its content."""
    made = {"settings": settings(), "choices": choices(), "commands": commands()}
    whole = {f"reference/{name}.md": lines for name, lines in made.items()}
    ends = {f"algorithms/{name}.md": algorithm(name, row) for name, row in CATALOG.items()}
    ends["algorithms/index.md"] = iter(
        [_between(_written("index"), TRAVELS, _what_travels()).rstrip()]
    )
    ends["data.md"] = iter([_data().rstrip()])
    ends["security.md"] = iter([_security().rstrip()])
    ends["../pyproject.toml"] = iter([_pyproject().rstrip()])
    drawings = {
        f"algorithms/travels/{name}.svg": [drawing(row, _stays(name))]
        for name, row in CATALOG.items()
    }
    return {file: "\n".join(lines) + "\n" for file, lines in (whole | ends | drawings).items()}


def settings() -> Iterator[str]:
    """Every general setting, by section."""
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
    """The page of an algorithm, its drawing in words, and below it settings and code."""
    written = _written(name).partition(MADE)[0]
    image = f"](travels/{name}.svg)"
    written = re.sub(
        rf"!\[.*{re.escape(image)}", lambda _: f"![{alternative(row, _stays(name))}{image}", written
    )
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
    """``text`` with these lines from ``mark`` to the next ``end``."""
    return re.sub(
        f"{mark}.*?{end}", lambda _: "\n".join((mark, *lines, end)), text, flags=re.DOTALL
    )


def _what_travels() -> Iterator[str]:
    """The table of all algorithms in ``index.md``: rows of the catalog, and what stays."""
    rows = []
    for name, row in CATALOG.items():
        down, up = in_words(row.exchange.down), in_words(row.exchange.up)
        differ = re.findall(r"Different networks: (\w+)\.", lists()["algorithms"][1][name])[0]
        shorter = re.sub(
            r" \(.*?\)", lambda said, down=down: "" if said[0] in down else said[0], up
        )
        goes_up = "the same" if up == down else shorter
        rows.append((f"[`{name}`]({name}.md)", _paper(name), differ, down, goes_up, _stays(name)))
    return _table(("`algo`", "paper", "different networks", "down", "up", "stays"), rows)


def _beside_others(title: str) -> Iterator[str]:
    """An algorithm's accuracies in four situations, between training alone and FedAvg."""
    measured = (
        (DOCS / "notebook" / "2026-11-which.md")
        .read_text(encoding="utf-8")
        .partition("<!-- measured -->")[2]
    )
    first = re.search(r"(?m)(^\|.*\n)+", measured)
    final = re.sub(
        r" \(\d+\.\d\)", "", first[0] if first else ""
    )  # without the accuracies after ten rounds
    rows = [[cell.strip() for cell in line.split("|")[1:6]] for line in final.splitlines()]
    shown = [row if row[0] == title else [cell.partition(" ±")[0] for cell in row] for row in rows]
    yield from _table(
        tuple(rows[0]), (tuple(row) for row in shown if row[0] in ("Local", "FedAvg", title))
    )


def _paper(name: str) -> str:
    """An algorithm's paper, with the link of its page where that has one."""
    link = re.search(r"\]\((https://(?:arxiv|doi|openaccess)[^)]*)\)", _written(name))
    return f"[{CATALOG[name].paper}]({link[1]})" if link else CATALOG[name].paper


def _stays(name: str) -> str:
    """What never leaves a client, as the words of the drawing on its page say at their end."""
    stays = re.search(rf"At the client stays: (.*)\.\]\(travels/{name}\.svg\)", _written(name))
    wanted = f"![… At the client stays: ….](travels/{name}.svg)"
    assert stays, f"docs/algorithms/{name}.md lacks its drawing: {wanted}"
    return stays[1]


def _data() -> str:
    """The page of data with its tables of data sets in files, and of partitions."""
    text = (DOCS / "data.md").read_text(encoding="utf-8")
    names: dict[str, str] = {}
    for name, row in DATASETS.items():
        names[row.files] = f"{names.get(row.files, '')} `{name}`".strip()
    sets = [(named, files) for files, named in names.items() if files]
    text = _between(text, DATA_SETS, _table(("name", "files in `data-dir`"), sets))
    shares = [(f"`{name}`", _plain(row.help)) for name, row in PARTITIONS.items()]
    return _between(text, SHARES, _table(("name", "a client's share"), shares))


def choices() -> Iterator[str]:
    """Every name that a setting can take."""
    yield from _head("Names that settings take", "What `protofl list` prints.")
    for name, (setting, entries) in lists().items():
        if (
            name != "algorithms"
        ):  # they have a page, and here those of other packages would stand, too
            yield from (
                "",
                f"## {name.capitalize()}",
                "",
                f"`{setting.partition(':')[0].partition(';')[0]}`",
                "",
            )
            yield from _table(
                ("name", ""), ((f"`{choice}`", _plain(said)) for choice, said in entries.items())
            )


def commands() -> Iterator[str]:
    """Every subcommand with its arguments."""
    yield from _head(
        "Command line", "What `protofl COMMAND --help` prints, beside `--help` itself."
    )
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
    hints = get_type_hints(section)
    rows = []
    for field in fields(section):
        key = prefix + key_of(field.name)
        value = _values(hints[field.name], field.metadata)
        affects = (field.metadata["affects"] + " ✓" * bool(field.metadata["site"]),) * changes
        default = f"`{json.dumps(field.default)}`"
        rows.append((f"`{key}`", default, value, *affects, _plain(_meaning(key, field))))
    return _table(("key", "default", "values", *("changes",) * changes, "meaning"), rows)


def _values(kind: type, legal: Any) -> str:
    if legal["choices"] is None:
        return TYPES[kind] + range_text(legal).replace("at least", "≥").replace(
            "at most", "≤"
        ).replace("above", ">")
    if len(legal["choices"]) > FEW:
        return "[a name](../reference/choices.md)" + f", or {legal['or_words']}" * bool(
            legal["or_words"]
        )
    return ", ".join(f"`{choice}`" for choice in legal["choices"])


def _meaning(key: str, setting: Field[Any]) -> str:
    """The help of a setting, after the names of the partitions that alone read it."""
    readers = ", ".join(partitions_that_read(key))
    return ": ".join(filter(None, (readers, setting.metadata["help"])))


def _security() -> str:
    """The page of security with its table of all keys of a node config."""
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
    """pyproject.toml with every key of a run's configuration, its default and its meaning."""
    lines = ["[tool.flwr.app.config]"]
    for section in SECTIONS.values():
        lines += [f"# -- {str(section.__doc__).rstrip('.')}", *_toml(section, "")]
    for name, row in CATALOG.items():
        if fields(row.hparams):
            lines += ["", f"[tool.flwr.app.config.{name}]", *_toml(row.hparams, f"{name}.")]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return _between(text, SETTINGS, lines, SETTINGS_END)


def _toml(section: type, prefix: str) -> Iterator[str]:
    """The lines of a section in TOML."""
    for field in fields(section):
        key = key_of(field.name)
        default = json.dumps(field.default, ensure_ascii=False)
        yield f"{f'{key} = {default}':28} # {_meaning(prefix + key, field)}"


def _facts(row: Algorithm) -> Iterator[str]:
    yield f"Loss terms in the metrics: {', '.join(row.losses) or 'none'}."
    yield from _merged(row)
    if row.frozen_backbones:
        yield "It uses frozen backbones unless `backbones` says otherwise."


def _merged(row: Algorithm) -> Iterator[str]:
    """What a median or a trimmed mean of ``merging`` means for an algorithm."""
    entries = row.exchange.up.values()
    sends_vectors = any(isinstance(entry, Vectors) for entry in entries)
    averaged = ["weights"] if any(isinstance(entry, Weights) for entry in entries) else []
    if sends_vectors and row.averages_prototypes:
        averaged.append("prototypes")
    if averaged:
        yield f"The setting `merging` says how the server averages {' and '.join(averaged)}."
    if sends_vectors and not row.averages_prototypes:
        yield (
            "With a median or trimmed mean (`merging`) the server leaves out the farthest"
            " prototypes before it trains on the others or clusters them; each client has one vote."
        )
    if not entries:
        yield "`merging` has no effect."


def _argument(action: argparse.Action) -> tuple[str, str]:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    named = " ".join(filter(None, (", ".join(action.option_strings), value)))
    return f"`{_plain(named)}`", _plain(
        (action.help or "").replace("%%", "%") or ", ".join(action.choices or ())
    )


def _plain(text: str) -> str:
    """``text`` where a table takes it as it stands."""
    return text.replace("|", r"\|").replace("<", "&lt;")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")

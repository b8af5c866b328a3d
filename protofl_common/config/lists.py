"""Comma-separated lists of names: how a setting or a node key reads and writes them."""

import csv
from collections.abc import Iterable


def names_in(text: object) -> tuple[str, ...]:
    """Return the names of a comma-separated list in order, each once; () for "" or None."""
    return tuple(dict.fromkeys(filter(None, parts_of(text))))


def parts_of(text: object) -> list[str]:
    """Return the parts of a comma-separated list, empty and repeated ones too; [] for "" or None.

    A name with a comma stands in quotes: ``"a, b",c``. A line break counts as a space.
    """
    if not text:
        return []  # at once, as every message of a run asks for many empty lists
    line = str(text).replace("\n", " ")
    parts = next(csv.reader([line], skipinitialspace=True), [])
    return [part.strip() for part in parts]


def as_list(names: Iterable[str]) -> str:
    """Return the comma-separated list that `names_in` reads as these names."""
    quoted = []
    for name in names:
        if "," in name or name.startswith('"'):  # in quotes, as in CSV, where "" stands for "
            name = '"{}"'.format(name.replace('"', '""'))
        quoted.append(name)
    text = ",".join(quoted)
    if text.startswith('"'):
        return f" {text}"  # else the quotes would be taken for those around a setting's value
    return text


def as_setting(key: str, names: Iterable[str]) -> str:
    """Return ``KEY="a,b"`` as a user can type it in a shell and in TOML.

    Return "" if the names cannot be written in such a line, or would be read as others.
    """
    names = list(names)
    value = as_list(names)
    quote = '"'
    if any(character in value for character in '"\\$`'):  # between "…" they mean something else
        quote = "'"
    if quote in value or list(names_in(value)) != names:
        return ""
    return f"{key}={quote}{value}{quote}"

"""The arguments that a person types: ``key=value``, as Flower wants it, and ``--allow-python``.

Flower's ``--run-config`` is TOML, so a string needs quotes inside the shell's quotes, and a wrong type passes
silently. Here the declared type of each key (`experiment/settings.py`) decides how its value is read.
"""

import argparse
from collections.abc import Iterable

from protofl_common.config.options import Scalar, SettingsError
from protofl_common.experiment.node import allow_named
from protofl_common.experiment.settings import default_run_config


def add_allow_python(parser: argparse.ArgumentParser, source: str) -> None:
    """The option, for a command that reads ``source``; `protofl_common.tools.cli.parsed` obeys it."""
    about = f"Python modules, with commas, that {source} may name and that then run here"
    parser.add_argument("--allow-python", default="", metavar="NAMES", help=about)


def declared_types() -> dict[str, type]:
    return {key: type(value) for key, value in default_run_config().items()}


def read_assignments(words: Iterable[str]) -> dict[str, Scalar]:
    """``["algo=fedplvm", "lr=0.1"]`` -> ``{"algo": "fedplvm", "lr": 0.1}``.

    An unknown key, and a value that does not fit the type of its key, stay text: `Settings.from_run_config` says what
    is wrong with them, all at once. Python modules that they name may be imported from now on.

    SettingsError with one line for each word that is not ``key=value``.
    """
    types, values, problems = declared_types(), {}, []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            problems.append(f"{word}: must be key=value, such as algo=fedproto")
            continue
        values[key] = typed(_unquoted(text), types.get(key, str))
    if problems:
        raise SettingsError("\n".join(problems))
    allow_named(values)
    return values


def typed(text: str, wanted: type) -> Scalar:
    """``text`` in the wanted type, or as it is where it does not fit."""
    if wanted is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if wanted in (int, float):
        try:
            number: Scalar = wanted(text)
        except ValueError:
            return text
        return number
    return text


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text

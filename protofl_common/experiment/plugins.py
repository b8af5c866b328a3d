"""Algorithms of other packages: entry points of the group ``protofl.algorithms``, each an `Algorithm` row.

    [project.entry-points."protofl.algorithms"]
    moon = "my_method:ROW"

The name is then a value of ``algo``. The row names both halves; its hyper-parameters are a dataclass of `option` fields
with defaults, and come from the setting ``hparams``, as Flower takes no keys that this app does not have.
"""

import dataclasses
import json
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from protofl_common.config.options import Scalar, SettingsError, did_you_mean, keys_of, read_section, unknown_keys
from protofl_common.experiment.catalog import CATALOG, Algorithm, Hparams

GROUP = "protofl.algorithms"


def installed() -> dict[str, EntryPoint]:
    """The entry points by name; those of the catalog's names are not used."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in CATALOG}


@cache
def algorithm_named(name: str) -> Algorithm:
    """The row of an algorithm: of the catalog, or of a package, which is imported now; SettingsError without any."""
    if name in CATALOG:
        return CATALOG[name]
    found = installed()
    if name not in found:
        known = [*CATALOG, *found]
        choices = f"{', '.join(known)}{did_you_mean(name, known)}"
        raise SettingsError(f"algo = {name!r}: choose one of {choices}; a package may bring others")
    try:
        row = found[name].load()
    except Exception as error:
        raise SettingsError(f"algo = {name!r}: {found[name].value}: {type(error).__name__}: {error}") from error
    if not isinstance(row, Algorithm):
        raise SettingsError(f"algo = {name!r}: {found[name].value} is a {type(row).__name__}, not an Algorithm")
    return row


def read_hparams(row: Algorithm, text: str) -> Hparams:
    """The hyper-parameters of a package's algorithm: its defaults, and ``hparams`` (``"mu=5.0, margin=none"``)."""
    given: dict[str, Scalar] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        key, equals, value = (one.strip() for one in part.partition("="))
        if not equals:
            raise SettingsError(f"hparams = {text!r}: {part!r} is not KEY=VALUE")
        if key in given:
            raise SettingsError(f"hparams = {text!r}: {key} stands twice")
        given[key] = _parsed(value)
    keys = keys_of(row.hparams)
    defaults = zip(keys, (field.default for field in dataclasses.fields(row.hparams)), strict=True)
    values: dict[str, Any] = {key: value for key, value in defaults if value is not dataclasses.MISSING}
    problems = [f"{line}; it has {', '.join(keys)}" for line in unknown_keys(given, keys)]
    found = read_section(row.hparams, values | given, problems)
    if problems or found is None:
        raise SettingsError("\n".join(f"hparams: {line}" for line in problems))
    return found


def _parsed(value: str) -> Scalar:
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, (bool, int, float)) else value

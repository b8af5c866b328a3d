"""Algorithms of other packages: entry points of the group ``protofl.algorithms``, each an `Algorithm` row.

    [project.entry-points."protofl.algorithms"]
    moon = "my_method:ROW"

The name is then a value of ``algo``. The row names both halves; its hyper-parameters are a dataclass of `option` fields
with defaults, and come from the setting ``hparams``, as Flower takes no keys that this app does not have.
"""

import dataclasses
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from protofl_common.config.options import SettingsError, did_you_mean, read_section, typed, types_of, unknown_keys
from protofl_common.config.python_names import at_worker, check_allowed
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
    packages = installed()
    if name not in packages:
        names = [*CATALOG, *packages]
        choices = f"{', '.join(names)}{did_you_mean(name, names)}"
        raise SettingsError(f"algo = {name!r}: choose one of {choices}; a package may bring others")
    if at_worker():
        check_allowed(packages[name].value, "algo")
    try:
        row = packages[name].load()
    except Exception as error:
        raise SettingsError(f"algo = {name!r}: {packages[name].value}: {type(error).__name__}: {error}") from error
    if not isinstance(row, Algorithm):
        raise SettingsError(f"algo = {name!r}: {packages[name].value} is a {type(row).__name__}, not an Algorithm")
    return row


def read_hparams(row: Algorithm, text: str) -> Hparams:
    """The hyper-parameters of a package's algorithm: its defaults, and ``hparams`` (``"mu=5.0, margin=none"``)."""
    if not (issubclass(row.hparams, Hparams) and "__dataclass_fields__" in vars(row.hparams)):
        raise SettingsError(f"hparams: write @dataclass(frozen=True) above class {row.hparams.__name__}(Hparams)")
    kinds, chosen = types_of(row.hparams), dict[str, Any]()
    for part in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise SettingsError(f"hparams = {text!r}: {part!r} is not KEY=VALUE")
        if key in chosen:
            raise SettingsError(f"hparams = {text!r}: {key} stands twice")
        chosen[key] = typed(value, kinds.get(key, str))
    defaults = zip(kinds, (field.default for field in dataclasses.fields(row.hparams)), strict=True)
    values: dict[str, Any] = {key: value for key, value in defaults if value is not dataclasses.MISSING}
    problems = [f"{line}; it has {', '.join(kinds)}" for line in unknown_keys(chosen, kinds)]
    section = read_section(row.hparams, values | chosen, problems)
    if problems or section is None:
        raise SettingsError("\n".join(f"hparams: {line}" for line in problems))
    return section

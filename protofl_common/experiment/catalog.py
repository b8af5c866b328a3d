"""The catalog: one row per algorithm. Its keys are the legal values of ``algo``.

Each row is a file of `protofl_common/algorithms`, which is found by its name. The server half
stands in ``server_app/strategies``, the client half in ``client_app/algorithms``.
"""

import pkgutil
from dataclasses import Field, fields
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

from protofl_common import algorithms
from protofl_common.algorithms.base import Algorithm, Hparams
from protofl_common.config.options import SettingsError, did_you_mean, key_of, read_pairs
from protofl_common.config.python_names import check_modules
from protofl_common.config.sections import SECTIONS

GROUP = "protofl.algorithms"  # of the entry points of other packages


def _rows() -> dict[str, Algorithm]:
    """The row of every file in `protofl_common/algorithms`, by the name of the algorithm."""
    rows = {}
    for module in pkgutil.iter_modules(algorithms.__path__):
        if module.name != "base":
            path = f"{algorithms.__name__}.{module.name}"
            rows[module.name.replace("_", "-")] = import_module(path).ALGORITHM
    return rows


CATALOG = _rows()


def options_of_a_run() -> dict[str, Field[Any]]:
    """Every key of a run configuration, algorithms' included, with all that is known of it."""
    options = {}
    for section in SECTIONS.values():
        for field in fields(section):
            options[key_of(field.name)] = field
    for name, row in CATALOG.items():
        for field in fields(row.hparams):
            options[f"{name}.{key_of(field.name)}"] = field
    return options


Half = TypeVar("Half")


def half(path: str, kind: type[Half]) -> type[Half]:
    """The class ``module:Class``, or the last of this ``kind`` that ``module`` defines.

    SettingsError where there is none.
    """
    module_name, _, name = path.partition(":")
    try:
        module = import_module(module_name)
        chosen = getattr(module, name) if name else _last_defined(kind, module)
    except Exception as error:  # a package's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(f"{path!r} in an algorithm's row: {reason}") from error
    if not (isinstance(chosen, type) and issubclass(chosen, kind)):
        found = f"{name or 'nothing'} is no subclass of {kind.__name__}"
        raise SettingsError(f"{path!r} in an algorithm's row: {found}")
    return chosen


def _last_defined(kind: type, module: ModuleType) -> type | None:
    for value in reversed(vars(module).values()):
        if not isinstance(value, type) or not issubclass(value, kind):
            continue
        if value.__module__ == module.__name__:
            return value
    return None


# -- algorithms of other packages: entry points, each a row; their hyper-parameters come from the
# setting ``hparams``
def installed() -> dict[str, EntryPoint]:
    """The entry points by name; those of the catalog's names are not used."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in CATALOG}


@cache
def algorithm_named(name: str) -> Algorithm:
    """The row of an algorithm: of the catalog, or of a package, which is imported now.

    SettingsError where there is none, or where nobody who may say so has named the package: the
    name may stand in a stranger's recipe or table. What is imported stays so: the row is kept.
    """
    if name in CATALOG:
        return CATALOG[name]
    packages = installed()
    if name not in packages:
        names = [*CATALOG, *packages]
        choices = f"{', '.join(names)}{did_you_mean(name, names)}; a package may bring others"
        raise SettingsError(f"algo = {name!r}: choose one of {choices}")
    point = packages[name]
    check_modules([(f"algo = {name!r}", point.module)])
    try:
        row = point.load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(f"algo = {name!r}: {point.value}: {reason}") from error
    if not isinstance(row, Algorithm):
        kind = type(row).__name__
        raise SettingsError(f"algo = {name!r}: {point.value} is a {kind}, not an Algorithm")
    return row


def read_hparams(row: Algorithm, text: str) -> Hparams:
    """The hyper-parameters of a package's algorithm: its defaults, and what ``text`` changes.

    ``text`` is the setting ``hparams``, such as ``"mu=5.0, margin=none"``.
    """
    is_table = issubclass(row.hparams, Hparams) and "__dataclass_fields__" in vars(row.hparams)
    if not is_table:
        name = row.hparams.__name__
        raise SettingsError(f"hparams: write @dataclass(frozen=True) above class {name}(Hparams)")
    return read_pairs(row.hparams, "hparams", text)

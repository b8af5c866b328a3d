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
from protofl_common.config.lists import as_list, parts_of
from protofl_common.config.options import (
    Config,
    SettingsError,
    did_you_mean,
    key_of,
    read_pairs,
)
from protofl_common.config.python_code import import_as_named
from protofl_common.config.python_names import check_allowed
from protofl_common.config.sections import SECTIONS

GROUP = "protofl.algorithms"  # of the entry points of other packages


def _rows() -> dict[str, Algorithm]:
    """Import every file of `protofl_common/algorithms`; return its row by the algorithm's name.

    The name is the file's, with hyphens: ``fedproto-avg`` is in ``fedproto_avg.py``.
    """
    rows = {}
    for module in pkgutil.iter_modules(algorithms.__path__):
        if module.name != "base":  # which has the class of the rows
            path = f"{algorithms.__name__}.{module.name}"
            rows[module.name.replace("_", "-")] = import_module(path).ALGORITHM
    return rows


CATALOG = _rows()


@cache
def options_of_a_run() -> dict[str, Field[Any]]:
    """Return the field behind every key of a run configuration, algorithms' keys included.

    Its metadata has the help, the legal values and what else `config.options.option` is told.
    """
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
    """Import the client's or the server's half of an algorithm, a subclass of ``kind``.

    ``path`` is ``module:Class``, or ``module`` for the last such class that the module defines.
    SettingsError if the import fails, or there is no such class.
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
    """Return the last subclass of ``kind`` that the module defines itself; None without one.

    Classes that the module imports, such as the base class of its own, do not count.
    """
    for value in reversed(vars(module).values()):
        if not isinstance(value, type) or not issubclass(value, kind):
            continue
        if value.__module__ == module.__name__:
            return value
    return None


# -- algorithms of other packages: entry points, each a row; their hyper-parameters come from the
# setting ``hparams``
def installed() -> dict[str, EntryPoint]:
    """Return the algorithms of installed packages, by name, without importing them.

    A package cannot replace an algorithm of the catalog: those with such names are left out.
    """
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in CATALOG}


@cache
def algorithm_named(name: str) -> Algorithm:
    """Return an algorithm's row; one of another package is imported from there.

    SettingsError if there is none of this name, or its package may not be imported: the name may
    come from a stranger's recipe or table, so the user or operator has to have named the package.
    Rows are cached, since a module stays imported.
    """
    if name in CATALOG:
        return CATALOG[name]
    packages = installed()
    if name not in packages:
        names = [*CATALOG, *packages]
        choices = f"{', '.join(names)}{did_you_mean(name, names)}; a package may bring others"
        raise SettingsError(f"algo = {name!r}: choose one of {choices}")
    point = packages[name]
    check_allowed([(f"algo = {name!r}", point.module)])
    try:
        import_as_named(point.module)
        row = point.load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(f"algo = {name!r}: {point.value}: {reason}") from error
    if not isinstance(row, Algorithm):
        kind = type(row).__name__
        raise SettingsError(f"algo = {name!r}: {point.value} is a {kind}, not an Algorithm")
    return row


def is_key_of_package(key: str) -> bool:
    """True for a key such as ``fedrel.lam``, whose algorithm is another package's."""
    owner, dot, _ = key.partition(".")
    return bool(dot) and owner not in CATALOG and owner in installed()


def with_hparams(config: Config) -> Config:
    """Return a run's configuration with the keys of packages' algorithms moved into ``hparams``.

    Flower lets only keys travel that the app declares, and those of packages are not declared. The
    value of ``fedrel.lam`` replaces that of ``lam`` in ``hparams``. Keys of algorithms that do not
    run are left out: such keys of the catalog's algorithms have no effect either.
    """
    of_packages = {key: value for key, value in config.items() if is_key_of_package(key)}
    if not of_packages:
        return config
    pairs = {}  # name of a hyper-parameter -> "NAME=VALUE"
    for pair in filter(None, parts_of(str(config.get("hparams", "")))):
        pairs[pair.partition("=")[0].strip()] = pair
    for key, value in of_packages.items():
        owner, _, name = key.partition(".")
        if owner == config.get("algo"):
            text = str(value).lower() if isinstance(value, bool) else value  # true, not True
            pairs[name] = f"{name}={text}"
    others = {key: value for key, value in config.items() if key not in of_packages}
    return others | {"hparams": as_list(pairs.values())}


def read_hparams(row: Algorithm, text: str) -> Hparams:
    """Build the hyper-parameters of a package's algorithm: its defaults, changed by ``text``.

    ``text`` is the setting ``hparams``, such as ``"mu=5.0, margin=none"``. SettingsError if it is
    wrong, or if the package's class is not a dataclass of its own.
    """
    # looked for in its own `vars`: a class that is no dataclass inherits the fields of its base
    is_table = issubclass(row.hparams, Hparams) and "__dataclass_fields__" in vars(row.hparams)
    if not is_table:
        name = row.hparams.__name__
        raise SettingsError(f"hparams: write @dataclass(frozen=True) above class {name}(Hparams)")
    return read_pairs(row.hparams, "hparams", text)

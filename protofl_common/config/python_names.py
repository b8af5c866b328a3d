"""Python names in settings: ``arch = "mynets:TinyViT"`` is ``TinyViT`` of the module ``mynets``.

An import runs code, and settings, recipes, tables and models may come from strangers. So a module
is imported only if a person named it: on the command line (``--allow-python``, KEY=VALUE), in the
settings of a run that this person has submitted, or, at a site, in the node config. A worker's
operator names them for all runs (`allow_only`).
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from protofl_common.config.options import SettingsError
from protofl_common.config.python_code import import_as_named

LIBRARY_NETWORK = re.compile(r"(?:torchvision|timm):\w[\w.]*", re.ASCII)
"""A library's classifier; it imports nothing else."""
PYTHON_NAME = re.compile(
    r"(?!(?:torchvision|timm):)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII
)
_ALLOWED: ContextVar[frozenset[str]] = ContextVar(
    "modules that may be imported", default=frozenset()
)
_NAMED_BY_OPERATOR: list[frozenset[str]] = []
"""One set, in the place of `_ALLOWED` in all threads, where a worker's operator has named modules;
empty elsewhere."""


def is_python_name(text: str) -> bool:
    return PYTHON_NAME.fullmatch(text) is not None


def module_of(name: str) -> str:
    return name.partition(":")[0]


def is_inside(module: str, names: Iterable[str]) -> bool:
    """Return whether a module is one of ``names``, or lies in one of them."""
    return any(module == name or module.startswith(f"{name}.") for name in names)


def allow(modules: Iterable[str]) -> None:
    """Let `load` import these modules, and those inside them, beside those allowed before.

    Call it only with modules that a person who may decide this has named.
    """
    _ALLOWED.set(_ALLOWED.get().union(modules))


def allow_only(modules: Iterable[str]) -> None:
    """Let `load` import these modules, and those inside them, and no others.

    From now on `allow` changes nothing, in any thread of this process.
    """
    _NAMED_BY_OPERATOR[:] = [frozenset(modules)]  # all threads have this one list


def allowed_modules() -> frozenset[str]:
    """Return the modules that `load` may import, by name."""
    return _NAMED_BY_OPERATOR[0] if _NAMED_BY_OPERATOR else _ALLOWED.get()


@contextmanager
def allowing(modules: Iterable[str]) -> Iterator[None]:
    """Let `load` import these modules too, inside the ``with`` statement."""
    before = _ALLOWED.set(_ALLOWED.get().union(modules))
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def check_allowed(named: Iterable[tuple[str, str]]) -> None:
    """Refuse modules that may not be imported; SettingsError with a line for each.

    ``named`` are pairs of a setting, as ``KEY = VALUE``, and the module that it would import.
    """
    allowed = allowed_modules()
    refused = [(setting, module) for setting, module in named if not is_inside(module, allowed)]
    if not refused:
        return
    modules = ",".join(dict.fromkeys(module for _, module in refused))
    why = "runs code of the module {}, which you did not name"  # {}: the module of each line
    cure = (
        f"only if you trust it, give --allow-python {modules} (in Python: allow_python={modules!r})"
    )
    if _NAMED_BY_OPERATOR:  # this process is a worker, and who reads the error is not its operator
        why = "not allowed at this server"
        cure = f"its operator may name {modules} in protofl worker --allow-python"
    lines = [f"{setting}: {why.format(module)}" for setting, module in refused]
    raise SettingsError("\n".join(lines) + f"; {cure}")


def load(name: str, setting: str) -> Any:
    """Import the object that a setting names as ``module:name``.

    This is the only place that imports by name. The object must be defined in an allowed module,
    and not only be imported there from another one. SettingsError when the module is not allowed or
    cannot be imported, or has no such object of its own.
    """
    check_allowed([(f"{setting} = {name!r}", module_of(name))])
    module_name, _, attribute = name.partition(":")
    try:
        module = import_as_named(module_name)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        hint = "repair it"
        if isinstance(error, ModuleNotFoundError):
            hint = "install it, or put its folder on PYTHONPATH"
        raise SettingsError(
            f"{setting} = {name!r}: {module_name} cannot be imported ({reason}); {hint}"
        ) from error
    if not hasattr(module, attribute):
        raise SettingsError(f"{setting} = {name!r}: {module_name} has no {attribute}")
    loaded = getattr(module, attribute)
    # with ``from os import system`` in an allowed module, ``mynets:system`` would not be its own
    defined_in = str(getattr(loaded, "__module__", ""))
    if not is_inside(defined_in, allowed_modules()):
        where = f"; it lies in {defined_in}" if defined_in else ""
        raise SettingsError(
            f"{setting} = {name!r}: it is no function or class of {module_name}{where}"
        )
    return loaded

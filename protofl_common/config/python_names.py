"""Python names in settings: ``arch = "mynets:TinyViT"`` is ``TinyViT`` of the module ``mynets``.

An import runs code, and settings, recipes, tables and models may come from strangers. So a module is imported only if
a person named it: on the command line (``--allow-python``, KEY=VALUE), in the settings of a run that this person has
submitted, or, at a site, in the node config. A worker's operator names them for all runs (`allow_only`).
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from protofl_common.config.options import SettingsError

LIBRARY_NETWORK = re.compile(r"(?:torchvision|timm):\w[\w.]*", re.ASCII)  # a classifier; it imports nothing else
PYTHON_NAME = re.compile(r"(?!(?:torchvision|timm):)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_ALLOWED: ContextVar[frozenset[str]] = ContextVar("modules that may be imported", default=frozenset())
_ONLY: list[frozenset[str]] = []  # in their place, whatever the thread, where a worker's operator has named modules


def is_python_name(text: str) -> bool:
    return PYTHON_NAME.fullmatch(text) is not None


def module_of(name: str) -> str:
    return name.partition(":")[0]


def is_inside(module: str, names: Iterable[str]) -> bool:
    """Return whether a module is one of ``names``, or lies in one of them."""
    return any(module == name or module.startswith(f"{name}.") for name in names)


def allow(modules: Iterable[str]) -> None:
    """Let `load` import these modules, and those that lie in them: somebody who may say so has named them."""
    _ALLOWED.set(_ALLOWED.get().union(modules))


def allow_only(modules: Iterable[str]) -> None:
    """Let `load` import these modules, and those that lie in them, and nothing that settings name from now on."""
    _ONLY[:] = [frozenset(modules)]


def at_worker() -> bool:
    """Return whether a worker's operator has named the modules that may be imported."""
    return bool(_ONLY)


@contextmanager
def allowing(modules: Iterable[str]) -> Iterator[None]:
    before = _ALLOWED.set(_ALLOWED.get().union(modules))
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def check_allowed(name: str, what: str) -> None:
    """SettingsError if the module of ``name``, which ``what`` asks for, may not be imported here."""
    module = module_of(name)
    if _ONLY and not is_inside(module, _ONLY[0]):
        how = f"its operator may name {module} in protofl worker --allow-python"
        raise SettingsError(f"{what} = {name!r}: not allowed at this server; {how}")
    if not _ONLY and not is_inside(module, _ALLOWED.get()):
        how = f"only if you trust it, give --allow-python {module} (in Python: allow_python={module!r})"
        raise SettingsError(f"{what} = {name!r}: runs code of the module {module}, which you did not name; {how}")


def load(name: str, what: str) -> Any:
    """Return the object that the setting ``what`` names as ``module:name``; the only place that imports by name.

    The object must be one of an allowed module itself, not one that such a module has imported. SettingsError when the
    module is not allowed or cannot be imported, or has no such object of its own.
    """
    check_allowed(name, what)
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        hint = "install it, or put its folder on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else "repair it"
        raise SettingsError(f"{what} = {name!r}: {module_name} cannot be imported ({reason}); {hint}") from error
    if not hasattr(module, attribute):
        raise SettingsError(f"{what} = {name!r}: {module_name} has no {attribute}")
    loaded = getattr(module, attribute)
    home = str(getattr(loaded, "__module__", ""))
    if not is_inside(home, _ONLY[0] if _ONLY else _ALLOWED.get()):
        where = f"; it lies in {home}" if home else ""
        raise SettingsError(f"{what} = {name!r}: it is no function or class of {module_name}{where}")
    return loaded

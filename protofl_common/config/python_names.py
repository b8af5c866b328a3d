"""Python names in settings: ``arch = "mynets:TinyViT"`` is ``TinyViT`` of the module ``mynets``."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from protofl_common.config.options import SettingsError

_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
PYTHON_NAME = re.compile(rf"{_DOTTED}:{_DOTTED}", re.ASCII)


def is_python_name(text: str) -> bool:
    """Whether ``text`` has the form ``module:name``."""
    return PYTHON_NAME.fullmatch(text) is not None


def load(name: str, what: str) -> Any:
    """The object that the setting ``what`` names as ``module:name``; the only place that imports by name.

    The module is an installed one, or a file in a folder of ``PYTHONPATH``, on every machine that uses it.

    Raises
    ------
    SettingsError
        When the module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        hint = "install it, or put its folder on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else "repair it"
        raise SettingsError(f"{what} = {name!r}: {module_name} cannot be imported ({reason}); {hint}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise SettingsError(f"{what} = {name!r}: {module_name} has no {attribute}")
        found = getattr(found, part)
    return found

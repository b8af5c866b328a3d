"""PyTorch's optimizers without its compiler.

Every optimizer of ``torch.optim`` imports ``torch._dynamo``, only to tell the compiler where to stop: 1.4 s of CPU,
whether anything is compiled or not. In the deployment runtime each message is handled by a process of its own, so every
client would pay that in every round.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


def without_compiler() -> None:
    """From now on optimizers find a stand-in, unless the compiler has been imported already."""
    sys.modules.setdefault(COMPILER, _StandIn(COMPILER))


class _StandIn(ModuleType):
    """The two functions that optimizers call. Whoever asks for more gets the compiler, which then takes its place."""

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        """Nothing is compiled: the function as it is."""
        return function

    @staticmethod
    def graph_break() -> None:
        """Nothing is compiled: nothing to interrupt."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # tools that look at all modules ask for these
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        return getattr(import_module(COMPILER), name)

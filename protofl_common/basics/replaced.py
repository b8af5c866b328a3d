"""Our functions and values in the place of a library's, where none of its settings serves."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def replaced(module: ModuleType, **ours: object) -> Iterator[None]:
    """Replace these names of ``module`` inside a ``with``.

    AttributeError, before anything is replaced, if this version of the library lacks one.
    """
    originals = {name: getattr(module, name) for name in ours}
    try:
        for name, value in ours.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)

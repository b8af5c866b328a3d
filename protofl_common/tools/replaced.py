"""Our functions in the place of Flower's, where no setting of Flower does what we need."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def replaced(module: ModuleType, **ours: object) -> Iterator[None]:
    """Replace these names of ``module`` inside a ``with``.

    AttributeError, before anything is replaced, if this version of Flower lacks one of them.
    """
    flowers = {name: getattr(module, name) for name in ours}
    try:
        for name, value in ours.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in flowers.items():
            setattr(module, name, value)

"""Our functions and values in the place of a library's, where none of its settings serves."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, **ours: object) -> Iterator[None]:
    """Replace these names of ``owner``, a module or an object, inside a ``with``.

    AttributeError, before anything is replaced, if this version of the library lacks one.
    """
    originals = {name: getattr(owner, name) for name in ours}
    try:
        for name, value in ours.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)

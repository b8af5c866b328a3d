"""Our functions and values in the place of a library's, where none of its settings serves."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


def replaced(owner: object, **ours: object) -> AbstractContextManager[None]:
    """Return a context in which ``owner``, a module or an object, has ``ours`` as its attributes.

    This call itself raises AttributeError if this version of the library lacks one of them.
    """
    originals = {name: getattr(owner, name) for name in ours}
    return _replacing(owner, originals, ours)


@contextmanager
def _replacing(
    owner: object, originals: dict[str, object], ours: dict[str, object]
) -> Iterator[None]:
    """Give ``owner`` the values of ``ours`` inside the ``with``, and ``originals`` after it."""
    try:
        for name, value in ours.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)

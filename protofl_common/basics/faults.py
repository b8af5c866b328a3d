"""Where an error comes from that nobody expected."""

import traceback
from pathlib import Path

from protofl_common.basics.text import printable

PACKAGES = frozenset(("protofl_common", "client_app", "server_app"))
LIBRARIES = frozenset(("site-packages", "dist-packages"))
STANDARD_LIBRARY = Path(traceback.__file__).parent


def fault_of(error: BaseException) -> str:
    """Return one line that says in whose code an unexpected error arose, with file and line.

    Of the files in its traceback, the innermost that belongs to no library decides: it is either
    ours, or has a network or function of the user's.
    """
    what = printable(f"{type(error).__name__}: {error}")
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if not _is_of_library(Path(frame.filename))]
    if not frames:
        return f"a fault of ProtoFL: {what}; report it"
    innermost = frames[-1]
    file = Path(innermost.filename)
    place = f"{what}, in {file}, line {innermost.lineno}"
    if _is_ours(file):
        return f"a fault of ProtoFL: {place}; report it"
    return f"a fault of {file.name}: {place}"


def _is_ours(file: Path) -> bool:
    return not PACKAGES.isdisjoint(file.parts)


def _is_of_library(file: Path) -> bool:
    """Return whether the code of ``file`` is a library's: an installed package's or Python's own.

    Code that was generated while running counts as a library's, too.
    """
    if _is_ours(file):
        return False
    is_installed = not LIBRARIES.isdisjoint(file.parts)
    is_generated = not file.exists()  # such as the ``<string>`` of a data class
    return is_installed or file.is_relative_to(STANDARD_LIBRARY) or is_generated

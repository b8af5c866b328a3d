"""Where an error comes from that nobody expected."""

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from protofl_common.basics.text import printable

PACKAGES = frozenset(("protofl_common", "client_app", "server_app"))
LIBRARIES = frozenset(("site-packages", "dist-packages"))
STANDARD_LIBRARY = Path(traceback.__file__).parent


def fault_of(error: BaseException, own_modules: Iterable[str] = ()) -> str:
    """Return one line that says in whose code an unexpected error arose, with file and line.

    Of the files in its traceback, the innermost that belongs to no library decides: it is either
    ours, or has a method, network or function of the user's. ``own_modules`` are the names of the
    user's modules that may run. What they return may be wrong, and fail in our code; and they may
    be installed among the libraries.
    """
    # a method may name one of our halves as its own
    packages = sorted({name.partition(".")[0] for name in own_modules} - PACKAGES)
    own_places = [place for name in packages for place in _places_of(name)]
    what = printable(f"{type(error).__name__}: {error}")
    place = what
    for frame in reversed(traceback.extract_tb(error.__traceback__)):  # the innermost first
        file = Path(frame.filename)
        is_own = _is_in(file, own_places)
        if _is_of_library(file) and not is_own:
            continue
        place = f"{what}, in {file}, line {frame.lineno}"
        if is_own or not _is_ours(file):
            return f"a fault of {file.name}: {place}"
        break

    if packages:
        names = ", ".join(packages)
        return f"a fault of {names} or of ProtoFL: {place}; report it unless it is of {names}"
    return f"a fault of ProtoFL: {place}; report it"


def _places_of(package: str) -> list[Path]:
    """Return the folders of an imported package, or the file of a module; [] for others."""
    module = sys.modules.get(package)
    folders = getattr(module, "__path__", None)
    file = getattr(module, "__file__", None)
    if folders is not None:
        return [Path(folder) for folder in folders]
    return [Path(file)] if file else []


def _is_in(file: Path, places: Iterable[Path]) -> bool:
    return any(file.is_relative_to(place) for place in places)


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

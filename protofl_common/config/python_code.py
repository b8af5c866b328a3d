"""The code of modules that settings name: its version, and the import that fits it."""

import hashlib
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def version_of(module: str) -> str:
    """Return 8 hexadecimal digits that stand for the code of ``module`` (`files_of`).

    "" if it has no files. The digits of an imported module are kept beside it: its files may be
    edited later, but this process goes on with what it imported.
    """
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if spec is None:
        return digest_of_files(files_of(module))
    if not hasattr(spec, "protofl_version"):
        spec.protofl_version = digest_of_files(files_of(module))
    return str(spec.protofl_version)


def import_as_named(module: str) -> ModuleType:
    """Import a module; from then on `version_of` it is that of the files that were imported.

    ImportError if a file of its package was edited during the import: then nobody knows which
    version of the code would run.
    """
    if module in sys.modules:
        return sys.modules[module]
    before = version_of(module)
    imported = import_module(module)
    if version_of(module) != before:
        package = module.partition(".")[0]
        # forget all of the package, lest a later import find what nobody knows the version of
        for name in list(sys.modules):
            if name == package or name.startswith(f"{package}."):
                del sys.modules[name]
        raise ImportError(f"a file of {package} was edited during its import; start again")
    return imported


def files_of(module: str) -> list[Path]:
    """Find the Python files of the package of ``module``, or the one file of a single module.

    [] for a module that Python does not find, or that has no file, as in a notebook.
    """
    package = module.partition(".")[0]
    try:
        spec = find_spec(package)
    except ValueError:  # ``__main__`` has no spec
        return []
    if spec is None:
        return []

    files: list[Path] = []
    for folder in spec.submodule_search_locations or ():
        files += Path(folder).rglob("*.py")
    if not files and spec.has_location:
        files = [Path(spec.origin or "")]
    # an editor's lock is a dangling link, and a path into a zip file is no file: none can be read
    return [file for file in files if file.is_file()]


def digest_of_files(files: Iterable[Path]) -> str:
    """Return the first 8 digits of a SHA-256 over the files' contents; "" without files."""
    contents = [file.read_bytes() for file in sorted(files)]
    if not contents:
        return ""
    return hashlib.sha256(b"".join(contents)).hexdigest()[:8]

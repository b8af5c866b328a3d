"""Loads a program of docker/ as a module."""

import importlib.util
from typing import Any

from tests.support import ROOT


def program(name: str) -> Any:
    """docker/<name>.py, without running it."""
    spec = importlib.util.spec_from_file_location(f"docker_{name}", ROOT / "docker" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

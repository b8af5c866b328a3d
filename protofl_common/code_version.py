"""Which code runs."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def code_version() -> str:
    """The first 8 digits of a SHA-256 over the code that an app's bundle carries, as it stands on this machine."""
    digest = hashlib.sha256()
    for package in ("client_app", "protofl_common", "server_app"):
        for file in sorted((ROOT / package).rglob("*.py")):
            if "tools" not in file.relative_to(ROOT).parts:
                digest.update(file.read_bytes())
    return digest.hexdigest()[:8]

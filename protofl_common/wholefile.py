"""Text files that a reader never sees half of."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename; OSError leaves the old file as it was."""
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)

"""Text files that a reader never sees half of, and folders that no other user sees into."""

from __future__ import annotations

import os
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make ``folder`` and what is missing above it, for this user only; folders that are there stay as they are."""
    for one in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        one.mkdir(mode=0o700, exist_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename; OSError leaves the old file as it was."""
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)

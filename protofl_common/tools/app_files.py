"""The files of an app that a bundle may hold, by themselves.

``flwr run`` and ``flwr build`` look at every file in the app's folder, those of a virtual environment too: 7 s of CPU
in a checkout with its ``.venv``, each time, and 0.1 s in a copy made here.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path


def copy_app(app: Path, folder: Path) -> Path:
    """Copy what ``fab-include`` of the app's pyproject.toml names to ``folder``, and return it.

    Flower makes the same bundle of either. OSError if ``app`` has no pyproject.toml.
    """
    text = (app / "pyproject.toml").read_text(encoding="utf-8")
    flower = tomllib.loads(text).get("tool", {}).get("flwr", {}).get("app", {})
    for pattern in ("/pyproject.toml", "/.gitignore", *flower.get("fab-include", ["/**/*"])):
        for file in filter(Path.is_file, app.glob(pattern.removeprefix("/"))):
            copy = folder / file.relative_to(app)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    return folder

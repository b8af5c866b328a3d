"""The app bundle as Flower packs it, and what an operator may say of it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from flwr.cli.build import build_fab_from_disk

from protofl_common.config.options import SettingsError
from protofl_common.tools.app_files import copy_app
from protofl_common.tools.site.client_process import INSTALLED


def bundle_hash(app: Path) -> str:
    """SHA-256 of the bundle of a checkout, or of that in a ``.fab`` file; SettingsError if there is none."""
    try:
        if app.suffix == ".fab":
            return hashlib.sha256(app.read_bytes()).hexdigest()
        with TemporaryDirectory() as folder:
            return hashlib.sha256(build_fab_from_disk(copy_app(app, Path(folder)))).hexdigest()
    except (OSError, ValueError) as error:
        raise SettingsError(f"{app}: neither a checkout nor a .fab file ({error})") from error


def allowed_code(text: str) -> str:
    """``text`` of ``--allow-code`` without spaces: ``installed``, or hashes separated by commas; else SettingsError."""
    names = [name.strip().lower() for name in text.split(",")]
    if names != [INSTALLED] and not all(re.fullmatch(r"[0-9a-f]{64}", name) for name in names):
        wanted = f"{INSTALLED}, or SHA-256 hashes (protofl site hash) separated by commas"
        raise SettingsError(f"--allow-code {text!r}: must be {wanted}")
    return ",".join(names)

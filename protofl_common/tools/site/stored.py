"""``protofl site status`` and ``purge``: what a site keeps of runs and of its data, and how it is removed."""

import re
import shutil
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from protofl_common.basics.files import remove
from protofl_common.basics.text import in_order, numbered
from protofl_common.config.options import Scalar, SettingsError
from protofl_common.experiment.node import DELTA, required_dp, site_name
from protofl_common.tools.findings import WRONG, existing
from protofl_common.tools.site.node import site_folders

CACHES = "caches/"  # what decoded data and features are called beside the names of runs, which have no slash
_ENTRY = re.compile(r".+-[0-9a-f]{16}(\.\w+)*")  # in a cache folder; whatever else lies there is not ours to remove


class Stored(NamedTuple):
    name: str
    paths: tuple[Path, ...]

    @property
    def files(self) -> list[Path]:
        return [file for path in self.paths for file in (path, *path.rglob("*")) if file.is_file()]

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def __str__(self) -> str:
        last = max((file.stat().st_mtime for file in self.files), default=None)
        when = "-" if last is None else f"{datetime.fromtimestamp(last):%Y-%m-%d %H:%M}"
        return f"{self.name:40} {self.bytes / 1e6:10.1f} MB  {when}"


def stored_at(node: Mapping[str, Scalar]) -> list[Stored]:
    """The runs of which this site keeps a model, and its caches, which are last."""
    states, cache = site_folders(node)
    models = {path.parents[1].name: path for path in states.glob("*/clients/*") if path.name == site_name(node)}
    caches = [path for at in ("*", "features/*") for path in sorted(cache.glob(at)) if _ENTRY.fullmatch(path.name)]
    return [*(Stored(name, (models[name],)) for name in in_order(models)), Stored(CACHES, tuple(caches))]


def ledgers_at(node: Mapping[str, Scalar]) -> Iterator[str]:
    """Yield what is wrong with ``privacy/``, and for each privacy ledger how much of ``require-dp`` is spent."""
    from client_app.consent import unknown_site
    from client_app.ledger_audit import lacking
    from client_app.privacy_ledger import spent

    if lost := lacking(site_folders(node)[0], site_name(node)) or unknown_site(node):
        yield f"{WRONG}: {lost}"
    most, delta = required_dp(node) or (None, DELTA)
    for file in sorted((site_folders(node)[0] / "privacy").glob("*.json")):
        share = f" of {most:g}" if most else ""
        yield f"privacy ledger {file.name}: ε = {spent(file, delta):.3g}{share} is spent (δ = {delta:g})"


def purge(node: Mapping[str, Scalar], names: list[str]) -> Iterator[str]:
    """Remove what is named, a line for each; SettingsError before for no name, an unknown or an ambiguous one."""
    from client_app.protections.secure_sum import blank_secrets

    stored = {entry.name: entry for entry in stored_at(node)}
    alike = {name: numbered(name, stored) for name in names if name not in stored}
    names = [alike[name][0] if len(alike.get(name, ())) == 1 else name for name in names]
    unknown = [name for name in names if name not in stored]
    if unknown or not names:
        what = f"{unknown[0]}: nothing of that name" if unknown else "purge: nothing is named"
        raise SettingsError(f"{what}; choose from {', '.join(stored)}")
    blank_secrets(site_folders(node)[0] / "privacy")
    for name in names:
        text = f"removed {stored[name]}"
        for path in stored[name].paths:
            remove(path)
            for folder in () if name == CACHES else (path.parent, path.parents[1]):
                if not any(folder.iterdir()):
                    folder.rmdir()
        yield text
    beginnings = tuple(re.sub(r"\d+$", "", name) for name in names)
    if left := [name for name in stored if name not in names and name.startswith(beginnings)]:
        yield f"still here: {', '.join(left)}; name each baseline, or other run of a like name, to remove it too"


def free_space(node: Mapping[str, Scalar]) -> Iterator[str]:
    for key, folder in zip(("state-dir", "cache-dir"), site_folders(node), strict=True):
        yield f"{key} {folder.absolute()}: {shutil.disk_usage(existing(folder)).free / 1e9:.1f} GB free"

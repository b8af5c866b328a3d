"""The runs in a folder of results: what their files say of who took part, and how far they are."""

import json
import time
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import safe_open

from protofl_common.experiment.settings import flatten
from protofl_common.runs.folder import METRICS, RunFolder, troubles

SETTINGS, CHECKPOINTS = "settings.toml", "checkpoints"
HEAVY = ("clients", CHECKPOINTS)  # what a finished run can do without: the clients' models, and what lets it go on


@dataclass
class KnownSite:
    node: int
    last: int = 0  # the round of its last valid reply; 0: none
    trouble: dict[str, int] = field(default_factory=dict)  # kind of trouble -> how often
    reason: str = ""  # of the latest


@dataclass(frozen=True)
class KnownRun(RunFolder):
    """A run's folder, and what stands in its checkpoints."""

    @property
    def age(self) -> float:
        return time.time() - (self.path / METRICS).stat().st_mtime

    @property
    def goes_on(self) -> bool:
        with suppress(Timeout), FileLock(self.lock, timeout=0) if self.lock.exists() else nullcontext():
            return False
        return True

    @property
    def rounds(self) -> tuple[int, int]:
        """Rounds with a checkpoint, and how many there shall be."""
        return max((int(path.stem) for path in self._checkpoints()), default=0), int(self.settings().get("rounds", 0))

    def settings(self) -> dict[str, Any]:
        try:
            return flatten(tomllib.loads((self.path / SETTINGS).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def known_sites(self) -> dict[str, KnownSite]:
        sites = dict[str, KnownSite]()
        if newest := max(self._checkpoints(), default=None):
            with safe_open(newest, framework="numpy") as file:
                owners = json.loads(file.metadata()["facts"])["owners"]
            sites = {site: KnownSite(node) for site, node in owners.items()}
        for row in self.rows():
            for site in row["clients"]:
                sites.setdefault(site, KnownSite(0)).last = row["round"]
            for kind, site, reason in troubles(row):
                facts = sites.setdefault(site, KnownSite(0))
                facts.trouble[kind] = facts.trouble.get(kind, 0) + 1
                facts.reason = f"round {row['round']}: {reason}"
        return sites

    def _checkpoints(self) -> Iterator[Path]:
        return (path for path in (self.path / CHECKPOINTS).glob("*.safetensors") if path.stem.isdigit())


def size_of(path: Path) -> int:
    """Bytes of all files in a folder; what links lead to is elsewhere."""
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def runs_in(folder: Path) -> list[KnownRun]:
    """The runs in a folder of results, the latest first."""
    runs = [KnownRun(path.parent) for path in folder.glob(f"*/{METRICS}") if (path.parent / SETTINGS).exists()]
    return sorted(runs, key=lambda run: run.age)

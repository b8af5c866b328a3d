"""The runs in a folder of results: how far they are, and what is known of their sites."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import safe_open

from protofl_common.config.lists import names_in
from protofl_common.runs.folder import (
    METRICS,
    SETTINGS,
    RunFolder,
    baseline_folder,
    unused_replies,
)

SECONDS_PER_DAY = 86400


@dataclass
class KnownSite:
    """What a run's checkpoint and metrics tell of one site."""

    node: int  # Flower's number; 0: not known
    last: int = 0  # the round of its last valid reply; 0: none
    trouble: dict[str, int] = field(default_factory=dict)  # kind of trouble -> how often
    reason: str = ""  # of the latest trouble


class KnownRun(RunFolder):
    """A run's folder, and what stands in its checkpoints."""

    @property
    def age(self) -> float:
        """Seconds since its metrics were written last."""
        return time.time() - (self.path / METRICS).stat().st_mtime

    @property
    def is_under_way(self) -> bool:
        """True if a process is at work on the run: it holds the run's lock."""
        if not self.lock.exists():
            return False
        try:
            with FileLock(self.lock, timeout=0):
                return False
        except Timeout:
            return True

    @property
    def rounds(self) -> tuple[int, int]:
        """The round of the newest checkpoint (0: none), and how many rounds there shall be."""
        newest_first = self.checkpoints()
        latest = int(newest_first[0].stem) if newest_first else 0
        return latest, int(self.settings().get("rounds", 0))

    @property
    def baselines(self) -> list[Path]:
        """The folders of its baselines, of which some may not have begun."""
        names = names_in(self.settings().get("baselines"))
        return [baseline_folder(self.path, algo) for algo in names]

    def checkpoint_facts(self) -> dict[str, Any]:
        """Read the newest checkpoint's facts, without the state; {} if there is no checkpoint.

        They are the attributes of `server_app.run.checkpoint.Checkpoint`, such as ``round``.
        """
        newest_first = self.checkpoints()
        if not newest_first:
            return {}
        with safe_open(newest_first[0], framework="numpy") as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
        return facts

    def known_sites(self) -> dict[str, KnownSite]:
        """Return the run's sites by name, from its newest checkpoint and its metrics."""
        sites: dict[str, KnownSite] = {}
        for site, node in self.checkpoint_facts().get("owners", {}).items():
            sites[site] = KnownSite(node)

        for row in self.rows():
            for name in row["clients"]:
                site = sites.setdefault(name, KnownSite(0))
                site.last = row["round"]
            for kind, name, reason in unused_replies(row):
                site = sites.setdefault(name, KnownSite(0))
                site.trouble[kind] = site.trouble.get(kind, 0) + 1
                site.reason = f"round {row['round']}: {reason}"
            for name, answered_round in row.get("counted-late", {}).items():
                site = sites.setdefault(name, KnownSite(0))
                site.last = answered_round
                site.trouble["counted late"] = site.trouble.get("counted late", 0) + 1
                site.reason = f"round {row['round']}: its reply to round {answered_round} counted"
        return sites


def runs_in(folder: Path) -> list[KnownRun]:
    """Return the runs in a folder of results, the latest first."""
    runs = []
    for metrics in folder.glob(f"*/{METRICS}"):
        if (metrics.parent / SETTINGS).exists():
            runs.append(KnownRun(metrics.parent))
    return sorted(runs, key=lambda run: run.age)


def main_run(run: KnownRun, runs: list[KnownRun]) -> KnownRun:
    """Return the one of ``runs`` of which ``run`` is a baseline, or ``run`` itself."""
    for candidate in runs:
        if run.path in candidate.baselines:
            return candidate
    return run


def stopped_runs(runs: list[KnownRun]) -> list[KnownRun]:
    """Return the runs that are not finished and on which no process is at work."""
    return [run for run in runs if not run.summary() and not run.is_under_way]

"""The runs in a folder of results: how far they are, and what is known of their sites."""

import json
import os
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from protofl_common.config.lists import names_in
from protofl_common.config.options import SettingsError
from protofl_common.runs.folder import (
    CHECKPOINT_FORMAT,
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

    node: int = 0  # Flower's number; 0: not known
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
    def bytes(self) -> int:
        """The size of all files in the folder."""
        files = [file for file in self.path.rglob("*") if not file.is_dir()]
        return sum(file.lstat().st_size for file in files)  # of a link only the link

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
        """Read the newest checkpoint's facts, but not its tensors; {} if there is no checkpoint.

        A damaged one, as a power cut may leave, is passed over, and so is one of another version.
        The facts are the attributes of `server_app.run.checkpoint.Checkpoint`, such as ``round``.
        """
        for path in self.checkpoints():
            metadata: dict[str, str] = {}
            with suppress(SafetensorError, OSError), safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
            if metadata.get("format") == CHECKPOINT_FORMAT:
                facts: dict[str, Any] = json.loads(metadata["facts"])
                return facts
        return {}

    def known_sites(self) -> dict[str, KnownSite]:
        """Return the run's sites by name, from its newest checkpoint and its metrics.

        Of each site the troubles of all rounds are counted, and the latest has its reason told.
        """
        sites: dict[str, KnownSite] = defaultdict(KnownSite)
        for name, node in self.checkpoint_facts().get("owners", {}).items():
            sites[name].node = node

        for row in self.rows():  # from the first round on, so that the latest facts are kept
            for name in row["clients"]:
                sites[name].last = row["round"]
            troubles: list[tuple[str, str, str]] = [*unused_replies(row)]
            for name, answered_round in row.get("counted-late", {}).items():
                sites[name].last = answered_round
                reason = f"its reply to round {answered_round} counted"
                troubles.append(("counted late", name, reason))
            for kind, name, reason in troubles:
                site = sites[name]
                site.trouble[kind] = site.trouble.get(kind, 0) + 1
                site.reason = f"round {row['round']}: {reason}"
        return sites


def runs_in(folder: Path) -> list[KnownRun]:
    """Return the runs in a folder of results, the latest first; none if there is no folder.

    SettingsError for a folder that this user cannot read.
    """
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        cure = "type the command as the user of the worker"
        raise SettingsError(f"{folder}: this user cannot read the runs in it; {cure}")
    runs = []
    for metrics in folder.glob(f"*/{METRICS}"):
        if (metrics.parent / SETTINGS).exists():
            runs.append(KnownRun(metrics.parent))
    return sorted(runs, key=lambda run: run.age)


def main_run(run: KnownRun, runs: list[KnownRun]) -> KnownRun:
    """Return the run of which ``run`` is a baseline, from ``runs``; without one ``run`` itself."""
    for candidate in runs:
        if run.path in candidate.baselines:
            return candidate
    return run


def stopped_runs(runs: list[KnownRun]) -> list[KnownRun]:
    """Return the runs that are not finished and on which no process is at work."""
    return [run for run in runs if not run.summary() and not run.is_under_way]

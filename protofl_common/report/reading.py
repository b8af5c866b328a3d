"""A run's folder -> what the page shows, also of a run that still goes on or has failed."""

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from protofl_common.basics.text import in_order
from protofl_common.config.lists import names_in
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.runs.figures import HIDDEN, compared
from protofl_common.runs.folder import KINDS, SETTINGS, RoundRow, RunFolder, SiteFacts

AUDIT = "audit.json"
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StoredPrototypes:
    values: Floats  # [P, D]
    labels: Ints  # [P], in [0, C)
    owners: Ints  # [P], positions in `sites`; all 0 where nobody owns them
    sites: tuple[str, ...]
    round: int  # after which round


class RecordedRun:
    """One run without what is missing or damaged.

    SettingsError for a folder without settings, or of a later version.
    """

    def __init__(self, folder: Path) -> None:
        files = RunFolder(folder)
        self.folder = folder
        self.name = folder.resolve().name
        self.settings = files.settings()
        if not self.settings:
            raise SettingsError(f"{folder}: no {SETTINGS} in it; give the folder of a run")

        self.rows = files.rows()
        self.summary = files.summary()
        self.rounds = [row for row in self.rows if row["kind"] == "round"]
        self.hides_clients = any(_has_only_means(row) for row in self.rows)
        self.hidden = f" {HIDDEN}" if self.hides_clients else ""
        self.whose = "all samples" if self.hides_clients else "the clients"  # over which a mean is

        self.facts = files.sites()
        self.margins = files.margins()
        # of the last round's clients, and of the server after it
        prototypes = folder / "client-prototypes.safetensors"
        self.client_prototypes = _vectors(prototypes)
        self.global_prototypes = _vectors(prototypes, "global-")
        self.audit: list[dict[str, Any]] = []  # what `protofl audit` found, if it was asked
        with suppress(OSError, ValueError):
            self.audit = json.loads((folder / AUDIT).read_text(encoding="utf-8"))

        baselines = names_in(self.settings.get("baselines"))
        self.compared = compared(folder.resolve(), baselines) if baselines else []
        # baselines without a result, as when a folder is renamed; the run itself is compared, too
        self.absent = len(baselines) + 1 - len(self.compared)

        self.sites = self._sites()
        self.last: dict[str, RoundRow] = {}  # way to predict -> its last evaluation
        for kind in KINDS:
            evaluations = self.evaluations(kind)
            if evaluations:
                self.last[kind] = evaluations[-1]
        # the way to predict with the better last mean; "" without any
        self.better = max(
            self.last, key=lambda kind: self.last[kind]["accuracy"][kind]["mean"], default=""
        )

    def _sites(self) -> dict[str, SiteFacts]:
        """Return what is known of each site: of those introduced, and of those with a reply."""
        sites = dict(self.facts.get("sites", {}))
        for row in self.rows:
            for site in row["clients"]:
                sites.setdefault(site, {})
        return {site: sites[site] for site in in_order(sites)}

    @cached_property
    def domains(self) -> dict[str, list[str]]:
        """Domain -> its sites; {} unless there are at least two domains."""
        domains: dict[str, list[str]] = {}
        for site, facts in self.sites.items():
            domain = facts.get("domain")
            if domain:
                domains.setdefault(domain, []).append(site)
        return dict(sorted(domains.items())) if len(domains) > 1 else {}

    def evaluations(self, kind: str) -> list[RoundRow]:
        """Return the rows with an accuracy of this way to predict."""
        return [row for row in self.rows if kind in row["accuracy"]]

    def class_name(self, label: int) -> str:
        classes = self.facts.get("classes", [])
        return str(classes[label]) if label < len(classes) else str(label)

    @property
    def title(self) -> str:
        algo = str(self.settings.get("algo", ""))
        algorithm = self.facts.get("algorithm")
        if not algorithm:
            algorithm = CATALOG[algo].title if algo in CATALOG else algo
        data = self.settings.get("dataset", "unknown data")
        if self.settings.get("partition") == "own":
            data = "own data of the sites"
        return f"{algorithm} on {data}"


def _has_only_means(row: RoundRow) -> bool:
    """Return whether secure aggregation left no figure of the spread over clients."""
    return any("std" not in figures for figures in row["accuracy"].values())


def _vectors(path: Path, whose: str = "") -> StoredPrototypes | None:
    """Read the arrays whose names begin with ``whose``; None where there are none, or damaged."""
    with suppress(OSError, SafetensorError, KeyError), safe_open(path, framework="numpy") as file:
        stored = set(file.keys())
        if not {whose + "means", whose + "labels"} <= stored:
            return None
        labels = file.get_tensor(whose + "labels")
        if not len(labels):
            return None
        owners = labels * 0
        if whose + "owners" in stored:
            owners = file.get_tensor(whose + "owners")
        facts = file.metadata() or {}
        return StoredPrototypes(
            values=file.get_tensor(whose + "means").astype(np.float64),
            labels=labels,
            owners=owners,
            sites=tuple(json.loads(facts["sites"])),
            round=int(facts["round"]),
        )
    return None

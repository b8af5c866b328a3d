"""A run's folder -> what the page shows. Takes runs that still go on, that failed, and those of older versions."""

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from protofl_common.basics.text import in_order, names_in
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
    """One run without what is missing or damaged; SettingsError without settings, or of a later version."""

    def __init__(self, folder: Path) -> None:
        files = RunFolder(folder)
        self.folder, self.name, self.settings = folder, folder.resolve().name, files.settings()
        if not self.settings:
            raise SettingsError(f"{folder}: no {SETTINGS} in it; give the folder of a run")
        self.rows, self.summary = files.rows(), files.summary()
        self.rounds = [row for row in self.rows if row["kind"] == "round"]
        self.hides_clients = any("std" not in figures for row in self.rows for figures in row["accuracy"].values())
        self.hidden = f" {HIDDEN}" if self.hides_clients else ""
        self.whose = "all samples" if self.hides_clients else "the clients"  # over which a mean is
        self.facts, self.margins = files.sites(), files.margins()
        sent = folder / "client-prototypes.safetensors"  # of the last round, with the global ones after it
        self.client_prototypes, self.global_prototypes = _vectors(sent), _vectors(sent, "global-")
        self.audit: list[dict[str, Any]] = []  # what `protofl audit` found, if it was asked
        with suppress(OSError, ValueError):
            self.audit = json.loads((folder / AUDIT).read_text(encoding="utf-8"))
        baselines = names_in(self.settings.get("baselines"))
        self.compared = compared(folder.resolve(), baselines) if baselines else []
        self.absent = len(baselines) + 1 - len(self.compared)  # baselines without a result, as when a folder is renamed
        introduced = self.facts.get("sites") or (self.summary["clients"] if self.summary else {})
        every = introduced | {site: {} for row in self.rows for site in row["clients"] if site not in introduced}
        self.sites: dict[str, SiteFacts] = {site: every[site] for site in in_order(every)}
        self.last = {kind: rows[-1] for kind in KINDS if (rows := self.evaluations(kind))}
        # the way to predict with the better last mean; "" without any
        self.better = max(self.last, key=lambda kind: self.last[kind]["accuracy"][kind]["mean"], default="")

    @cached_property
    def domains(self) -> dict[str, list[str]]:
        """Domain -> its sites; {} unless there are at least two domains."""
        domains: dict[str, list[str]] = {}
        for site, facts in self.sites.items():
            if domain := facts.get("domain"):
                domains.setdefault(domain, []).append(site)
        return dict(sorted(domains.items())) if len(domains) > 1 else {}

    def evaluations(self, kind: str) -> list[RoundRow]:
        return [row for row in self.rows if kind in row["accuracy"]]

    def class_name(self, label: int) -> str:
        classes = self.facts.get("classes", [])
        return str(classes[label]) if label < len(classes) else str(label)

    @property
    def title(self) -> str:
        algo = str(self.settings.get("algo", ""))
        algorithm = self.facts.get("algorithm") or (CATALOG[algo].title if algo in CATALOG else algo)
        own = self.settings.get("partition") == "own"
        return f"{algorithm} on {'own data of the sites' if own else self.settings.get('dataset', 'unknown data')}"


def _vectors(path: Path, whose: str = "") -> StoredPrototypes | None:
    with suppress(OSError, SafetensorError, KeyError), safe_open(path, framework="numpy") as file:
        facts = dict(file.metadata() or {})
        names = {name.removeprefix(whose): name for name in file.keys() if name.startswith(whose)}  # noqa: SIM118
        if {"means", "labels"} <= names.keys() and len(labels := file.get_tensor(names["labels"])):
            owners = file.get_tensor(names["owners"]) if "owners" in names else labels * 0
            sites, values = tuple(json.loads(facts["sites"])), file.get_tensor(names["means"]).astype(np.float64)
            return StoredPrototypes(values, labels, owners, sites, int(facts["round"]))
    return None

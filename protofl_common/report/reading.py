"""A run's folder -> what the page shows, also of a run that still goes on or has failed."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from protofl_common.basics.text import in_order
from protofl_common.config.lists import names_in
from protofl_common.config.options import SettingsError
from protofl_common.runs.figures import HIDDEN, compared
from protofl_common.runs.folder import (
    SETTINGS,
    RoundRow,
    RunFolder,
    SiteFacts,
    without_clients,
)
from protofl_common.runs.over_clients import figures_of, hides_clients
from protofl_common.tasks import Result, task_with
from protofl_common.tasks.metrics import KINDS

AUDIT = "audit.json"
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StoredPrototypes:
    """The last round's: what clients sent, and ``global-…``, what the server made of it."""

    arrays: dict[str, NDArray[Any]]  # means [P, D], labels [P], owners [P] (positions in `sites`)
    sites: list[str]
    round: int


class RecordedRun:
    """All that the page shows of one run; files that are missing or damaged count as empty.

    The figures of many clients over many rounds may exceed the memory. Therefore `rows` are without
    clients; `each_row` reads them once more, one by one, and `last_rows` has the last ones whole.
    SettingsError for a folder without settings, or of a later version.
    """

    def __init__(self, folder: Path) -> None:
        """Read the files of a run's folder."""
        files = RunFolder(folder)
        self.files = files
        self.folder = folder
        self.name = folder.resolve().name
        self.settings = files.settings()
        if not self.settings:
            raise SettingsError(f"{folder}: no {SETTINGS} in it; give the folder of a run")

        self.facts = files.sites()
        self.summary = files.summary()
        self._read_rows()
        self.rounds = [row for row in self.rows if row["kind"] == "round"]
        self.hides_clients = any(map(hides_clients, self.rows))
        self.note_on_hidden = f" {HIDDEN}" if self.hides_clients else ""
        self.averaged_over = "all samples" if self.hides_clients else "the clients"

        self.margins = next(files.margins(latest_first=True), None)
        self.prototypes = _read_prototypes(folder / "client-prototypes.safetensors")
        self.audit: list[dict[str, Any]] = []  # what `protofl audit` found, if it was asked
        with suppress(OSError, ValueError):
            self.audit = json.loads((folder / AUDIT).read_text(encoding="utf-8"))

        baselines = names_in(self.settings.get("baselines"))
        self.compared = compared(folder.resolve(), baselines) if baselines else []
        # baselines whose result is not found, as after their folder was renamed
        self.missing_baselines = len(baselines) + 1 - len(self.compared)  # 1: the run itself

        self.task = task_with(self.settings)
        self.results: dict[str, Result] = {}  # way to predict -> the run's result by it
        for kind in reversed(KINDS):  # the head first, as in the run's result
            if kind in self.last_rows:
                self.results[kind] = self.task.result_of(kind, self.last_rows)
        means = {kind: self.last_result(kind)["mean"] for kind in self.results}
        # the way to predict with the better last mean; "" without any
        self.better_kind = max(means, key=means.__getitem__, default="")

    def last_result(self, kind: str) -> dict[str, float]:
        """Return the run's last result by this way to predict, over the clients."""
        name = self.results[kind].name
        return dict(figures_of(self.last_rows[name])[name])

    def _read_rows(self) -> None:
        """Read the rows of all rounds, one by one, and note what they have of the clients."""
        self.rows: list[RoundRow] = []
        self.last_rows: dict[str, RoundRow] = {}  # figure -> the last row that has it
        self.last_row: RoundRow | None = None
        self.last_measured: RoundRow | None = None  # the last row that has metrics
        sites = dict(self.facts.get("sites", {}))
        evaluated = set()  # the clients of each evaluation
        for row in self.files.each_row():
            for site in row["clients"]:
                sites.setdefault(site, {})  # one that replied, but was never introduced
            self.rows.append(without_clients(row))
            self.last_row = row
            for name in figures_of(row):
                self.last_rows[name] = row
            if row.get("metrics"):
                self.last_measured = row
            if row["accuracy"]:
                evaluated.add(frozenset(row["clients"]))
        self.evaluates_same_clients = len(evaluated) < 2
        self.sites: dict[str, SiteFacts] = {site: sites[site] for site in in_order(sites)}

    def each_row(self) -> Iterator[RoundRow]:
        """Read `rows` once more, one by one, with their clients.

        Rounds that the run has added to the file since then are left out, so that all figures of a
        page are of the same rounds.
        """
        return islice(self.files.each_row(), len(self.rows))

    @cached_property
    def domains(self) -> dict[str, list[str]]:
        """Domain -> its sites; {} unless there are at least two domains."""
        domains: dict[str, list[str]] = {}
        for site, facts in self.sites.items():
            domain = facts.get("domain")
            if domain:
                domains.setdefault(domain, []).append(site)
        return dict(sorted(domains.items())) if len(domains) > 1 else {}

    def class_name(self, label: int) -> str:
        """Return the name of a class, or its number where names are not known."""
        classes = self.facts.get("classes", [])
        return str(classes[label]) if label < len(classes) else str(label)

    @property
    def algorithm(self) -> str:
        """The algorithm's title, such as "FedProto"; its name where the run has told nobody yet."""
        return str(self.facts.get("algorithm") or self.settings.get("algo", ""))

    @property
    def worst_tenth(self) -> str:
        """What the worst 10 % of the clients are: of fewer than 20 it is one."""
        return "the worst client" if len(self.sites) < 20 else "the worst tenth"

    @property
    def title(self) -> str:
        """The heading of the page, such as "FedProto on mnist"."""
        data = self.settings.get("dataset", "unknown data")
        if self.settings.get("partition") == "own":
            data = "own data of the sites"
        return f"{self.algorithm} on {data}"


def _read_prototypes(path: Path) -> StoredPrototypes | None:
    """Read the prototypes of a run; None if the file is missing or damaged."""
    with suppress(OSError, SafetensorError, KeyError), safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = file.metadata() or {}
        return StoredPrototypes(arrays, json.loads(facts["sites"]), int(facts["round"]))
    return None

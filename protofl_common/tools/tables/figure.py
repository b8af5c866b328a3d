"""The figure of a cell, and how it is read from the run's folder.

A figure has four parts (`LEGAL`, docs/tables.md); a table, its columns and its rows each name some of them.
"""

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from protofl_common.config.options import SettingsError
from protofl_common.runs import over_clients
from protofl_common.runs.folder import RoundRow, RunFolder

COUNTS = ("prototypes-sent", "prototypes-received", "numbers")
LEGAL = {
    "when": ("final, best, last-N", r"final|best|last-[1-9]\d*"),
    "what": (
        ", ".join(["head", "prototype", *COUNTS, "head/auc", "validation/head"]),
        "|".join([*COUNTS, r"(validation/)?(head|prototype)(/\S+)?"]),
    ),
    "domain": ("the name of a domain", r".*"),
    "over": ("mean, by-samples, std, worst-N%, best-N%", r"mean|by-samples|std|(worst|best)-[1-9]\d*%"),
}
BYTES_PER_NUMBER = 4


class NoFigure(SettingsError):
    """The run has no such figure."""


@dataclass(frozen=True)
class Figure:
    when: str = "final"
    what: str = "head"
    domain: str = ""
    over: str = "mean"

    @classmethod
    def of(cls, parts: dict[str, Any], where: str) -> Self:
        """A figure from the parts that a table names; SettingsError with a line for each unknown part or value."""
        problems = []
        for name, value in parts.items():
            if name not in LEGAL:
                problems.append(f"{where}: figure.{name}: unknown; choose among {', '.join(LEGAL)}")
            elif not re.fullmatch(LEGAL[name][1], str(value)):
                problems.append(f"{where}: figure.{name} = {value!r}: choose {LEGAL[name][0]}")
        if not problems and parts.get("when") == "best" and parts.get("what") in COUNTS:
            problems.append(f"{where}: figure.when = 'best' needs an accuracy; {parts['what']} has no best")
        if problems:
            raise SettingsError("\n".join(problems))
        return cls(**{name: str(value) for name, value in parts.items()})

    @property
    def digits(self) -> int:
        """How many decimals it is shown with: a metric in [0, 1] needs more than percent."""
        return 1 if self.what in COUNTS else 2 if over_clients.in_percent(self.what) else 4

    def __str__(self) -> str:
        parts = [self.when, self.what, f"of {self.domain}" if self.domain else ""]
        return " ".join(part for part in [*parts, "" if self.over == "mean" else self.over] if part)

    def read(self, folder: Path) -> float:
        """The figure of the finished run in ``folder``; NoFigure when it has none."""
        run = RunFolder(folder)
        rows = self._candidates(run.rows()) if self.when == "best" else run.rows()
        domains = {site: facts["domain"] for site, facts in run.finished_summary()["clients"].items()}
        counts = self.what in COUNTS
        values = [self._count(row) if counts else self._accuracy(row, domains) for row in rows if self._is_in(row)]
        if not values:
            raise NoFigure(f"no evaluation of {self.what}")
        if self.when == "best":
            return max(values)
        last = 1 if self.when == "final" else int(self.when.removeprefix("last-"))
        return statistics.fmean(values[-last:])

    def described(self, folder: Path) -> str:
        """The figure, and by which data its round was chosen in that run, and among which, if it is the best one's."""
        run = RunFolder(folder)
        hidden = any("std" not in accuracy for accuracy in run.finished_summary()["accuracy"].values())
        name = f"{self} over all samples" if hidden and self.what not in COUNTS else str(self)  # not over the clients
        rows = run.rows() if self.when != "final" else []
        if self.when != "best":
            many = sum(map(self._is_in, rows))
            return f"{name}, of {many} evaluations" if rows and many < int(self.when.removeprefix("last-")) else name
        rows = [row for row in rows if self._kind in over_clients.figures_of(row)]
        on, many = over_clients.best_evaluation(rows, self._kind)[1], len(over_clients.of_all_sites(rows))
        few = f", among the {many} of {len(rows)} evaluations that all clients made" if many < len(rows) else ""
        return f"{name}, its round chosen on {on} data{few}" if rows else name

    def _is_in(self, row: RoundRow) -> bool:
        return row["kind"] == "round" if self.what in COUNTS else self.what in over_clients.figures_of(row)

    @property
    def _kind(self) -> str:
        return self.what.removeprefix("validation/")

    def _candidates(self, rows: list[RoundRow]) -> list[RoundRow]:
        """The best round alone where validation data choose it, or for a deviation; else all rounds of all sites."""
        best, on = over_clients.best_evaluation(rows, self._kind)
        return over_clients.of_all_sites(rows) if on == "test" and self.over != "std" else [best] if best else []

    def _accuracy(self, row: RoundRow, domains: dict[str, str]) -> float:
        clients = row["clients"]
        scale = 100 if over_clients.in_percent(self.what) else 1
        if not any(map(over_clients.figures_of, clients.values())):
            if self.domain or self.over not in ("mean", "by-samples"):
                raise NoFigure(f"{self}: secure aggregation hides single clients; it leaves a mean over all samples")
            return float(scale * over_clients.figures_of(row)[self.what]["weighted"])
        chosen: list[tuple[float, int]] = [
            (scale * over_clients.figures_of(client)[self.what], samples)
            for site, client in clients.items()
            if self.what in over_clients.figures_of(client) and self.domain in ("", domains.get(site))
            if (samples := client["test-samples"] if self.what == self._kind else client["validation-samples"])
        ]
        if not chosen:
            names = ", ".join(sorted(set(map(str, domains.values()))))
            raise NoFigure(f"no client of domain {self.domain!r} with {self.what}; there are {names}")
        shares, numbers = zip(*chosen, strict=True)
        if self.over in ("mean", "by-samples", "std"):
            return over_clients.over_clients(shares, numbers)["weighted" if self.over == "by-samples" else self.over]
        return over_clients.mean_of_part(shares, self.over)

    def _count(self, row: RoundRow) -> float:
        if self.what == "numbers":
            return float(row["bytes"]["up"] + row["bytes"]["down"]) / BYTES_PER_NUMBER
        name = "local-prototypes" if self.what == "prototypes-sent" else "global-prototypes"
        if name not in row.get("server", {}):
            raise NoFigure(f"the algorithm reports no {name}")
        return float(row["server"][name]) / (max(1, row["valid"]) if self.what == "prototypes-sent" else 1)

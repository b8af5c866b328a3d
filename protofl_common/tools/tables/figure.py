"""The figure of a cell, and how it is read from the run's folder.

A figure has four parts (`LEGAL`, docs/tables.md); a table, its columns and its rows each name some.
"""

import re
import statistics
from dataclasses import dataclass
from itertools import islice
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
    "over": (
        "mean, by-samples, std, worst-N%, best-N%",
        r"mean|by-samples|std|(worst|best)-[1-9]\d*%",
    ),
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
        """Make a figure of the parts that a table names.

        SettingsError with a line for each unknown part or value.
        """
        problems = []
        for name, value in parts.items():
            if name not in LEGAL:
                problems.append(f"{where}: figure.{name}: unknown; choose among {', '.join(LEGAL)}")
            elif not re.fullmatch(LEGAL[name][1], str(value)):
                problems.append(f"{where}: figure.{name} = {value!r}: choose {LEGAL[name][0]}")
        if not problems and parts.get("when") == "best" and parts.get("what") in COUNTS:
            problems.append(
                f"{where}: figure.when = 'best' needs an accuracy; {parts['what']} has no best"
            )
        if problems:
            raise SettingsError("\n".join(problems))
        return cls(**{name: str(value) for name, value in parts.items()})

    @property
    def digits(self) -> int:
        """How many decimals it is shown with: a metric in [0, 1] needs more than percent."""
        if self.what in COUNTS:
            return 1
        return 2 if over_clients.in_percent(self.what) else 4

    def __str__(self) -> str:
        parts = [self.when, self.what]
        if self.domain:
            parts.append(f"of {self.domain}")
        if self.over != "mean":
            parts.append(self.over)
        return " ".join(parts)

    def read(self, folder: Path) -> float:
        """Return the figure of the finished run in ``folder``; NoFigure when it has none."""
        run = RunFolder(folder)
        if self.when == "best":
            rows = [row for row in self._candidates(run.rows()) if self._is_in(row)]
        else:
            rows = list(islice(filter(self._is_in, run.latest_rows()), self._last))
        if not rows:
            raise NoFigure(f"no evaluation of {self.what}")

        clients = run.finished_summary()["clients"]
        domains = {site: facts["domain"] for site, facts in clients.items()}
        values = []
        for row in rows:
            is_count = self.what in COUNTS
            values.append(self._count(row) if is_count else self._accuracy(row, domains))
        return max(values) if self.when == "best" else statistics.fmean(values)

    @property
    def _last(self) -> int:
        """Of how many evaluations at the end it is the mean."""
        return 1 if self.when == "final" else int(self.when.removeprefix("last-"))

    def described(self, folder: Path) -> str:
        """Return the figure's name, and what a reader must know of it in this run.

        Of the best one, by which data its round was chosen, and among which rounds.
        """
        run = RunFolder(folder)
        name = str(self)
        is_hidden = any(
            "std" not in of_kind for of_kind in run.finished_summary()["accuracy"].values()
        )
        if is_hidden and self.what not in COUNTS:  # not over the clients
            name += " over all samples"
        if self.when == "final":
            return name
        if self.when == "best":
            return name + self._choice(run.rows())
        rows = run.rows()
        count = sum(map(self._is_in, rows))
        return f"{name}, of {count} evaluations" if rows and count < self._last else name

    def _choice(self, rows: list[RoundRow]) -> str:
        """Say by which data the best round was chosen, and among which rounds if not all."""
        evaluations = [row for row in rows if self._kind in over_clients.figures_of(row)]
        if not evaluations:
            return ""
        _, data = over_clients.best_evaluation(evaluations, self._kind)
        text = f", its round chosen on {data} data"
        comparable = len(over_clients.comparable_rounds(evaluations))
        if comparable < len(evaluations):
            count = f"{comparable} of {len(evaluations)}"
            text += f", among the {count} evaluations that all clients made"
        return text

    def _is_in(self, row: RoundRow) -> bool:
        """Return whether the row has the figure."""
        if self.what in COUNTS:
            return row["kind"] == "round"
        return self.what in over_clients.figures_of(row)

    @property
    def _kind(self) -> str:
        return self.what.removeprefix("validation/")

    def _candidates(self, rows: list[RoundRow]) -> list[RoundRow]:
        """Return the rounds whose largest figure is the best one.

        The best round alone where validation data choose it, or for a deviation, which is no better
        for being large; else all rounds of all sites.
        """
        best, data = over_clients.best_evaluation(rows, self._kind)
        if data == "test" and self.over != "std":
            return over_clients.comparable_rounds(rows)
        return [best] if best else []

    def _accuracy(self, row: RoundRow, domains: dict[str, str]) -> float:
        """Return the accuracy in percent, or the metric, over the clients of the domain."""
        clients = row["clients"]
        scale = 100 if over_clients.in_percent(self.what) else 1
        if not any(map(over_clients.figures_of, clients.values())):
            if self.domain or self.over not in ("mean", "by-samples"):
                raise NoFigure(
                    f"{self}: secure aggregation hides single clients; "
                    "it leaves a mean over all samples"
                )
            return float(scale * over_clients.figures_of(row)[self.what]["weighted"])

        shares = []
        samples = []
        for site, client in clients.items():
            figures = over_clients.figures_of(client)
            if self.what not in figures or self.domain not in ("", domains.get(site)):
                continue
            is_on_test_data = self.what == self._kind
            number = client["test-samples" if is_on_test_data else "validation-samples"]
            if number:
                shares.append(scale * figures[self.what])
                samples.append(number)
        if not shares:
            names = ", ".join(sorted(set(map(str, domains.values()))))
            raise NoFigure(
                f"no client of domain {self.domain!r} with {self.what}; there are {names}"
            )

        if self.over not in ("mean", "by-samples", "std"):
            return over_clients.mean_of_part(shares, self.over)
        measure = "weighted" if self.over == "by-samples" else self.over
        return over_clients.over_clients(shares, samples)[measure]

    def _count(self, row: RoundRow) -> float:
        """Return numbers that travelled, or prototypes: sent ones of a client, received ones."""
        if self.what == "numbers":
            return float(row["bytes"]["up"] + row["bytes"]["down"]) / BYTES_PER_NUMBER
        is_sent = self.what == "prototypes-sent"
        name = "local-prototypes" if is_sent else "global-prototypes"
        if name not in row.get("server", {}):
            raise NoFigure(f"the algorithm reports no {name}")
        count = float(row["server"][name])
        return count / max(1, row["valid"]) if is_sent else count

"""The figure of a cell, and how it is read from the run's folder.

A figure has four parts (`LEGAL`, docs/tables.md); a table, its columns and its rows each name some.
"""

import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from protofl_common.basics.text import first_of
from protofl_common.config.options import SettingsError
from protofl_common.runs import over_clients
from protofl_common.runs.figures import with_class_name
from protofl_common.runs.folder import RoundRow, RunFolder

COUNTS = ("prototypes-sent", "prototypes-received", "numbers", "numbers-sent")
# each part of a figure: its values in words, and as a regular expression
LEGAL = {
    "when": ("final, best, last-N", r"final|best|last-[1-9]\d*"),
    "what": (
        ", ".join(["head", "prototype", *COUNTS, "head/auc", "validation/head"]),
        "|".join([*COUNTS, r"(validation/)?(head|prototype)(/\S+)?"]),
    ),
    "domain": ("the name of a domain", r".*"),
    "over": (
        "mean, by-samples, std, worst-N%, best-N%, with N from 1 to 100",
        r"mean|by-samples|std|(worst|best)-([1-9]\d?|100)%",
    ),
}
BYTES_PER_NUMBER = 4


class NoFigure(SettingsError):
    """The run has no such figure."""


class Measured(NamedTuple):
    """A figure of a run."""

    value: float
    name: str
    """With what a reader must know: if single clients are hidden, that it is over all samples; for
    "best", on which data the round was chosen, and among which; for "last-N", if there are fewer.
    """


@dataclass(frozen=True)
class Figure:
    when: str = "final"
    what: str = "head"
    domain: str = ""
    over: str = "mean"

    @classmethod
    def of(cls, parts: dict[str, Any], where: str) -> Self:
        """Make a figure of the parts that a table names; ``where`` stands before each error.

        SettingsError with a line for each unknown part or value, and for the best of a count.
        """
        problems = []
        for name, value in parts.items():
            if name not in LEGAL:
                problems.append(f"{where}: figure.{name}: unknown; choose among {', '.join(LEGAL)}")
                continue
            choices, pattern = LEGAL[name]
            if not re.fullmatch(pattern, str(value)):
                problems.append(f"{where}: figure.{name} = {value!r}: choose {choices}")
        is_best_of_counts = parts.get("when") == "best" and parts.get("what") in COUNTS
        if is_best_of_counts and not problems:
            problems.append(
                f"{where}: figure.when = 'best' needs an accuracy; {parts['what']} has no best"
            )
        if problems:
            raise SettingsError("\n".join(problems))
        return cls(**{name: str(value) for name, value in parts.items()})

    @property
    def digits(self) -> int:
        """How many decimals are shown: 1 for counts, 2 for accuracies in percent, 4 for metrics."""
        if self.what in COUNTS:
            return 1
        return 2 if over_clients.in_percent(self.what) else 4

    def __str__(self) -> str:
        domain = f" of {self.domain}" if self.domain else ""
        over = f" {self.over}" if self.over != "mean" else ""
        return f"{self.when} {self.what}{domain}{over}"

    def read(self, folder: Path) -> float:
        """Return the value of `measured`."""
        return self.measured(folder).value

    def measured(self, folder: Path) -> Measured:
        """Read the figure of the finished run in ``folder``; NoFigure when it has none.

        It is the largest value over the rounds if `when` is "best", else the mean over the last N
        evaluations ("last-N"), or the last one ("final").
        """
        run = RunFolder(folder)
        summary = run.finished_summary()
        rows, choice = self._rows(run)
        if not rows:
            when = " after the last round" if self.when == "final" else ""
            raise NoFigure(f"no evaluation of {self.what}{when}{self._choices(run)}")

        name = str(self).replace(
            self.what, with_class_name(self.what, run.sites().get("classes", []))
        )
        if self.what in COUNTS:
            values = [self._count(row) for row in rows]
        else:
            domains = {site: facts["domain"] for site, facts in summary["clients"].items()}
            values = [self._accuracy(row, domains) for row in rows]
            if over_clients.hides_clients(summary):
                name += " over all samples"
        value = max(values) if self.when == "best" else statistics.fmean(values)
        return Measured(value, name + choice)

    def is_in(self, folder: Path) -> bool:
        """Return whether the finished run in ``folder`` has the figure."""
        try:
            self.read(folder)
        except NoFigure:
            return False
        return True

    def _choices(self, run: RunFolder) -> str:
        """Name the figures of a run's last evaluation, which lacks the one that is asked for.

        "" for a count, if the evaluation has no figures, and if it has this one, but too few sites
        report it to outvote liars.
        """
        if self.what in COUNTS:
            return ""
        last = next(self._candidates(run.each_row(latest_first=True)), None)
        names = over_clients.figures_of(last) if last else {}
        if not names or self.what in names:
            return ""
        return f" (it has {first_of(names)})"

    def _rows(self, run: RunFolder) -> tuple[list[RoundRow], str]:
        """Return the rows to read the figure from, and what a reader must know of their choice.

        For "best" that is one row where validation data choose the round. It is one row, too, for
        the deviation over clients, as the largest is not the best one. Otherwise all rounds are
        returned in which all clients made an evaluation: the largest value among them is the best.
        """
        if self.when != "best":
            wanted = 1 if self.when == "final" else int(self.when.removeprefix("last-"))
            # no earlier evaluation takes the place of one that lacks the figure
            last = islice(self._candidates(run.each_row(latest_first=True)), wanted)
            rows = [row for row in last if self._is_in(row)]
            are_too_few = 0 < len(rows) < wanted
            return rows, f", of {len(rows)} evaluations" if are_too_few else ""

        evaluations = [row for row in run.rows() if self._kind in over_clients.figures_of(row)]
        best, data = over_clients.best_evaluation(evaluations, self._kind)
        if best is None:
            return [], ""
        choice = f", its round chosen on {data} data"
        candidates = over_clients.comparable_rounds(evaluations)
        if len(candidates) < len(evaluations):
            count = f"{len(candidates)} of {len(evaluations)}"
            choice += f", among the {count} evaluations that all clients made"
        if data == "validation" or self.over == "std":
            candidates = [best]
        return [row for row in candidates if self._is_in(row)], choice

    def _candidates(self, rows: Iterable[RoundRow]) -> Iterator[RoundRow]:
        """Yield the rounds for a count, and the evaluations for any other figure."""
        if self.what in COUNTS:
            return (row for row in rows if row["kind"] == "round")
        return over_clients.evaluations(rows)

    def _is_in(self, row: RoundRow) -> bool:
        """Return whether one of the `_candidates` has the figure; each has the counts."""
        return self.what in COUNTS or self.what in over_clients.figures_of(row)

    @property
    def _kind(self) -> str:
        """The accuracy or metric, without the word for validation data."""
        return self.what.removeprefix("validation/")

    def _accuracy(self, row: RoundRow, domains: dict[str, str]) -> float:
        """Return the accuracy in percent, or the metric, over the clients of the domain.

        ``domains`` has the domain of each client; clients without samples are left out. NoFigure if
        no client of the figure's domain has it, and for a figure that needs those of single clients
        where secure aggregation hides them.
        """
        scale = over_clients.factor(self.what)
        if over_clients.hides_clients(row):
            if self.domain or self.over not in ("mean", "by-samples"):
                raise NoFigure(
                    f"{self}: secure aggregation hides single clients; "
                    "it leaves a mean over all samples"
                )
            # of the server's figures the one over all samples together
            return float(scale * over_clients.figures_of(row)[self.what]["weighted"])

        values = []
        samples = []
        for site, client in row["clients"].items():
            figures = over_clients.figures_of(client)
            is_of_domain = self.domain in ("", domains.get(site))  # "": of any
            if self.what not in figures or not is_of_domain:
                continue
            is_on_test_data = self.what == self._kind
            number = client["test-samples" if is_on_test_data else "validation-samples"]
            if number:
                values.append(scale * figures[self.what])
                samples.append(number)
        if not values:
            names = ", ".join(sorted(set(map(str, domains.values()))))
            raise NoFigure(
                f"no client of domain {self.domain!r} with {self.what}; there are {names}"
            )

        if self.over not in ("mean", "by-samples", "std"):  # worst-N% or best-N%
            return over_clients.mean_of_part(values, self.over)
        measure = "weighted" if self.over == "by-samples" else self.over
        return over_clients.over_clients(values, samples)[measure]

    def _count(self, row: RoundRow) -> float:
        """Return how many numbers or prototypes travelled in a round.

        ``numbers`` are those of all clients together, both ways. What is sent is the mean over the
        replies that counted, also late ones; prototypes received are the global ones, which each
        client gets. NoFigure for an algorithm that reports no prototypes.
        """
        replies = row["valid"] + len(row.get("counted-late", {}))
        senders = max(1, replies)  # a round without replies must not divide by 0
        if self.what == "numbers":
            return float(row["bytes"]["up"] + row["bytes"]["down"]) / BYTES_PER_NUMBER
        if self.what == "numbers-sent":
            return float(row["bytes"]["up"]) / BYTES_PER_NUMBER / senders
        is_sent = self.what == "prototypes-sent"
        name = "local-prototypes" if is_sent else "global-prototypes"
        if name not in row.get("server", {}):
            raise NoFigure(f"the algorithm reports no {name}")
        count = float(row["server"][name])
        return count / senders if is_sent else count

"""What happens in a run, as it happens: a line of text for people, an object for programs.

The server emits these (`server_app/run/log.py`). Who simulates gets each as an object: ``on_event``
of `protofl.run`. Under `flwr run` the ServerApp is a process of its own, which prints them.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from protofl_common.basics.faults import fault_of
from protofl_common.basics.text import human_bytes, human_seconds
from protofl_common.config.options import key_of
from protofl_common.config.python_names import allowed_modules
from protofl_common.runs import figures
from protofl_common.runs.folder import Accuracies, RoundRow, Summary, Trouble
from protofl_common.runs.over_clients import figures_of, in_percent
from protofl_common.tasks import task_with
from protofl_common.tasks.metrics import KINDS


@dataclass(frozen=True)
class Event:
    """Something that has happened; ``str(event)`` is what people read, of one or more lines."""

    is_alarming: ClassVar[bool] = False
    """Whether a run's log has it with the level WARNING."""

    def for_programs(self) -> dict[str, Any]:
        """Return the event's name and fields in a dictionary; only paths are no values of JSON."""
        fields = {key_of(name): value for name, value in asdict(self).items()}
        return {"event": type(self).__name__, **fields}


OnEvent = Callable[[Event], object]


@dataclass(frozen=True)
class Started(Event):
    """The clients of a run, or of a baseline after it, are known: its rounds begin, or go on."""

    folder: Path
    """Of the run, also where a baseline starts: its ``resume.toml`` lets both go on."""
    algorithm: str
    paper: str
    baseline: bool

    def __str__(self) -> str:
        return f"{self.algorithm} ({self.paper})"


@dataclass(frozen=True)
class Said(Event):
    """All that no other event tells; what belongs to a round is indented."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Warned(Event):
    """The figures of the run may mislead, or a setting does not do what it says."""

    is_alarming = True
    text: str

    def __str__(self) -> str:
        return f"warning: {self.text}"


@dataclass(frozen=True)
class RoundTrouble(Event):
    """A reply was not used or counts for less, a round was void, or too few sites are there.

    `Waiting` is for a round that has begun.
    """

    is_alarming = True
    kind: Trouble | Literal["void", "waiting", "warning"]
    text: str

    def __str__(self) -> str:
        return f"  {self.kind}: {self.text}"


@dataclass(frozen=True)
class Waiting(Event):
    """A round has waited for sites for a while, and goes on waiting."""

    round: int
    seconds: float
    """That it has waited."""
    seconds_left: float
    """Until it closes without them, if no other site answers before."""
    sites: dict[str, float]
    """Awaited site -> the seconds of its slowest reply so far, 0 where it has sent none."""

    def __str__(self) -> str:
        awaited = []
        for site, slowest in self.sites.items():
            earlier = "no reply before"
            if slowest:
                earlier = f"took up to {human_seconds(slowest)} before"
            awaited.append(f"{site} ({earlier})")
        names = ", ".join(awaited)
        waited = human_seconds(self.seconds)
        left = human_seconds(max(0.0, self.seconds_left))
        them = "it" if len(self.sites) == 1 else "them"
        return (
            f"  round {self.round}: waiting for {names} for {waited};"
            f" closes without {them} in {left}"
        )


@dataclass(frozen=True)
class RoundDone(Event):
    """A round of training is over; the final evaluation is none."""

    row: RoundRow
    """Its line of ``metrics.jsonl``."""
    rounds: int
    seconds_left: float
    """Until the run and its baselines are done, estimated from the last rounds."""
    algorithm: str = ""
    """Its title, where the run has baselines."""
    task: str = "single-label"
    """As the setting of this name."""

    def __str__(self) -> str:
        row = self.row
        number = str(row["round"]).rjust(len(str(self.rounds)))
        heading = f"round {number}/{self.rounds}"
        if self.algorithm:
            heading = f"{self.algorithm}: {heading}"
        parts = [heading]
        if "total" in row["losses"]:
            parts.append(f"loss {row['losses']['total']:.3f}")
        parts += self._results(figures_of(row), with_worst=True)
        for result in self._results(row.get("validation", {}), with_worst=False):
            parts.append(f"validation {result}")
        if "epsilon" in row:
            of_ledgers = figures.epsilon_of_ledgers(row)
            parts.append(figures.describe_epsilon(row["epsilon"], of_ledgers, row["epsilon-of"]))
        up = human_bytes(row["bytes"]["up"])
        down = human_bytes(row["bytes"]["down"])
        parts.append(f"↑{up} ↓{down}")
        taken = human_seconds(row["seconds"]["total"])
        parts.append(f"{taken}, {human_seconds(self.seconds_left)} to go")
        return "  ".join(parts)

    def _results(self, measured: Accuracies, with_worst: bool) -> Iterator[str]:
        """Say the result by each way to predict, from figures of test or of validation data."""
        task = task_with({"task": self.task})
        for kind in measured:
            if kind not in KINDS:
                continue
            name = task.result_of(kind, measured).name
            figures_of_result = measured[name]
            text = f"{name} {_value(name, figures_of_result['mean'])}"
            if with_worst and "worst-10%" in figures_of_result:
                text += f" (worst {_value(name, figures_of_result['worst-10%'])})"
            yield text


@dataclass(frozen=True)
class Finished(Event):
    """The run and its baselines are done."""

    folder: Path
    summary: Summary
    result: str
    """One sentence; "" for a run without an accuracy."""
    report: str
    """The line that says where the page is, or why not; "" for a run without one."""

    def __str__(self) -> str:
        lines = [f"results: {self.folder}"]
        if self.result:
            lines.insert(0, f"result: {self.result}")
        if self.report:
            lines.append(self.report)
        return "\n".join(lines)


@dataclass(frozen=True)
class Failed(Event):
    """The run has ended without a result."""

    kind: str
    """The error's type, such as SettingsError."""
    text: str
    traceback: str = ""
    """Of an error that no setting mends, perhaps in code of one's own; else ""."""

    @classmethod
    def of(cls, error: Exception, is_expected: bool) -> "Failed":
        """Describe an error; ``is_expected`` says that the user can mend it by the error's text.

        For any other error the event has a traceback, and below it a line that says whose code is
        at fault (`fault_of`).
        """
        trace = ""
        if not is_expected:
            fault = fault_of(error, allowed_modules())
            trace = "".join(traceback.format_exception(error)) + f"protofl: {fault}\n"
        return cls(type(error).__name__, str(error), trace)

    @property
    def reason(self) -> str:
        """The error in one line."""
        if self.traceback:
            return f"failed: {self.kind}: {self.text}"
        return self.text.split("\n")[0]

    def __str__(self) -> str:
        return self.traceback or f"\nprotofl: this run cannot go on\n{self.text}\n"


def _value(name: str, value: float) -> str:
    return f"{100 * value:.1f}%" if in_percent(name) else f"{value:.3f}"

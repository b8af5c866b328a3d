"""The files that a run leaves for readers, typed: who writes or reads them does it here.

``metrics.jsonl``      `RoundRow`: a line per round, and one for the final evaluation
``prototypes.jsonl``   `MarginRow`: a line per round in which clients sent prototypes
``sites.json``         `Sites`: who takes part; written before the first round, and again at the end
``summary.json``       `Summary`: of a finished run
"""

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from protofl_common.basics.files import write_text
from protofl_common.config.datasets import REDIVIDED
from protofl_common.config.options import Config, Scalar, SettingsError, flatten

METRICS, MARGINS, SITES, SUMMARY = "metrics.jsonl", "prototypes.jsonl", "sites.json", "summary.json"
SETTINGS = "settings.toml"  # with which `flwr run` makes the run again
CHECKPOINTS = "checkpoints"  # the folder of what lets it go on
WEIGHTS, CARD = "model.safetensors", "model.json"  # of an exported model; a client leaves the first alone
BEST = "best.safetensors"  # beside a client's model of the last round, that of the best one, where asked for
MOST_NUMBERS = 2**24  # of an input, that a model's card may ask for
FORMAT = 1  # of the four files; to be increased when a reader of this version would misread what a later one writes

KINDS = ("prototype", "head")  # ways to predict, of which a run may have both
Accuracies = dict[str, dict[str, float]]
"""One of `KINDS` -> mean, weighted, worst-10%, std over the clients, in [0, 1]; likewise ``head/auc`` and so on.

On test data; under ``validation`` accuracies and metrics together, on the clients' validation data. With secure
aggregation ``mean`` is that over all samples of all clients, like ``weighted``, and there are no others.
"""
Trouble = Literal["failed", "refused", "missing", "late"]
TROUBLE: tuple[Trouble, ...] = ("failed", "refused", "missing", "late")
"""What may become of a reply; a late one was missing in its own round and is not used."""
NEW = "/new-clients"  # after the name of a figure, where it is of clients that never trained
FEW_TESTED = "too few test samples of each class (min-class-samples), all of one class, or not finite"  # no metric then
MALFORMED = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)  # of a stranger's figures
DROPPED = "dropped out (drop-rate)"  # why a client failed that the run lets fail

ClientRow = TypedDict(
    "ClientRow",
    {
        "train-samples": NotRequired[int],
        "test-samples": NotRequired[int],
        "accuracy": dict[str, float],
        "losses": dict[str, float],
        "seconds": dict[str, float],
        "metrics": NotRequired[dict[str, float]],
        "validation-samples": NotRequired[int],
        "validation": NotRequired[dict[str, float]],
        "prototypes-of-classes": NotRequired[list[int]],
    },
)


class Seconds(TypedDict, total=False):
    """Seconds of a round as the server sees it, and of each phase of the clients' work, summed over the clients."""

    total: float
    exchange: float
    aggregate: float
    clients: dict[str, float]


RoundRow = TypedDict(
    "RoundRow",
    {
        "kind": Literal["round", "final"],
        "round": int,
        "evaluated-after-round": int,
        "accuracy": Accuracies,
        "losses": dict[str, float],
        "bytes": dict[str, int],
        "asked": int,
        "valid": int,
        "void": bool,
        "void-because": NotRequired[str],
        "failed": dict[str, str],
        "refused": dict[str, str],
        "missing": list[str],
        "late": dict[str, str],
        "clients": dict[str, ClientRow],
        "seconds": Seconds,
        "metrics": NotRequired[Accuracies],
        "validation": NotRequired[Accuracies],
        "server": NotRequired[dict[str, float]],
        "epsilon": NotRequired[float],
        "bounded": NotRequired[list[str]],
        "audit": NotRequired[dict[str, str]],
        "liars": NotRequired[int],
    },
)

MarginRow = TypedDict(
    "MarginRow", {"round": int, "global": list[float | None] | None, "clients": dict[str, list[float | None]]}
)
"""Margins of each class, None where it has none: of the global prototypes, and of every client's."""

SiteFacts = TypedDict(
    "SiteFacts",
    {
        "arch": str,
        "domain": str,
        "parameters": int,
        "train-samples": int,
        "test-samples": int,
        "validation-samples": int,
        "train-classes": list[int],
        "test-classes": list[int],
    },
    total=False,
)


class Sites(TypedDict, total=False):
    format: int
    algorithm: str
    paper: str
    classes: list[str]
    division: int  # as in `Summary`
    sites: dict[str, SiteFacts]


Best = TypedDict("Best", {"mean": float, "after-round": int, "chosen-on": NotRequired[Literal["validation", "test"]]})
"""The mean accuracy on test data at the best round; by which data that was the best, in older runs always test data."""


class BestRound(TypedDict):
    metric: str  # the figure by which it is the best: the setting ``early-stopping-metric``
    after: int
    on: Literal["validation", "test"]


Summary = TypedDict(
    "Summary",
    {
        "format": NotRequired[int],
        "epsilon": NotRequired[float],
        "algorithm": str,
        "dataset": str,
        "partition": str,
        "division": NotRequired[int],  # the version of the partition, by `REDIVIDED` or 1
        "clients": dict[str, SiteFacts],
        "rounds": int,
        "accuracy": Accuracies,
        "best-accuracy": dict[str, Best],
        "best-round": NotRequired[BestRound | None],
        "stopped-early": NotRequired[bool],
        "metrics": NotRequired[Accuracies],
        "validation": NotRequired[Accuracies],
        "accuracy-of-clients": dict[str, dict[str, float]],
        "bytes": dict[str, int],
        "trouble": dict[str, int],
        "bounded": NotRequired[list[str]],
        "warnings": NotRequired[list[str]],
        "void-rounds": int,
        "resumed-after-rounds": list[int],
        "ended": NotRequired[float],  # when, in seconds since 1970
        "seconds": float,
        "seconds-per-round": float,
        "versions": dict[str, str],
        "commit": NotRequired[str],
        "machine": NotRequired[str],
        "settings": dict[str, Scalar],
    },
)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise SettingsError, which begins with ``what``, for what figures of other types raise, as a stranger's."""
    try:
        yield
    except MALFORMED as error:
        text = f"{what}: {type(error).__name__}: {error}"
        raise (error if isinstance(error, SettingsError) else SettingsError(text)) from None


def troubles(row: RoundRow) -> Iterator[tuple[Trouble, str, str]]:
    """List the replies that are not used: kind, site and reason."""
    for kind in TROUBLE:
        reasons = row[kind]
        for site in reasons:
            yield kind, site, str(reasons[site]) if isinstance(reasons, dict) else "no answer in time"


def baseline_folder(run: Path, algo: str) -> Path:
    return run.with_name(f"{run.name}-{algo}")


def checkpoints(run: Path) -> list[Path]:
    """The latest first."""
    return sorted((path for path in (run / CHECKPOINTS).glob("*.safetensors") if path.stem.isdecimal()), reverse=True)


@dataclass(frozen=True)
class RunFolder:
    """One run's folder. What is missing or damaged is read as nothing, for a run may still go on."""

    path: Path

    @property
    def lock(self) -> Path:
        """The file beside it that a process at work on it locks."""
        return self.path.parent / f".{self.path.name}.lock"

    def settings(self) -> Config:
        with suppress(OSError, ValueError, RecursionError):
            return flatten(tomllib.loads((self.path / SETTINGS).read_text(encoding="utf-8")))
        return {}

    def rows(self) -> list[RoundRow]:
        return list(self.each_row())

    def each_row(self) -> Iterator[RoundRow]:
        """Read one by one: with the figures of many clients all may be too many for the memory."""
        return _read(self.path / METRICS)

    def margins(self) -> list[MarginRow]:
        return list(_read(self.path / MARGINS))

    def sites(self) -> Sites:
        """Empty before the first round."""
        return next(_read(self.path / SITES), Sites())

    def summary(self) -> Summary | None:
        """None while the run is not finished."""
        return next(_read(self.path / SUMMARY), None)

    def finished_summary(self) -> Summary:
        if (summary := self.summary()) is None:
            raise SettingsError(f"{self.path}: no {SUMMARY} in it; give the folder of a finished run")
        return summary

    def check_division(self, partition: str) -> None:
        """SettingsError where its clients had other samples than this version would give them."""
        if (begun := self.summary() or self.sites()) and begun.get("division", 1) != REDIVIDED.get(partition, 1):
            raise SettingsError(f"{self.path}: its clients had other samples: {partition!r} has changed since")

    def add(self, file: str, row: RoundRow | MarginRow) -> None:
        with (self.path / file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")

    def write(self, file: str, content: Sites | Summary, indent: int | None = None) -> None:
        text = json.dumps({"format": FORMAT, **content}, indent=indent, ensure_ascii=False)
        write_text(self.path / file, text + "\n")

    def drop_margins_after(self, last: int) -> None:
        """Remove the margins of later rounds, which will be run again, and half a line that a kill has left."""
        if (path := self.path / MARGINS).exists():
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in self.margins() if row["round"] <= last]
            write_text(path, "".join(lines))


def _read(path: Path) -> Iterator[Any]:
    """The JSON objects in a file, but for a line that is still being written; SettingsError for a later format."""
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
        for part in file if path.suffix == ".jsonl" else (file.read(),):
            content = None
            with suppress(ValueError, RecursionError):  # of a stranger's file, also numbers and nests without end
                content = json.loads(part)
            if isinstance(content, dict):
                if not isinstance(number := content.get("format", FORMAT), int) or number > FORMAT:
                    later = f"{path} has format {number!r}, of a later version"
                    raise SettingsError(f"{later}; this one reads up to {FORMAT}")
                yield content

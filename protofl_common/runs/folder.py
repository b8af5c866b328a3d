"""The files that a run leaves for readers, typed: who writes or reads them does it here.

``metrics.jsonl``      `RoundRow`: a line per round, and one for the final evaluation
``prototypes.jsonl``   `MarginRow`: a line per round in which clients sent prototypes
``sites.json``         `Sites`: who takes part; written before the first round, and again at the end
``summary.json``       `Summary`: of a finished run
``waiting.json``       `Awaited`: as long as a round waits for sites
``heads.jsonl``        `HeadsRow`: beside the runs' folders, of all runs
"""

import json
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from protofl_common.basics.files import remove_leftovers, write_text
from protofl_common.config.datasets import PARTITIONS
from protofl_common.config.options import Config, Scalar, SettingsError, flatten

METRICS = "metrics.jsonl"
MARGINS = "prototypes.jsonl"
SITES = "sites.json"
SUMMARY = "summary.json"
WAITING = "waiting.json"
HEADS = "heads.jsonl"
SETTINGS = "settings.toml"  # with which `flwr run` makes the run again
CHECKPOINTS = "checkpoints"  # the folder of what lets it go on
CHECKPOINT_FORMAT = "protofl-checkpoint-5"
WEIGHTS = "model.safetensors"  # of an exported model; a client leaves this file alone
CARD = "model.json"
BEST = "best.safetensors"  # a client's model of the best round, where asked for, beside its last
MOST_NUMBERS = 2**24  # of an input, that a model's card may ask for
# of sites.json, summary.json and waiting.json; raise it when older code would misread new files
FORMAT = 1

Accuracies = dict[str, dict[str, float]]
"""A way to predict, ``head/auc``, … -> mean, weighted, worst-10%, std over the clients, in [0, 1].

On test data; under ``validation`` accuracies and metrics together, on the clients' validation data.
With secure aggregation ``mean`` is that over all samples of all clients, like ``weighted``, and
there are no others.
"""
Trouble = Literal["failed", "refused", "missing", "late"]
TROUBLE: tuple[Trouble, ...] = ("failed", "refused", "missing", "late")
"""What may become of a reply that is not used; a late one was missing in its own round."""
NEW = "/new-clients"  # after the name of a figure, where it is of clients that never trained
FEW_TESTED = (
    "too few test samples of each class (min-class-samples), all of one class, or not finite"
)
"""Why a client has no metric."""
MALFORMED = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""What the figures of a stranger may raise where they are of other types than expected."""
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
        "epsilon": NotRequired[float],  # that the client's own ledger counts for the run
    },
)


class Seconds(TypedDict, total=False):
    """Seconds of a round at the server; of each phase of the clients' work, summed over them."""

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
        "unused": NotRequired[list[str]],  # sites that were heard in a void round, for nothing
        "failed": dict[str, str],
        "refused": dict[str, str],
        "missing": list[str],
        "late": dict[str, str],
        "counted-late": NotRequired[dict[str, int]],  # site -> the earlier round that it answered
        "clients": dict[str, ClientRow],
        "seconds": Seconds,
        "metrics": NotRequired[Accuracies],
        "validation": NotRequired[Accuracies],
        "server": NotRequired[dict[str, float]],
        "epsilon": NotRequired[float],  # by the plan, of the client that the run costs most
        "epsilon-of": NotRequired[str],  # whose privacy it bounds: "sample" or "person"
        "bounded": NotRequired[list[str]],
        "liars": NotRequired[int],
    },
)

MarginRow = TypedDict(
    "MarginRow",
    {
        "round": int,
        "global": list[float | None] | None,
        "clients": dict[str, list[float | None]],
    },
)
"""Margins of the global prototypes and of each client's, by class; None for a class without one."""


class HeadsRow(TypedDict):
    """The heads of sites' audit logs after a round; a site is ``NAME``, in a study ``NAME:KEY``."""

    run: str
    round: int  # of the final evaluation, the last one
    heads: dict[str, str]


class Awaited(TypedDict):
    """For whom a round waits; the times are in seconds since 1970."""

    round: int
    since: float
    until: float
    sites: dict[str, float]  # as in `events.Waiting`


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


Best = TypedDict(
    "Best",
    {
        "mean": float,
        "after-round": int,
        "chosen-on": NotRequired[Literal["validation", "test"]],
    },
)
"""The mean accuracy on test data at the best round, and the data that chose it.

Older runs, which do not say, chose on test data.
"""


class BestRound(TypedDict):
    metric: str  # the figure by which it is the best: the setting ``early-stopping-metric``
    after: int
    on: Literal["validation", "test"]


Summary = TypedDict(
    "Summary",
    {
        "format": NotRequired[int],
        "epsilon": NotRequired[float],  # both as in the last row
        "epsilon-of-ledgers": NotRequired[float],
        "algorithm": str,
        "dataset": str,
        "partition": str,
        "division": NotRequired[int],  # the version of the partition
        "data": NotRequired[str],  # of the user's own: other files, or changed ones, have another
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
        "machine": NotRequired[str],
        "settings": dict[str, Scalar],
    },
)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what malformed figures raise in the block into a SettingsError.

    Its text begins with ``what``. Which errors malformed figures may raise is in `MALFORMED`.
    """
    try:
        yield
    except SettingsError:
        raise
    except MALFORMED as error:
        raise SettingsError(f"{what}: {type(error).__name__}: {error}") from None


def unused_replies(row: RoundRow) -> Iterator[tuple[Trouble, str, str]]:
    """Yield kind, site and reason of each reply of a round that was not used."""
    for kind in TROUBLE:
        sites = row[kind]  # of "missing" a list, of the other kinds site -> reason
        for site in sites:
            reason = "no answer in time"
            if isinstance(sites, dict):
                reason = str(sites[site])
            yield kind, site, reason


def baseline_folder(run: Path, algo: str) -> Path:
    """Return the folder of a baseline, which is beside that of its run."""
    return run.with_name(f"{run.name}-{algo}")


@dataclass(frozen=True)
class RunFolder:
    """One run's folder. What is missing or damaged is read as nothing: a run may still go on."""

    path: Path

    @property
    def lock(self) -> Path:
        """The file, beside the folder, that a process locks which works in the folder."""
        return self.path.parent / f".{self.path.name}.lock"

    def remove_leftovers(self) -> None:
        """Remove the temporary files that a killed process has left in the folder, and no others.

        So nothing of the user's is lost if the folder is not a run's.
        """
        remove_leftovers(self.path)
        remove_leftovers(self.path / CHECKPOINTS)

    def checkpoints(self) -> list[Path]:
        """List the run's checkpoints, the latest first."""
        # names are numbers of rounds with leading zeros, so that they sort as numbers do
        files = (self.path / CHECKPOINTS).glob("*.safetensors")
        return sorted((file for file in files if file.stem.isdecimal()), reverse=True)

    def settings(self) -> Config:
        """Read the run's settings, {} without any."""
        with suppress(OSError, ValueError, RecursionError):
            text = (self.path / SETTINGS).read_text(encoding="utf-8")
            return flatten(tomllib.loads(text))
        return {}

    def rows(self) -> list[RoundRow]:
        """Read all rows of ``metrics.jsonl``."""
        return list(self.each_row())

    def each_row(self) -> Iterator[RoundRow]:
        """Read the rows one by one: with the figures of many clients all may exceed the memory."""
        return _read(self.path / METRICS)

    def latest_rows(self) -> Iterator[RoundRow]:
        """Read the rows one by one, the last first: those before are not parsed."""
        return _read(self.path / METRICS, latest_first=True)

    def margins(self) -> list[MarginRow]:
        """Read all rows of ``prototypes.jsonl``."""
        return list(_read(self.path / MARGINS))

    def latest_margins(self) -> MarginRow | None:
        """Read the last row of ``prototypes.jsonl``: those before are not parsed."""
        return next(_read(self.path / MARGINS, latest_first=True), None)

    def sites(self) -> Sites:
        """Read who takes part; empty before the first round."""
        return next(_read(self.path / SITES), Sites())

    def awaited(self) -> Awaited | None:
        """Read for whom the round under way waits; None where it does not, or not for long."""
        return next(_read(self.path / WAITING), None)

    def summary(self) -> Summary | None:
        """Read the summary; None while the run is not finished."""
        return next(_read(self.path / SUMMARY), None)

    def finished_summary(self) -> Summary:
        """Read the summary; SettingsError where the run is not finished."""
        summary = self.summary()
        if summary is None:
            raise SettingsError(
                f"{self.path}: no {SUMMARY} in it; give the folder of a finished run"
            )
        return summary

    def check_division(self, partition: str) -> None:
        """Raise SettingsError if this version divides the samples otherwise than the run did."""
        begun = self.summary() or self.sites()  # neither is there if the run has not begun
        if begun and begun.get("division", 1) != PARTITIONS[partition].version:
            raise SettingsError(
                f"{self.path}: its clients had other samples: {partition!r} has changed since"
            )

    def add(self, file: str, row: RoundRow | MarginRow) -> None:
        """Append a row to a file of JSON lines."""
        with (self.path / file).open("a", encoding="utf-8") as lines:
            lines.write(_json_line(row))

    def write(
        self, file: str, content: Sites | Summary | Awaited, indent: int | None = None
    ) -> None:
        """Replace a JSON file by this content and the number of the format."""
        text = json.dumps({"format": FORMAT, **content}, indent=indent, ensure_ascii=False)
        write_text(self.path / file, text + "\n")

    def drop_margins_after(self, last: int) -> None:
        """Remove the rows of ``prototypes.jsonl`` of rounds after ``last``, which will run again.

        An incomplete line, which a killed process has left, is removed too.
        """
        path = self.path / MARGINS
        if path.exists():
            kept = [_json_line(row) for row in self.margins() if row["round"] <= last]
            write_text(path, "".join(kept))


def heads_in(path: Path) -> Iterator[HeadsRow]:
    """Read the rows of ``heads.jsonl`` one by one; there are none where it is missing.

    What is no such row is left out: a site gets the file from a server, which may have written
    anything into it.
    """
    for row in _read(path):
        heads = row.get("heads")
        names_a_round = isinstance(row.get("run"), str) and isinstance(row.get("round"), int)
        has_heads = isinstance(heads, dict) and all(
            isinstance(head, str) for head in heads.values()
        )
        if names_a_round and has_heads:
            yield row


def _json_line(row: RoundRow | MarginRow) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _read(path: Path, *, latest_first: bool = False) -> Iterator[Any]:
    """Yield the JSON objects in a file, of ``.jsonl`` one for each line; none if it is missing.

    What is no JSON object is left out, such as a line that is still being written, or a stranger's
    deeply nested lists. SettingsError for an object of a later format.
    """
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
        texts: Iterable[str] = file
        if path.suffix != ".jsonl":
            texts = [file.read()]
        elif latest_first:
            texts = reversed(file.readlines())
        for text in texts:
            content = None
            with suppress(ValueError, RecursionError):
                content = json.loads(text)
            if not isinstance(content, dict):
                continue
            number = content.get("format", FORMAT)
            if not isinstance(number, int) or number > FORMAT:
                later = f"format {number!r}, of a later version"
                raise SettingsError(f"{path} has {later}; this one reads up to {FORMAT}")
            yield content

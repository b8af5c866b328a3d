"""A run beside its baselines (the setting ``baselines``): what prototypes gained, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from protofl_common.runs.folder import RunFolder, Summary, baseline_folder
from protofl_common.runs.metrics import HIDDEN, human_bytes

HEADS = ("", "accuracy", "against alone", "worst 10 %", "exchanged", "models")
NOTE = "Mean test accuracy over the clients, after the last round; the same clients and data."


@dataclass(frozen=True)
class Compared:
    """One run of a comparison; accuracies in percent, by the head where the run has one, else by prototype."""

    algo: str
    title: str
    accuracy: float
    prototype: float | None
    """By the nearest prototype, where the run has that beside a head."""
    worst: float | None
    """None where single clients are hidden."""
    bytes: int
    """Up and down, in all."""
    models: str


def compared(folder: Path, baselines: Iterable[str]) -> list[Compared]:
    """The baselines that have a result, in their order, and at the end the run itself; [] where that has none."""
    folders = [*(baseline_folder(folder, algo) for algo in baselines), folder]
    summaries = [RunFolder(one).summary() for one in folders]
    found = [one if one and one["accuracy"] else None for one in summaries]
    return [_compared(one) for one in found if one] if found[-1] else []


def note_on(runs: Iterable[Compared]) -> str:
    """Say which samples the figures are of."""
    return f"{NOTE} {HIDDEN}" if any(run.worst is None for run in runs) else NOTE


def _compared(summary: Summary) -> Compared:
    by = summary["accuracy"]
    accuracy = by.get("head") or by["prototype"]
    return Compared(
        algo=str(summary["settings"]["algo"]),
        title=summary["algorithm"],
        accuracy=100 * accuracy["mean"],
        prototype=100 * by["prototype"]["mean"] if len(by) > 1 else None,
        worst=100 * accuracy["worst-10%"] if "worst-10%" in accuracy else None,
        bytes=sum(summary["bytes"].values()),
        models=counted(client["arch"] for client in summary["clients"].values()),
    )


def counted(names: Iterable[str]) -> str:
    """``"6 × cnn4, 4 × htcnn-3"``."""
    return ", ".join(f"{number} × {name}" for name, number in sorted(Counter(names).items()))


def sentence(runs: Sequence[Compared]) -> str:
    """``"alone 36.1 %, FedAvg 66.7 %, FedProto 73.4 %; 96 MB exchanged"``; the bytes are those of the run itself.

    Prototypes that predict better than the head by more than a point are named beside it.
    """
    figures = ", ".join(f"{_called(one)} {one.accuracy:.1f} %{_ahead(one)}" for one in runs)
    return f"{figures}; {human_bytes(runs[-1].bytes)} exchanged"


def _ahead(one: Compared) -> str:
    ahead = one.prototype is not None and one.prototype > one.accuracy + 1
    return f" by its head, {one.prototype:.1f} % by prototypes" if ahead else ""


def _called(one: Compared) -> str:
    if one.algo == "local":
        return "alone"
    kinds = one.models.count("×")
    return one.title if kinds == 1 else f"{one.title} over {kinds} architectures"


def table_rows(runs: Sequence[Compared]) -> list[tuple[str, ...]]:
    """A line of text per run, under `HEADS`."""
    alone = next((one.accuracy for one in runs if one.algo == "local"), None)
    return [
        (
            one.title,
            f"{one.accuracy:.1f} %",
            "–" if alone is None or one.algo == "local" else f"{one.accuracy - alone:+.1f} points",
            "–" if one.worst is None else f"{one.worst:.1f} %",
            human_bytes(one.bytes),
            one.models,
        )
        for one in runs
    ]

"""A run beside its baselines (the setting ``baselines``): what prototypes gained, and what they cost."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from protofl_common.runs.figures import HIDDEN, Table
from protofl_common.runs.folder import RunFolder, Summary, baseline_folder
from protofl_common.runs.metrics import human_bytes

HEADS = ("", "accuracy", "against alone", "worst 10 %", "exchanged", "models")
NOTE = "Mean test accuracy over the clients, after the last round; the same clients and data."


@dataclass(frozen=True)
class Compared:
    """Accuracies in percent, by the head where the run has one, else by prototype."""

    algo: str
    title: str
    accuracy: float
    prototype: float | None  # by the nearest prototype, where the run has that beside a head
    worst: float | None  # None where single clients are hidden
    bytes: int  # up and down, in all
    models: str

    @property
    def called(self) -> str:
        """``alone``, ``FedAvg``, ``FedProto over 3 architectures``."""
        kinds = self.models.count("×")
        return "alone" if self.algo == "local" else self.title + (f" over {kinds} architectures" if kinds > 1 else "")


def compared(folder: Path, baselines: Iterable[str]) -> list[Compared]:
    """The baselines that have a result, in their order, and at the end the run itself; [] where that has none."""
    folders = [*(baseline_folder(folder, algo) for algo in baselines), folder]
    summaries = [RunFolder(one).summary() for one in folders]
    runs = [_compared(one) if one and one["accuracy"] else None for one in summaries]
    return [run for run in runs if run] if runs[-1] else []


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
    """``"alone 36.1 %, FedProto 73.4 %; 96 MB exchanged"``, by the run; with prototypes a point above the head."""
    figures = [f"{run.called} {run.accuracy:.1f} %" for run in runs]
    for number, run in enumerate(runs):
        if run.prototype is not None and run.prototype > run.accuracy + 1:
            figures[number] += f" by its head, {run.prototype:.1f} % by prototypes"
    return f"{', '.join(figures)}; {human_bytes(runs[-1].bytes)} exchanged"


def side_by_side(runs: Sequence[Compared]) -> Table:
    alone = next((run.accuracy for run in runs if run.algo == "local"), None)
    rows = []
    for run in runs:
        gain = "–" if alone is None or run.algo == "local" else f"{run.accuracy - alone:+.1f} points"
        worst = "–" if run.worst is None else f"{run.worst:.1f} %"
        rows.append([run.title, f"{run.accuracy:.1f} %", gain, worst, human_bytes(run.bytes), run.models])
    note = f"{NOTE} {HIDDEN}" if any(run.worst is None for run in runs) else NOTE
    return Table(HEADS, rows, note, "side by side", words=(0, 5))

"""A run's metrics as TensorBoard event files, for those who look at their runs there (setting ``tensorboard``).

The same figures as in ``metrics.jsonl``: accuracies under the round after which they were measured, the rest under its
own round. A resumed run writes the events of its earlier rounds anew, so none stands there twice.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from protofl_common.config.options import SettingsError
from protofl_common.run_folder import TROUBLE, RoundRow


class Events:
    """Writes `folder`; SettingsError when the package is not there."""

    def __init__(self, folder: Path, rows: list[RoundRow]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            missing = "tensorboard = true: the package is not installed; pip install 'protofl[tensorboard]'"
            raise SettingsError(missing) from error
        shutil.rmtree(folder, ignore_errors=True)
        self.writer: Any = SummaryWriter(str(folder))
        for row in rows:
            self.add(row)

    def add(self, row: RoundRow) -> None:
        """A row of ``metrics.jsonl``; of the final evaluation only its accuracies, as no round belongs to it."""
        for tag, value in accuracies(row).items():
            self.writer.add_scalar(tag, value, row["evaluated-after-round"])
        if row["kind"] == "round":
            for tag, value in others(row).items():
                self.writer.add_scalar(tag, value, row["round"])
        self.writer.flush()


def accuracies(row: RoundRow) -> dict[str, float]:
    """``accuracy/prototype/mean`` and the like, in [0, 1]."""
    return {
        f"{group}/{kind}/{name.replace('%', '-percent')}": value
        for group, found in (("accuracy", row["accuracy"]), ("validation", row.get("validation", {})))
        for kind, figures in found.items()
        for name, value in figures.items()
    }


def others(row: RoundRow) -> dict[str, float]:
    """Losses, bytes, seconds, and how many replies were valid or lost, and why."""
    found = {f"metric/{name}": figures["mean"] for name, figures in row.get("metrics", {}).items()}
    found |= {f"loss/{name}": value for name, value in row["losses"].items()}
    found |= {f"bytes/{way}": value for way, value in row["bytes"].items()}
    found |= {f"seconds/{phase}": value for phase, value in row["seconds"].items() if isinstance(value, float)}
    found |= {f"seconds of clients/{phase}": value for phase, value in row["seconds"].get("clients", {}).items()}
    found |= {f"replies/{kind}": len(row[kind]) for kind in TROUBLE}
    found |= {f"server/{name}": value for name, value in row.get("server", {}).items()}
    return found | {"replies/valid": row["valid"]}

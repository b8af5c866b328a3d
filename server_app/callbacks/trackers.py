"""A run's figures in an experiment tracker.

``callback`` names it: ``"mlflow"``, ``"tensorboard"``, ``"trackio"`` or ``"wandb"``. What goes to
it are figures over the clients, accuracies and metrics under the round after which they were
measured and the rest under its own round, and the settings without folders and names of sites. Of
fewer than 20 clients the worst tenth is a single one. A resumed run is a new one there, with its
earlier rounds. TensorBoard's event files lie in the run's folder.
"""

import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from protofl_common.config.options import Scalar, SettingsError
from protofl_common.config.python_names import load
from protofl_common.config.sections import TRACKERS, keys_that_change
from protofl_common.experiment.settings import to_run_config
from protofl_common.runs.folder import TROUBLE, RoundRow
from server_app.callbacks.base import ActiveRun, Callback
from server_app.run.log import say
from server_app.run.replies import RoundResult

PROJECT = "protofl"
PRIVATE = keys_that_change("name", "machine") | {"study-sites", "gaussian.start-from"}
"""Settings that name folders or sites, and so go to no tracker."""


class UserCallback(Callback):
    """Gives every row to an experiment tracker, or to a function of the user's.

    If that fails, the run goes on, with a line on the failure.
    """

    def __init__(self, run: ActiveRun) -> None:
        self.name = run.settings.run.callback
        self.call: Callable[[RoundRow], object] | None = None
        if self.name in TRACKERS:
            config = {}
            for key, value in to_run_config(run.settings).items():
                names_a_file = "file:" in str(value)  # of a backbone on this machine
                if key not in PRIVATE and not names_a_file:
                    config[key] = value
            self.call = tracker(self.name, run.folder, config, run.rows)
        elif self.name:
            self.call = load(self.name, "callback")
            if not callable(self.call):
                raise SettingsError(f"callback = {self.name!r}: it is no function")

    def on_round(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        if self.call is None:
            return
        try:
            self.call(deepcopy(row))  # the run's own row is safe from what it changes
        except Exception as error:
            say(f"  callback: {self.name} failed, {type(error).__name__}: {error}")


@dataclass(frozen=True)
class TrackedRun:
    """A run that has begun in a tracker."""

    log: Callable[[dict[str, float], int], object]  # Takes figures, and their round
    finish: Callable[[], object]


def tracker(
    name: str, folder: Path, config: Mapping[str, Scalar], rows: list[RoundRow]
) -> Callable[[RoundRow], None]:
    """Begin a run in the tracker ``name``, and return the function that takes each further row.

    The ``rows`` of a resumed run so far are sent at once, and so are the settings in ``config``.
    Raises SettingsError if the tracker cannot start.
    """
    try:
        tracked = STARTS[name](import_module(name), folder, dict(config))
    except Exception as error:  # Of the package, or of the network
        why = f"it did not start ({type(error).__name__}: {error})"
        if isinstance(error, ImportError):
            why = f"{error.name} is not installed; pip install 'protofl[{name}]'"
        raise SettingsError(f"callback = {name!r}: {why}") from error

    def take(row: RoundRow) -> None:
        tracked.log(accuracies(row), row["evaluated-after-round"])
        if row["kind"] == "round":
            tracked.log(other_figures(row), row["round"])
        else:
            tracked.finish()  # Nothing follows the final evaluation

    for row in rows:
        take(row)
    return take


def accuracies(row: RoundRow) -> dict[str, float]:
    """Return accuracies and means of metrics by names for a tracker.

    They look like ``accuracy/head/mean`` and ``metric/head/auc``; "%" becomes "-percent".
    """
    figures = {}
    for name, metric in row.get("metrics", {}).items():
        figures[f"metric/{name}"] = metric["mean"]
    groups = {"accuracy": row["accuracy"], "validation": row.get("validation", {})}
    for group, kinds in groups.items():
        for kind, values in kinds.items():
            for name, value in values.items():
                figures[f"{group}/{kind}/{name.replace('%', '-percent')}"] = value
    return figures


def other_figures(row: RoundRow) -> dict[str, float]:
    """Return losses, bytes, seconds and numbers of valid or lost replies by names for a tracker."""
    # but for the table of the clients' seconds, which is a group of its own
    seconds = {name: value for name, value in row["seconds"].items() if isinstance(value, float)}
    replies: dict[str, int] = {kind: len(row[kind]) for kind in TROUBLE}
    groups: dict[str, Mapping[str, float]] = {
        "loss": row["losses"],
        "bytes": row["bytes"],
        "seconds": seconds,
        "seconds of clients": row["seconds"].get("clients", {}),
        "replies": {**replies, "valid": row["valid"]},
        "server": row.get("server", {}),
    }
    figures = {}
    for group, values in groups.items():
        for name, value in values.items():
            figures[f"{group}/{name}"] = value
    return figures


def _mlflow(package: Any, folder: Path, config: dict[str, Scalar]) -> TrackedRun:
    """Begin a run in MLflow."""
    package.set_experiment(PROJECT)
    package.start_run(run_name=folder.name)
    package.log_params(config)

    def log(figures: dict[str, float], number: int) -> None:
        package.log_metrics(figures, step=number)

    return TrackedRun(log, package.end_run)


def _tensorboard(package: Any, folder: Path, config: dict[str, Scalar]) -> TrackedRun:
    """Begin event files for TensorBoard, whose ``package`` PyTorch's writer uses, in ``folder``."""
    from torch.utils.tensorboard import SummaryWriter

    events = folder / "tensorboard"
    shutil.rmtree(events, ignore_errors=True)  # a resumed run writes its earlier rounds again
    writer = SummaryWriter(str(events))

    def log(figures: dict[str, float], number: int) -> None:
        for tag, value in figures.items():
            writer.add_scalar(tag, value, number)
        writer.flush()

    return TrackedRun(log, writer.close)


def _wandb(package: Any, folder: Path, config: dict[str, Scalar]) -> TrackedRun:
    """Begin a run in wandb, or in trackio, which has the same functions."""
    started = package.init(project=PROJECT, name=folder.name, config=config)

    def log(figures: dict[str, float], number: int) -> None:
        started.log(figures, step=number)

    return TrackedRun(log, started.finish)


STARTS = {"mlflow": _mlflow, "tensorboard": _tensorboard, "trackio": _wandb, "wandb": _wandb}

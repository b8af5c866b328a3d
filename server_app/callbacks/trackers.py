"""A run's figures in an experiment tracker: ``callback = "mlflow"``, ``"tensorboard"``, ``"trackio"`` or ``"wandb"``.

What goes there are figures over the clients, accuracies and metrics under the round after which they were measured and
the rest under its own round, and the settings without folders and names of sites. Of fewer than 20 clients the worst
tenth is a single one. A resumed run is a new one there, with its earlier rounds. TensorBoard's event files lie in its
folder.
"""

import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

from protofl_common.config.options import Scalar, SettingsError
from protofl_common.config.python_names import load
from protofl_common.config.sections import TRACKERS, keys_that_change
from protofl_common.experiment.settings import to_run_config
from protofl_common.runs.folder import TROUBLE, RoundRow
from server_app.callbacks.base import ActiveRun, Callback
from server_app.log import say
from server_app.replies import RoundResult

PROJECT = "protofl"
PRIVATE = keys_that_change("name", "machine") | {"study-sites", "gaussian.start-from"}  # folders, and names of sites
Log = Callable[[dict[str, float], int], object]  # (figures, round)


class UserCallback(Callback):
    """Gives every row to an experiment tracker, or to a function of the user's; that it fails costs a line."""

    def __init__(self, run: ActiveRun) -> None:
        self.name = run.settings.run.callback
        self.call: Callable[[RoundRow], object] | None = None
        if self.name in TRACKERS:
            every = to_run_config(run.settings).items()
            config = {key: value for key, value in every if key not in PRIVATE and "file:" not in str(value)}
            self.call = tracker(self.name, run.folder, config, run.rows)
        elif self.name:
            self.call = load(self.name, "callback")
            if not callable(self.call):
                raise SettingsError(f"callback = {self.name!r}: it is no function")

    def on_round(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        if self.call is None:
            return
        try:
            self.call(deepcopy(row))
        except Exception as error:
            say(f"  callback: {self.name} failed, {type(error).__name__}: {error}")


def tracker(name: str, folder: Path, config: Mapping[str, Scalar], rows: list[RoundRow]) -> Callable[[RoundRow], None]:
    """Start the run in ``folder`` there, and return what takes further rows; SettingsError where it cannot start."""
    try:
        log, finish = STARTS[name](import_module(name), folder, dict(config))
    except Exception as error:  # of the package, or of the network
        why = f"it did not start ({type(error).__name__}: {error})"
        if isinstance(error, ImportError):
            why = f"{error.name} is not installed; pip install 'protofl[{name}]'"
        raise SettingsError(f"callback = {name!r}: {why}") from error

    def take(row: RoundRow) -> None:
        log(accuracies(row), row["evaluated-after-round"])
        if row["kind"] == "round":
            log(others(row), row["round"])
        else:
            finish()  # nothing follows the final evaluation

    for row in rows:
        take(row)
    return take


def accuracies(row: RoundRow) -> dict[str, float]:
    """``accuracy/prototype/mean`` and the like, in [0, 1], and the means of the other metrics, ``metric/head/auc``."""
    return {f"metric/{name}": figures["mean"] for name, figures in row.get("metrics", {}).items()} | {
        f"{group}/{kind}/{name.replace('%', '-percent')}": value
        for group, of_kinds in (("accuracy", row["accuracy"]), ("validation", row.get("validation", {})))
        for kind, figures in of_kinds.items()
        for name, value in figures.items()
    }


def others(row: RoundRow) -> dict[str, float]:
    """Losses, bytes, seconds, and how many replies were valid or lost, and why."""
    groups: dict[str, Mapping[str, float]] = {
        "loss": row["losses"],
        "bytes": row["bytes"],
        "seconds": {phase: value for phase, value in row["seconds"].items() if isinstance(value, float)},
        "seconds of clients": row["seconds"].get("clients", {}),
        "replies": {kind: len(row[kind]) for kind in TROUBLE} | {"valid": row["valid"]},
        "server": row.get("server", {}),
    }
    return {f"{group}/{name}": value for group, figures in groups.items() for name, value in figures.items()}


def _mlflow(package: Any, folder: Path, config: dict[str, Scalar]) -> tuple[Log, Callable[[], object]]:
    package.set_experiment(PROJECT)
    package.start_run(run_name=folder.name)
    package.log_params(config)
    return lambda figures, number: package.log_metrics(figures, step=number), package.end_run


def _tensorboard(package: Any, folder: Path, config: dict[str, Scalar]) -> tuple[Log, Callable[[], object]]:
    from torch.utils.tensorboard import SummaryWriter

    events = folder / "tensorboard"
    shutil.rmtree(events, ignore_errors=True)  # those of a resumed run's earlier rounds come again
    writer = SummaryWriter(str(events))

    def log(figures: dict[str, float], number: int) -> None:
        for tag, value in figures.items():
            writer.add_scalar(tag, value, number)
        writer.flush()

    return log, writer.close


def _wandb(package: Any, folder: Path, config: dict[str, Scalar]) -> tuple[Log, Callable[[], object]]:
    started = package.init(project=PROJECT, name=folder.name, config=config)  # trackio has the same functions
    return lambda figures, number: started.log(figures, step=number), started.finish


STARTS = {"mlflow": _mlflow, "tensorboard": _tensorboard, "trackio": _wandb, "wandb": _wandb}

"""A run's figures in an experiment tracker: ``callback = "mlflow"``, ``"wandb"`` or ``"trackio"``.

What goes there are the figures of `tensorboard.py`, means over the clients, and the settings without folders; no name
of a site and nothing of a single client. A resumed run is a new one there, with the figures of its earlier rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from protofl_common.config.options import Scalar, SettingsError
from protofl_common.run_folder import RoundRow
from server_app.run.tensorboard import accuracies, others

PROJECT = "protofl"
Log = Callable[[dict[str, float], int], object]
"""(figures, round)."""


class Tracker:
    """Called with every row; SettingsError where the package is not there, or cannot start."""

    def __init__(self, name: str, run: str, config: Mapping[str, Scalar], rows: list[RoundRow]) -> None:
        try:
            self.log, self.finish = STARTS[name](import_module(name), run, dict(config))
        except ImportError as error:
            raise SettingsError(
                f"callback = {name!r}: {error.name} is not installed; pip install 'protofl[{name}]'"
            ) from error
        except Exception as error:  # of the package, or of the network
            raise SettingsError(f"callback = {name!r}: it did not start ({type(error).__name__}: {error})") from error
        for row in rows:
            self(row)

    def __call__(self, row: RoundRow) -> None:
        """Send a row of ``metrics.jsonl``; after that of the final evaluation nothing follows."""
        self.log(accuracies(row), row["evaluated-after-round"])
        if row["kind"] == "round":
            self.log(others(row), row["round"])
        else:
            self.finish()


def _mlflow(package: Any, run: str, config: dict[str, Scalar]) -> tuple[Log, Callable[[], object]]:
    package.set_experiment(PROJECT)
    package.start_run(run_name=run)
    package.log_params(config)
    return lambda figures, number: package.log_metrics(figures, step=number), package.end_run


def _wandb(package: Any, run: str, config: dict[str, Scalar]) -> tuple[Log, Callable[[], object]]:
    """Trackio has the same functions."""
    started = package.init(project=PROJECT, name=run, config=config)
    return lambda figures, number: started.log(figures, step=number), started.finish


STARTS = {"mlflow": _mlflow, "trackio": _wandb, "wandb": _wandb}

"""Callbacks act after each round: each is a file, and the list below is the order in which they are called.

A run's folder has
    ``settings.toml``            every setting, usable again with ``--run-config``
    ``resume.toml``              the same, to let the run go on after it was stopped
    ``checkpoints/``             what that takes, after each of the last three rounds (`server_app/checkpoint.py`)
    ``metrics.jsonl``            one line per round: figures over clients, per client, bytes, seconds, failures
    ``run.log``                  what the run has shown, with time and level
    ``summary.json``             the final figures, totals and versions
    ``prototypes.safetensors``   the global prototypes, where the algorithm has them
    ``weights.safetensors``      the global model, where the algorithm has one
    ``clients/``                 in simulation, the clients' private models
    ``sites.json``, ``prototypes.jsonl``, ``client-prototypes.safetensors``
                                 what the report shows beside the metrics (`artifacts.py`)
    ``report.html``              the page with figures (`protofl_common/report`)
    ``forgotten.jsonl``          who was taken out of the result, by ``protofl forget``
    ``tensorboard/``             event files, where asked for (`trackers.py`)
"""

from server_app.callbacks.artifacts import Artifacts
from server_app.callbacks.base import ActiveRun, Callback
from server_app.callbacks.checkpoints import Checkpoints
from server_app.callbacks.metrics import Conclusion, Metrics
from server_app.callbacks.screen import Screen
from server_app.callbacks.stopping import BestModel, Budget, EarlyStopping
from server_app.callbacks.trackers import UserCallback


def callbacks_of(run: ActiveRun) -> list[Callback]:
    """The callbacks of a run, in calling order; a checkpoint comes last, for all else must be written by then."""
    first = Metrics(run), UserCallback(run), BestModel(), Artifacts()
    return [*first, Conclusion(), Screen(run), EarlyStopping(), Budget(), Checkpoints()]

"""Callbacks act after each round.

docs/results.md says which files they leave in the run's folder.
"""

from server_app.callbacks.artifacts import Artifacts
from server_app.callbacks.base import ActiveRun, Callback
from server_app.callbacks.budget import Budget
from server_app.callbacks.checkpoints import Checkpoints
from server_app.callbacks.metrics import Conclusion, Metrics
from server_app.callbacks.progress import Progress
from server_app.callbacks.stopping import BestModel, EarlyStopping
from server_app.callbacks.trackers import UserCallback


def callbacks_of(run: ActiveRun) -> list[Callback]:
    """Return the callbacks of a run, in calling order.

    A checkpoint comes last, for all else must be written by then.
    """
    return [
        Metrics(run),
        UserCallback(run),
        BestModel(),
        Artifacts(),
        Conclusion(),
        Progress(run),
        EarlyStopping(),
        Budget(),
        Checkpoints(),
    ]

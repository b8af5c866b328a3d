"""A run as its callbacks see it, and what a callback may do.

A callback writes or shows the results of a round, and may add records to the messages of the next.
It changes no result of the run, but may name a reason to end it.
"""

import time
from dataclasses import dataclass, field

from protofl_common.runs.folder import BestRound, RoundRow, RunFolder
from protofl_common.runs.over_clients import best_evaluation, measured
from server_app.network.exchange import MessageExchange
from server_app.network.membership import Federation
from server_app.run.checkpoint import Checkpoint
from server_app.run.flow import AskForUploads
from server_app.run.job import Job
from server_app.run.replies import Records, RoundResult
from server_app.strategies.base import Strategy


@dataclass
class ActiveRun:
    """A run, or a baseline of a run, while it is at work."""

    job: Job
    start: Checkpoint  # From which it goes on; of round 0 for a new run
    rows: list[RoundRow] = field(default_factory=list)
    """The rows of ``metrics.jsonl`` so far, without figures of single clients."""
    began: float = field(default_factory=time.monotonic)
    """When it began on the monotonic clock, as if it had never been stopped."""

    strategy: Strategy = field(init=False)  # Set once the clients have introduced themselves
    exchange: MessageExchange = field(init=False)
    ask_for_uploads: AskForUploads = field(init=False)
    callbacks: "list[Callback]" = field(init=False)

    def __post_init__(self) -> None:
        self.began -= self.start.seconds
        self.settings = self.job.settings
        self.folder = self.job.folder
        self.files = RunFolder(self.folder)

    @property
    def federation(self) -> Federation:
        return self.strategy.federation

    @property
    def best(self) -> BestRound | None:
        """The best evaluation so far by ``early-stopping-metric``, or else by accuracy.

        The value names the metric, the round after which it was measured, and the part of the data
        ("validation" or "test"). The accuracy is the head's where the run has one, else that of
        prototypes. None before any evaluation.
        """
        metric = self.settings.run.early_stopping_metric
        if not metric:
            metric = "head" if "head" in measured(self.rows) else "prototype"
        row, on = best_evaluation(self.rows, metric)
        if row is None:
            return None
        return {"metric": metric, "after": row["evaluated-after-round"], "on": on}


class Callback:
    """Called in the order of the list (`server_app/callbacks/__init__.py`)."""

    def on_start(self, run: ActiveRun) -> None:
        """Act before the first round, once all is known of the clients."""

    def why_stop(self, run: ActiveRun, number: int) -> str:
        """Return the reason to end the run before round ``number``; "" to go on."""
        return ""

    def records(self, run: ActiveRun) -> Records:
        """Return what the messages of the next round carry beside the algorithm's payload."""
        return {}

    def on_round(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        """Act after a round or the final evaluation; ``row`` is its line of ``metrics.jsonl``."""

    def on_end(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        """Act when all is done; ``row`` and ``result`` are the final evaluation's."""

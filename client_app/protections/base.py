"""The seam between an algorithm and the wire: what a protection may do to a client's messages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, ParamSpec, TypeVar

from flwr.app import ConfigRecord, Context, Message, RecordDict

from client_app.client import Client
from client_app.evaluation import Evaluation
from client_app.training import Step
from protofl_common.experiment.settings import Settings
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report
from protofl_common.wire.schema import Declared, Limits

P = ParamSpec("P")
R = TypeVar("R")


Query = Callable[[Message, Context], RecordDict]


@dataclass(frozen=True)
class Reply:
    """What is to leave in the answer to a round, or to the final evaluation."""

    upload: Payload
    declared: Declared  # What the upload is packed as
    limits: Limits  # Of the same from the server
    report: Report
    beside: Mapping[str, ConfigRecord] = field(default_factory=dict)  # More records


class Protection:
    """One protection, for the message that ``client`` answers; its hooks stand in calling order.

    Here they change nothing. `step` is called on a fresh instance, which shares no state with the
    other hooks'.
    """

    name = ""  # For a site's log, and for ``protofl site check``
    queries: ClassVar[Mapping[str, Query]] = {}
    """Kinds of messages that are its own, each with what answers it."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        """Return whether it does anything in a run with these settings."""
        raise NotImplementedError

    def before(self) -> None:
        """Refuse the message; nothing of the data has been read for it yet."""

    def receive(self) -> None:
        """Take in what the message has for it; the algorithm has received its payload."""

    def charge(self) -> None:
        """Charge for the answer; the message has been read, and nothing has been worked on."""

    def step(self, step: Step) -> Step:
        return step

    def upload(self, upload: Payload) -> Payload:
        """Return the part of what an algorithm sends that may leave."""
        return upload

    def evaluation(self, evaluation: Evaluation, samples: int) -> Evaluation:
        """Return the part of an evaluation on so many ``samples`` that may leave."""
        return evaluation

    def report(self, report: Report) -> Report:
        """Return the part of a report that may leave; its evaluations have passed `evaluation`."""
        return report

    def reply(self, reply: Reply) -> Reply:
        """Return the reply in the form in which it leaves; all in it has passed the hooks above."""
        return reply

    def after(self) -> None:
        """Record that the answer is ready, or the error that is sent in its place."""

    def post_processed(self, function: Callable[P, R], *inputs: P.args, **named: P.kwargs) -> R:
        """Return ``function(*inputs)``, which under ``dp`` may leave if its inputs may.

        An upload is changed in this way alone: `Released` says which functions may do it.
        """
        released = self.client.released
        if released is None:
            return function(*inputs, **named)
        return released.post_processed(function, *inputs, **named)

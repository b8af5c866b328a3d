"""The seam between an algorithm and the wire: what a protection may do to a client's messages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, ParamSpec, TypeVar

from flwr.app import ConfigRecord, Context, Message, RecordDict

from client_app.learning.evaluation import Evaluation
from client_app.learning.sample_use import SampleUse
from client_app.learning.training import Step
from client_app.site.workshop import Workshop
from protofl_common.experiment.settings import Settings
from protofl_common.privacy.released import Released
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
    """One protection, for one message; its hooks stand in calling order.

    Here they change nothing. ``released`` is what may leave under ``dp``, else None.
    """

    name = ""  # For a site's log, and for ``protofl site check``
    queries: ClassVar[Mapping[str, Query]] = {}
    """Kinds of messages that are its own, each with what answers it."""

    def __init__(self, work: Workshop, released: Released | None = None) -> None:
        self.work = work
        self.client = work.client
        self.released = released

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        """Return whether it does anything in a run with these settings."""
        raise NotImplementedError

    def admit(self) -> None:
        """Admit the message, or refuse it; nothing of the data has been read for it yet."""

    def receive(self) -> None:
        """Take in what the message has for it; the algorithm has received its payload."""

    def charge(self) -> None:
        """Charge for the answer, before a model trains or is evaluated for it."""

    def step(self, step: Step) -> Step:
        return step

    def sample_use(self, use: SampleUse) -> SampleUse:
        return use

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

    def record(self) -> None:
        """Record that the answer is ready, or the error that is sent in its place."""

    def post_processed(self, function: Callable[P, R], *inputs: P.args, **named: P.kwargs) -> R:
        """Return ``function(*inputs)``, which under ``dp`` may leave if its inputs may.

        An upload is changed in this way alone: `Released` says which functions may do it.
        """
        if self.released is None:
            return function(*inputs, **named)
        return self.released.post_processed(function, *inputs, **named)


class Protections:
    """All protections of one message: each hook of `Protection` passes through them in order."""

    def __init__(self, *protections: Protection) -> None:
        self.in_order: Sequence[Protection] = protections

    def admit(self) -> None:
        for protection in self.in_order:
            protection.admit()

    def receive(self) -> None:
        for protection in self.in_order:
            protection.receive()

    def charge(self) -> None:
        """Charge for the answer, before it makes use of a sample.

        SettingsError or LedgerError where that cannot be.
        """
        for protection in self.in_order:
            protection.charge()

    def step(self, step: Step) -> Step:
        for protection in self.in_order:
            step = protection.step(step)
        return step

    def sample_use(self) -> SampleUse:
        use = SampleUse()
        for protection in self.in_order:
            use = protection.sample_use(use)
        return use

    def upload(self, upload: Payload) -> Payload:
        for protection in self.in_order:
            upload = protection.upload(upload)
        return upload

    def evaluation(self, evaluation: Evaluation, samples: int) -> Evaluation:
        for protection in self.in_order:
            evaluation = protection.evaluation(evaluation, samples)
        return evaluation

    def report(self, report: Report) -> Report:
        for protection in self.in_order:
            report = protection.report(report)
        return report

    def reply(self, reply: Reply) -> Reply:
        for protection in self.in_order:
            reply = protection.reply(reply)
        return reply

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Let protections record the answer that the block makes.

        An error is an answer, too: it tells of the samples that caused it. An interruption is none,
        and what fails before the block is none either.
        """
        try:
            yield
        except Exception:
            self._record()
            raise
        self._record()

    def _record(self) -> None:
        for protection in self.in_order:
            protection.record()

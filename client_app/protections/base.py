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
from protofl_common.wire.schema import Declared, Template

P = ParamSpec("P")
R = TypeVar("R")


Query = Callable[[Message, Context], RecordDict]


@dataclass(frozen=True)
class Reply:
    """What is to leave in the answer to a round, or to the final evaluation."""

    upload: Payload
    declared: Declared  # The entries that the upload may have
    templates: Callable[[Declared], Mapping[str, Template]]  # Of the algorithm's weights
    report: Report
    beside: Mapping[str, ConfigRecord] = field(default_factory=dict)  # Further records by name


class Protection:
    """The base of a protection, made anew for each message, whose hooks change nothing.

    The hooks are called in the order in which they stand here. ``released`` has the arrays that may
    leave under ``dp``; None without it.
    """

    name = ""  # For a site's log, and for ``protofl site check``
    queries: ClassVar[Mapping[str, Query]] = {}
    """The Flower queries that belong to this protection, by kind, with what answers each."""

    def __init__(self, work: Workshop, released: Released | None = None) -> None:
        self.work = work
        self.client = work.client
        self.released = released

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        """Return whether the protection does anything in a run with these settings."""
        raise NotImplementedError

    def admit(self) -> None:
        """Raise an error to refuse the message; no data has been read for it yet."""

    def receive(self) -> None:
        """Read what the message has for this protection; the algorithm has received its payload."""

    def charge(self) -> None:
        """Charge for the answer, or refuse it, before a model trains or is evaluated for it."""

    def step(self, step: Step) -> Step:
        return step

    def upload(self, upload: Payload) -> Payload:
        """Return the part of what an algorithm sends that may leave."""
        return upload

    def evaluation(self, evaluation: Evaluation, samples: int) -> Evaluation:
        """Return what may leave of an evaluation on this number of ``samples``."""
        return evaluation

    def report(self, report: Report) -> Report:
        """Return what may leave of a report, whose evaluations have passed `evaluation` before."""
        return report

    def reply(self, reply: Reply) -> Reply:
        """Return the reply in the form in which it leaves; all in it has passed the hooks above."""
        return reply

    def record(self) -> None:
        """Record that the question is answered, by a reply or by an error."""

    def post_processed(self, function: Callable[P, R], *inputs: P.args, **named: P.kwargs) -> R:
        """Return ``function(*inputs)``, and under ``dp`` let the result leave if its inputs may.

        A protection must change an upload through this, or ``dp`` refuses the result.
        `Released.post_processed` says which functions it takes.
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
        """Let every protection charge for the answer before a sample is used for it.

        SettingsError or LedgerError where it cannot be paid.
        """
        for protection in self.in_order:
            protection.charge()

    def step(self, step: Step) -> Step:
        for protection in self.in_order:
            step = protection.step(step)
        return step

    def sample_use(self) -> SampleUse:
        """Return the protection that counts the uses of samples, if one does."""
        for protection in self.in_order:
            if isinstance(protection, SampleUse):
                return protection
        return SampleUse()

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
        """Let all protections record the question as answered when the block ends.

        A block that fails has answered, too, as its error tells of the samples that caused it. An
        interruption (a BaseException) is not recorded: the question may be asked again.
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

"""Replies of clients: what makes one valid, the upload that it is read as, and the result of a round."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from flwr.app import RecordDict
from torch import Tensor

from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy.sums import Means
from protofl_common.runs.folder import Seconds
from protofl_common.wire.payloads import Payload, Value, check_size, unpack_payload
from protofl_common.wire.records import Report, SiteCard, unpack_report
from protofl_common.wire.schema import Declared, Entry, Limits, RefusedMessage
from server_app.network.membership import Federation

Records = Mapping[str, Any]


@dataclass(frozen=True)
class Upload:
    """The checked upload of one client."""

    site: str
    payload: Payload
    report: Report
    most: float = math.inf  # The weight that it may have at most, in samples
    clients: int = 1  # Whose mean it is: one client's own, or under secure aggregation all clients' (`privacy/sums.py`)

    @property
    def train_samples(self) -> float:
        """n of FedAvg's weights: its samples, as far as `protections/uploads.py` lets them count."""
        return min(self.report.train_samples, self.most)

    def having(self, **entries: Value) -> Self:
        return replace(self, payload=Payload(**self.payload.entries | entries))


def vectors_of(uploads: Iterable[Upload], name: str = "prototypes") -> dict[str, Prototypes]:
    """Site -> the vectors that it has sent under ``name``, if any."""
    sent = {upload.site: upload.payload for upload in uploads if name in upload.payload.entries}
    return {site: vectors for site, payload in sent.items() if (vectors := payload.vectors(name)) is not None}


def together(uploads: Iterable[Upload]) -> tuple[Tensor, Tensor]:
    """All client prototypes of a round [P, D] and their labels [P]."""
    every = Prototypes.joined(vectors_of(uploads).values())
    return every.means, every.labels


def check_claims(report: Report, payload: Payload, card: SiteCard, training: bool) -> None:
    """RefusedMessage if the reply claims more samples or other classes than the site's introduction."""
    if training and report.train_samples < 1:
        raise RefusedMessage("a training reply without training samples")
    for what in ("train_samples", "test_samples", "validation_samples"):
        now, before = getattr(report, what), getattr(card, what)
        if now > before:
            raise RefusedMessage(f"{what} = {now}, but it joined with {before}")
    for name, value in payload.entries.items():
        _check_entry((payload.declared or {}).get(name, Entry()).claims(value), report, card)


def _check_entry(value: Value, report: Report, card: SiteCard) -> None:
    counts: Tensor | None = None
    match value:
        case Prototypes():
            if len(value) > report.train_samples:
                raise RefusedMessage(f"{len(value)} prototypes of {report.train_samples} training samples")
            if alien := sorted(set(value.labels.tolist()) - set(card.present)):
                names = ", ".join(card.classes[label] for label in alien[:3])
                raise RefusedMessage(f"a prototype of a class that it did not declare when it joined: {names}")
            counts = value.counts
        case Tensor():
            if not set(value.nonzero().flatten().tolist()) <= set(card.present):
                raise RefusedMessage("samples of a class that it did not declare when it joined")
            counts = None if value.is_floating_point() else value  # shares have noise, which their codec bounds
    if counts is not None and (total := float(counts.double().sum())) > report.train_samples:
        raise RefusedMessage(f"counts of {total:g} samples, but it has {report.train_samples} for training")


class VoidRound(Exception):
    """A round changes nothing; the text says why."""


@dataclass
class RoundResult:
    """The result of a round, or of the final evaluation."""

    number: int = 0  # The round; of the final evaluation, the last one
    final: bool = False
    asked: list[str] = field(default_factory=list)
    reports: dict[str, Report] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # Site -> why it could not do its work
    refused: dict[str, str] = field(default_factory=dict)  # Site -> what was wrong with its reply
    prototypes: dict[str, Prototypes] = field(default_factory=dict)  # Site -> those of valid replies, in order
    server_figures: dict[str, float] = field(default_factory=dict)  # What the server's step reports
    means: Means | None = None  # Over all samples, where secure aggregation hides the figures of single sites
    epsilon: float | None = None  # What the run has cost of privacy by now; None where nothing is private
    seconds: Seconds = field(default_factory=Seconds)  # Of the exchange and of the server's step
    bytes_down: int = 0
    bytes_up: int = 0
    waited: float = 0.0  # Seconds of its longest exchange, for those that did not answer
    not_merged: str = ""  # Why nothing was merged; "" where it was
    bounded: set[str] = field(default_factory=set)  # ``"site: how its part was reduced"``, or that its data changed
    heads: dict[str, str] = field(default_factory=dict)  # Site -> the head of its audit log after its last reply
    late: dict[str, str] = field(default_factory=dict)  # Site -> which earlier reply came now; it is not used

    @property
    def missing(self) -> list[str]:
        heard = self.reports.keys() | self.failed.keys() | self.refused.keys()
        return [site for site in self.asked if site not in heard]


@dataclass(eq=False)
class Channel:
    """The way of one exchange's uploads to the server, here each site's own; the fields say what a valid reply has."""

    server_round: int
    declared: Declared
    limits: Limits
    losses: tuple[str, ...] = ()  # Names of those that the report has
    metrics: Collection[str] = ()  # Names of those that it may have
    counts_samples: bool = True  # Whether the report must say how many samples the client has trained on
    evaluates: bool = True  # Whether the report may have an evaluation

    def opened_for(self, sites: Sequence[str]) -> Mapping[str, Records]:
        """Return the sites that are asked for an upload, each with the records that its message must have for that."""
        return {site: {} for site in sites}

    def content(self, site: str, common: Records, own: Records) -> Records:
        """Return what a site receives: its ``own`` records, which are the ``common`` ones where all receive the same."""
        return own

    def read(self, content: RecordDict, card: SiteCard) -> Upload:
        """Return what a site sent; RefusedMessage where it is not as declared, or more than it joined with."""
        check_size(content, self.declared, self.limits)
        report = unpack_report(content, self.server_round, self.losses, self.metrics)
        if not self.evaluates and (report.correct or report.metrics or report.validation):
            raise RefusedMessage("figures of an evaluation in a round without one (evaluate-every)")
        limits = replace(self.limits, samples=float(report.train_samples))
        payload = unpack_payload(content, self.declared, limits, required=True)
        check_claims(report, payload, card, self.counts_samples)
        return Upload(card.name, payload, report)

    def accept(self, uploads: list[Upload], federation: Federation, result: RoundResult) -> list[Upload]:
        """Return the uploads as the server may read them; VoidRound where it may not."""
        return uploads

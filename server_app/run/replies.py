"""Replies of clients: reading and checking them, and the result of a round."""

import math
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Self

from flwr.app import RecordDict
from torch import Tensor

from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy.sums import Means
from protofl_common.runs.folder import Seconds
from protofl_common.wire.payloads import (
    Payload,
    StateDict,
    Value,
    check_size,
    largest_size,
    unpack_payload,
)
from protofl_common.wire.records import Report, SiteCard, unpack_report
from protofl_common.wire.schema import Declared, Entry, Limits, RefusedMessage

Records = Mapping[str, Any]


@dataclass(frozen=True)
class Upload:
    """The checked upload of one client."""

    site: str
    payload: Payload
    report: Report
    max_weight: float = math.inf  # The largest weight that it may have, in samples
    clients: int = 1
    """Number of clients whose mean it is: all under secure aggregation (`privacy/sums.py`)."""
    kept_fractions: Mapping[str, float] = field(default_factory=dict)
    """Entry -> the fraction of the client's change that was kept, for changes that were cut."""
    age: int = 0  # Rounds since the one that it answers (``late``)
    age_factor: float = 1.0  # Its weight in any mean is multiplied by this, for its age

    @property
    def train_samples(self) -> float:
        """The number of training samples by which it is weighted, n in FedAvg.

        It is the client's claim, but at most what `protections/samples.py` allows.
        """
        return min(self.report.train_samples, self.max_weight)

    @property
    def weight(self) -> float:
        """Its weight in a mean by samples, smaller for a late upload."""
        return self.train_samples * self.age_factor

    def weights(self, name: str = "weights") -> StateDict:
        """Return the weights that were sent as the entry ``name``; {} if there are none."""
        return self.payload.weights(name) or {}

    def with_entries(self, **entries: Value) -> Self:
        """Return this upload with these entries in the place of its own."""
        return replace(self, payload=Payload(**{**self.payload.entries, **entries}))


def vectors_of(uploads: Iterable[Upload], name: str = "prototypes") -> dict[str, Prototypes]:
    """Return the vectors that each site has sent under ``name``, by site; others are left out."""
    sent = {}
    for upload in uploads:
        if name not in upload.payload.entries:
            continue
        vectors = upload.payload.vectors(name)
        if vectors is not None:
            sent[upload.site] = vectors
    return sent


def all_vectors(uploads: Iterable[Upload]) -> tuple[Tensor, Tensor]:
    """Return all client prototypes of a round [P, D] and their labels [P]."""
    joined = Prototypes.joined(vectors_of(uploads).values())
    return joined.means, joined.labels


def check_claims(report: Report, payload: Payload, card: SiteCard, training: bool) -> None:
    """Raise RefusedMessage if a reply claims more than the site's introduction (``card``) did.

    That is more samples, or samples or prototypes of other classes. A reply to ``training`` must
    have training samples.
    """
    if training and report.train_samples < 1:
        raise RefusedMessage("a training reply without training samples")
    for name in ("train_samples", "test_samples", "validation_samples"):
        reported = getattr(report, name)
        joined_with = getattr(card, name)
        if reported > joined_with:
            raise RefusedMessage(f"{name} = {reported}, but it joined with {joined_with}")

    declared = payload.declared or {}
    for name, value in payload.entries.items():
        entry = declared.get(name, Entry())
        _check_classes(entry.class_claims(value), report, card)


def _check_classes(value: Value, report: Report, card: SiteCard) -> None:
    """Raise RefusedMessage for classes that the introduction does not have, or too many samples.

    ``value`` is what an entry of the upload claims of classes (`Entry.class_claims`): prototypes,
    or counts or shares of each class [C], or anything else, which claims nothing.
    """
    counts: Tensor | None = None
    # a sample counts in each of its classes
    most = report.train_samples * card.task.classes_of_a_sample
    match value:
        case Prototypes():
            number = len(value)
            if number > most:
                raise RefusedMessage(
                    f"{number} prototypes, more than its {report.train_samples} training samples"
                )
            undeclared = sorted(set(value.labels.tolist()) - set(card.present))
            if undeclared:
                names = ", ".join(card.task.class_names[label] for label in undeclared[:3])
                raise RefusedMessage(
                    f"a prototype of a class that it did not declare when it joined: {names}"
                )
            counts = value.counts
        case Tensor():
            claimed = set(value.nonzero().flatten().tolist())
            if not claimed <= set(card.present):
                raise RefusedMessage("samples of a class that it did not declare when it joined")
            if not value.is_floating_point():  # shares may have noise, so their codec bounds them
                counts = value

    if counts is None:
        return
    total = float(counts.double().sum())
    if total > most:
        raise RefusedMessage(
            f"counts of {total:g} samples, but it has {report.train_samples} for training"
        )


class VoidRound(Exception):
    """A round changes nothing; the text says why."""


@dataclass
class Exchanged:
    """Which sites are asked in a round or the final evaluation, and what they answer.

    It is filled in while replies come.
    """

    number: int  # The round; of the final evaluation, the last one
    final: bool = False
    asked: list[str] = field(default_factory=list)
    reports: dict[str, Report] = field(default_factory=dict)  # Site -> that of its valid reply
    failed: dict[str, str] = field(default_factory=dict)  # Site -> why it could not do its work
    refused: dict[str, str] = field(default_factory=dict)  # Site -> what was wrong with its reply
    late: dict[str, str] = field(default_factory=dict)
    """Site -> a line on its reply to an earlier round that came now, whether it counts or not."""
    means: Means | None = None
    """Over all samples, where secure aggregation hides the figures of single sites."""
    audit_heads: dict[str, str] = field(default_factory=dict)
    """Site -> the head of its audit log after its last reply."""
    bytes_down: int = 0
    bytes_up: int = 0
    silent: set[str] = field(default_factory=set)  # Did not answer a message in time
    waited_seconds: float = 0.0
    """Seconds of the longest wait for replies, which silent sites did not use."""

    @property
    def missing(self) -> list[str]:
        """The sites that were asked and did not answer in time."""
        # a site may be silent at the end of a secure sum, after its upload has come
        accounted_for = self.reports.keys() | self.failed.keys() | self.refused.keys()
        return [site for site in self.asked if site in self.silent - accounted_for]


@dataclass(frozen=True)
class RoundResult:
    """The result of a round, or of the final evaluation."""

    exchanged: Exchanged
    reports: dict[str, Report]  # Of the replies that count
    refused: dict[str, str]  # Site -> what was wrong with its reply
    prototypes: dict[str, Prototypes]
    """Site -> the prototypes of its reply, if that counts; in the order of the sites."""
    reduced: Set[str]
    """Lines "site: how its upload was reduced", or that its data changed."""
    server_figures: dict[str, float]  # What the server's step reports
    not_merged: str  # Why nothing was merged; "" where it was
    counted_late: dict[str, int]
    """Site -> the earlier round that its upload answers, which was merged in this one."""
    seconds: Seconds  # Of the exchange, and of what the server did with the replies

    @property
    def number(self) -> int:
        return self.exchanged.number

    @property
    def unused(self) -> list[str]:
        """The sites that answered in vain, as a secure sum failed because of other sites."""
        exchanged = self.exchanged
        accounted_for = self.reports.keys() | exchanged.failed.keys() | self.refused.keys()
        accounted_for |= set(exchanged.missing)
        return [site for site in exchanged.asked if site not in accounted_for]

    @property
    def final(self) -> bool:
        return self.exchanged.final


@dataclass(eq=False)
class ReplyReader:
    """Reads the replies of one exchange, and refuses those that are not valid."""

    server_round: int
    declared: Declared
    limits: Limits
    losses: tuple[str, ...] = ()  # Names of the losses that the report has
    metrics: Collection[str] = ()  # Names of the metrics that it may have
    counts_samples: bool = True  # The report says on how many samples the client has trained
    evaluates: bool = True  # The report may have an evaluation

    @property
    def largest(self) -> int:
        """The most bytes that the arrays of a valid reply have."""
        return largest_size(self.declared, self.limits)

    def read(self, content: RecordDict, card: SiteCard) -> Upload:
        """Return the upload of the site with this ``card``.

        Raises RefusedMessage if the reply is not as declared, or claims more than the site's
        introduction.
        """
        check_size(content, self.declared, self.limits)
        report = unpack_report(content, self.server_round, self.losses, self.metrics)
        has_evaluation = report.correct or report.metrics or report.validation
        if has_evaluation and not self.evaluates:
            raise RefusedMessage("figures of an evaluation in a round without one (evaluate-every)")
        # a mean of fewer samples may have more noise
        limits = replace(self.limits, samples=float(report.train_samples))
        payload = unpack_payload(content, self.declared, limits, required=True)
        check_claims(report, payload, card, self.counts_samples)
        return Upload(card.name, payload, report)

"""Replies of one exchange: checked uploads to merge, and a note of everything else in the result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from flwr.app import Message
from torch import Tensor

from protofl_common.basics.text import printable
from protofl_common.maths.aggregation import FEWEST, without_the_farthest
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.limits import Limits, RefusedMessage
from protofl_common.wire.payloads import Payload, Value, check_size, payload_bytes, unpack_payload
from protofl_common.wire.records import Report, unpack_report
from protofl_common.wire.schema import Declared, vectors_in
from server_app.network.membership import Federation
from server_app.result import RoundResult
from server_app.validation.bounds import Bounds
from server_app.validation.outliers import check_claims, outliers


@dataclass(frozen=True)
class Upload:
    """The checked upload of one client."""

    site: str
    payload: Payload
    report: Report
    most: float = math.inf
    """Samples that it may weigh as."""
    clients: int = 1
    """How many it stands for: with secure aggregation one upload is the mean of all (`privacy/sums.py`)."""

    @property
    def train_samples(self) -> float:
        """n of FedAvg's weights: its samples, as far as `most_samples` lets them count."""
        return min(self.report.train_samples, self.most)


def vectors_of(uploads: Iterable[Upload], name: str = "prototypes") -> dict[str, Prototypes]:
    """Site -> the vectors that it has sent under ``name``, if any."""
    sent = {upload.site: upload.payload for upload in uploads if name in upload.payload.entries}
    return {site: vectors for site, payload in sent.items() if (vectors := payload.vectors(name)) is not None}


def together(uploads: Iterable[Upload]) -> tuple[Tensor, Tensor]:
    """All client prototypes of a round [P, D] and their labels [P]."""
    every = Prototypes.joined(vectors_of(uploads).values())
    return every.means, every.labels


@dataclass(frozen=True)
class Expected:
    """The content of a valid reply."""

    server_round: int
    declared: Declared
    limits: Limits
    losses: tuple[str, ...] = ()
    """Names of the losses that the report holds."""
    metrics: Collection[str] = ()
    """Names of the metrics that the report may hold."""
    training: bool = True
    """Whether the sites were asked to train: then everything in ``declared`` must be there."""


def take(replies: Iterable[Message], expected: Expected, federation: Federation, result: RoundResult) -> list[Upload]:
    """The uploads of the valid replies; their reports, and what is wrong with the others, go into the result."""
    uploads = []
    for reply in replies:
        site = federation.asked[reply.metadata.reply_to_message_id]
        if reply.has_error():
            result.failed[site] = printable(str(reply.error.reason))
            continue
        result.bytes_up += payload_bytes(reply.content)
        try:
            check_size(reply.content, expected.declared, expected.limits)
            report = unpack_report(reply.content, expected.server_round, expected.losses, expected.metrics)
            payload = unpack_payload(reply.content, expected.declared, expected.limits, required=expected.training)
            counts_samples = expected.training and not federation.settings.privacy.secagg
            check_claims(report, payload, federation.cards[site], counts_samples)
        except RefusedMessage as refusal:
            result.refused[site] = str(refusal)
            continue
        result.reports[site] = report
        uploads.append(Upload(site, payload, report))
    return uploads


def in_proportion(uploads: list[Upload], ratio: float, result: RoundResult) -> list[Upload]:
    """The uploads without those that are more than ``ratio`` times as long as usual; these are refused after all."""
    refused = outliers({upload.site: upload.payload for upload in uploads}, ratio)
    for site, reason in refused.items():
        result.refused[site] = reason
        del result.reports[site]
    return [upload for upload in uploads if upload.site not in refused]


def voted(uploads: list[Upload], federation: Federation) -> list[Upload]:
    """The uploads without the prototypes that `Federation.bounds` leave out of what a server trains on or clusters.

    Where it averages prototypes, `merge_prototypes` does its part coordinate by coordinate.
    """
    settings, merging = federation.settings, federation.bounds.prototypes
    if settings.row.averages_prototypes:
        return uploads
    uploads = list(uploads)
    for name in vectors_in(settings.exchange.up):
        senders = [index for index, upload in enumerate(uploads) if name in upload.payload.entries]
        sets = [cast(Prototypes, uploads[index].payload.entries[name]) for index in senders]
        remaining = without_the_farthest(sets, *merging)
        for index, one in zip(senders, remaining, strict=True):
            entries = {**uploads[index].payload.entries, name: one}
            uploads[index] = replace(uploads[index], payload=Payload(**entries))
    return uploads


def bounded(uploads: list[Upload], federation: Federation, result: RoundResult) -> list[Upload]:
    """The uploads, of which none weighs as more samples than `most_samples` of all sites.

    What a site says of its samples cannot be verified; its claim must not make the mean its own.
    """
    claims = [card.train_samples for card in federation.cards.values()]
    most, why = most_samples(claims, federation.bounds)
    found = []
    for upload in uploads:
        if (claimed := upload.train_samples) > most:
            result.bounded.add(f"{upload.site}: {claimed:g} training samples weigh as {most:g} ({why})")
            entries = {name: _with_counts(one, most / claimed) for name, one in upload.payload.entries.items()}
            upload = replace(upload, payload=Payload(**entries), most=most)
        found.append(upload)
    return found


def most_samples(claims: Sequence[int], bounds: Bounds) -> tuple[float, str]:
    """As how many samples a client may weigh, and which setting says so.

    A multiple of the median bounds any minority of liars, but it must be large, for honest clients differ as much. The
    largest honest claim is closer to the next one, which bounds as many as are expected.
    """
    found = [(bounds.max_samples_ratio * statistics.median_low(claims), "max-samples-ratio")]
    if len(claims) >= FEWEST:
        rank = min(max(1, bounds.liars), (len(claims) - 1) // 2)
        found.append((bounds.max_samples_lead * sorted(claims)[-1 - rank], "max-samples-lead"))
    most, why = min(found)
    return max(1.0, most), why


def _with_counts(value: Value, factor: float) -> Value:
    """Counts, those of prototypes too, ``factor`` times as large, rounded up; anything else as it is."""
    if isinstance(value, Tensor):
        return (value.double() * factor).ceil().long()
    if not isinstance(value, Prototypes) or value.counts is None:
        return value
    return replace(value, counts=(value.counts.double() * factor).ceil().long())

"""Bound the samples that a client may weigh as (``max-samples-ratio``, ``max-samples-lead``).

What a site says of its samples cannot be verified; its claim must not make the mean its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from torch import Tensor

from protofl_common.maths.aggregation import FEWEST
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Value
from server_app.network.membership import Federation
from server_app.protections.bounds import Bounds
from server_app.replies import Upload
from server_app.result import RoundResult


def accept(uploads: list[Upload], federation: Federation, result: RoundResult) -> list[Upload]:
    """Return the uploads, of which none weighs as more samples than `most_samples` of all sites."""
    most, why = most_samples([card.train_samples for card in federation.cards.values()], federation.bounds)
    bounded = []
    for upload in uploads:
        if (claimed := upload.train_samples) > most:
            result.bounded.add(f"{upload.site}: {claimed:g} training samples weigh as {most:g} ({why})")
            entries = {name: _with_counts(value, most / claimed) for name, value in upload.payload.entries.items()}
            upload = replace(upload.having(**entries), most=most)
        bounded.append(upload)
    return bounded


def most_samples(claims: Sequence[int], bounds: Bounds) -> tuple[float, str]:
    """As how many samples a client may weigh, and which setting says so.

    A multiple of the median bounds any minority of liars, but it must be large, for honest clients differ as much. The
    largest honest claim is closer to the next one, which bounds as many as are expected.
    """
    limits = [(bounds.max_samples_ratio * median_low(claims), "max-samples-ratio")]
    if len(claims) >= FEWEST:
        rank = min(max(1, bounds.liars), (len(claims) - 1) // 2)
        limits.append((bounds.max_samples_lead * sorted(claims)[-1 - rank], "max-samples-lead"))
    most, why = min(limits)
    return max(1.0, most), why


def _with_counts(value: Value, factor: float) -> Value:
    """Counts, those of prototypes too, ``factor`` times as large, rounded up; anything else as it is."""
    if isinstance(value, Tensor):
        return (value.double() * factor).ceil().long()
    if not isinstance(value, Prototypes) or value.counts is None:
        return value
    return replace(value, counts=(value.counts.double() * factor).ceil().long())

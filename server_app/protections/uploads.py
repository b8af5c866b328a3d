"""Refuse, bound and leave out uploads by comparison with the others of the round.

How far they may differ stands in `bounds.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median_low

import numpy as np
import torch

from protofl_common.maths.aggregation import (
    MIN_CLIENTS_FOR_MEDIAN,
    joint_norm,
    lengths_for_median,
    without_outliers,
)
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload, Value
from protofl_common.wire.schema import vectors_in
from server_app.network.membership import Federation
from server_app.protections.bounds import Bounds
from server_app.replies import RoundResult, Upload, vectors_of


def refuse_outliers(
    uploads: list[Upload], federation: Federation, result: RoundResult
) -> list[Upload]:
    """Refuse uploads out of all proportion to the others (``max-norm-ratio``).

    Nor do their reports count.
    """
    payloads = {upload.site: upload.payload for upload in uploads}
    refused = outliers(payloads, federation.bounds.max_norm_ratio)
    result.refused |= refused
    for site in refused:
        del result.reports[site]
    return [upload for upload in uploads if upload.site not in refused]


def outliers(payloads: Mapping[str, Payload], ratio: float) -> dict[str, str]:
    """Return why sites are refused: an entry is more than ``ratio`` times as long as the median.

    The median over the replies is that of an honest client while more than half of them are.
    """
    norms: dict[str, dict[str, float]] = {}  # Entry -> site -> its norm
    for site, payload in payloads.items():
        for name, value in payload.entries.items():
            norms.setdefault(name, {})[site] = _norm(value)

    refused = {}
    for name, norm_of in norms.items():
        lengths = lengths_for_median(list(norm_of.values()))
        if len(lengths) < MIN_CLIENTS_FOR_MEDIAN:
            continue
        median = float(np.median(lengths))
        limit = f"{ratio:g} times the round's median of {median:.3g} (max-norm-ratio)"
        for site, norm in norm_of.items():
            if norm > ratio * median:
                refused[site] = f"{name} of norm {norm:.3g}, above {limit}"
    return refused


def _norm(value: Value) -> float:
    """The norm of the longest prototype, or of all weights together; 0 for other values."""
    if isinstance(value, Prototypes):
        return float(torch.linalg.vector_norm(value.means.double(), dim=1).max())
    return joint_norm(value.values()) if isinstance(value, dict) else 0.0


def bound_samples(
    uploads: list[Upload], federation: Federation, result: RoundResult
) -> list[Upload]:
    """Bound as how many samples an upload of one client weighs.

    The claim cannot be verified, and must not make the mean the client's own.
    """
    claims = [card.train_samples for card in federation.cards.values()]
    most, why = most_samples(claims, federation.bounds)
    bounded = []
    for upload in uploads:
        if upload.clients > 1:
            bounded.append(upload)
            continue
        site = upload.site
        trained_on = upload.report.train_samples
        joined_with = federation.cards[site].train_samples
        if 0 < trained_on < joined_with:
            result.bounded_reasons.add(
                f"{site}: {trained_on} training samples, but it joined with {joined_with}: its "
                "data have changed, and it may be tested on what it was trained on"
            )
        claimed = upload.train_samples
        if claimed > most:
            result.bounded_reasons.add(
                f"{site}: {claimed:g} training samples weigh as {most:g} ({why})"
            )
            entries = {}
            for name, value in upload.payload.entries.items():
                entries[name] = _with_counts(value, most / claimed)
            upload = replace(upload.with_entries(**entries), max_weight=most)
        bounded.append(upload)
    return bounded


def most_samples(claims: Sequence[int], bounds: Bounds) -> tuple[float, str]:
    """Return as how many samples a client may weigh, and which setting says so.

    A multiple of the median (``max-samples-ratio``) bounds any minority of liars, but it must be
    large, for honest clients differ as much. The largest honest claim is closer to the next one
    (``max-samples-lead``), which bounds as many as are expected.
    """
    limits = [(bounds.max_samples_ratio * median_low(claims), "max-samples-ratio")]
    if len(claims) >= MIN_CLIENTS_FOR_MEDIAN:
        largest_first = sorted(claims, reverse=True)
        liars = min(max(1, bounds.liars), (len(claims) - 1) // 2)
        limits.append((bounds.max_samples_lead * largest_first[liars], "max-samples-lead"))
    most, why = min(limits)
    return max(1.0, most), why


def _with_counts(value: Value, factor: float) -> Value:
    """Return the value with its counts of samples times ``factor``, rounded up."""
    if isinstance(value, torch.Tensor):
        return (value.double() * factor).ceil().long()
    if not isinstance(value, Prototypes) or value.counts is None:
        return value
    return replace(value, counts=(value.counts.double() * factor).ceil().long())


def leave_out_farthest(
    uploads: list[Upload], federation: Federation, result: RoundResult
) -> list[Upload]:
    """Leave out the prototypes least like the others (``merging``).

    That is done for a server that trains on them or clusters them; a mean of them is trimmed.
    """
    settings = federation.settings
    merging, trim = federation.bounds.prototypes
    if settings.row.averages_prototypes or merging == "mean":
        return uploads
    for name in vectors_in(settings.exchange.up):
        sent = vectors_of(uploads, name)
        close = without_outliers(list(sent.values()), merging, trim)
        close_of = dict(zip(sent, close, strict=True))
        remaining = []
        for upload in uploads:
            if upload.site in close_of:
                upload = upload.with_entries(**{name: close_of[upload.site]})
            remaining.append(upload)
        uploads = remaining
    return uploads

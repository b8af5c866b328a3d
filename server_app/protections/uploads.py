"""Refuse, bound and leave out uploads by comparison with the others of the round; how far stands in `bounds.py`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median_low

import numpy as np
import torch

from protofl_common.maths.aggregation import FEWEST, length_of, with_length, without_the_farthest
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload, Value
from protofl_common.wire.schema import vectors_in
from server_app.network.membership import Federation
from server_app.protections.bounds import Bounds
from server_app.replies import RoundResult, Upload, vectors_of


def refuse_outliers(uploads: list[Upload], federation: Federation, result: RoundResult) -> list[Upload]:
    """Refuse uploads out of all proportion to the others (``max-norm-ratio``); nor do their reports count."""
    refused = outliers({upload.site: upload.payload for upload in uploads}, federation.bounds.max_norm_ratio)
    result.refused |= refused
    for site in refused:
        del result.reports[site]
    return [upload for upload in uploads if upload.site not in refused]


def outliers(payloads: Mapping[str, Payload], ratio: float) -> dict[str, str]:
    """Return why each site is refused of which an entry is more than ``ratio`` times as long as the median.

    The median over the replies is that of an honest client while more than half of them are.
    """
    refused: dict[str, str] = {}
    for name in dict.fromkeys(name for payload in payloads.values() for name in payload.entries):
        norms = {site: _norm(sent.entries[name]) for site, sent in payloads.items() if name in sent.entries}
        usual = float(np.median(lengths)) if len(lengths := with_length([*norms.values()])) >= FEWEST else math.inf
        above = f"above {ratio:g} times the round's median of {usual:.3g} (max-norm-ratio)"
        refused |= {site: f"{name} of norm {norm:.3g}, {above}" for site, norm in norms.items() if norm > ratio * usual}
    return refused


def _norm(value: Value) -> float:
    if isinstance(value, Prototypes):
        return float(torch.linalg.vector_norm(value.means.double(), dim=1).max())
    return length_of(value.values()) if isinstance(value, dict) else 0.0


def bound_samples(uploads: list[Upload], federation: Federation, result: RoundResult) -> list[Upload]:
    """Bound as how many samples an upload weighs: the claim cannot be verified, and must not make the mean its own."""
    most, why = most_samples([card.train_samples for card in federation.cards.values()], federation.bounds)
    bounded = []
    for upload in uploads:
        if 0 < upload.report.train_samples < (joined := federation.cards[upload.site].train_samples):
            fewer = f"{upload.site}: {upload.report.train_samples} training samples, but it joined with {joined}"
            result.bounded.add(f"{fewer}: its data have changed, and it may be tested on what it was trained on")
        if (claimed := upload.train_samples) > most:
            result.bounded.add(f"{upload.site}: {claimed:g} training samples weigh as {most:g} ({why})")
            entries = {name: _with_counts(value, most / claimed) for name, value in upload.payload.entries.items()}
            upload = replace(upload.having(**entries), most=most)
        bounded.append(upload)
    return bounded


def most_samples(claims: Sequence[int], bounds: Bounds) -> tuple[float, str]:
    """As how many samples a client may weigh, and which setting says so (``max-samples-ratio``, ``max-samples-lead``).

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
    if isinstance(value, torch.Tensor):
        return (value.double() * factor).ceil().long()
    if not isinstance(value, Prototypes) or value.counts is None:
        return value
    return replace(value, counts=(value.counts.double() * factor).ceil().long())


def leave_out_farthest(uploads: list[Upload], federation: Federation, result: RoundResult) -> list[Upload]:
    """Leave the prototypes least like the others out of what a server trains on or clusters (``merging``)."""
    settings, merging = federation.settings, federation.bounds.prototypes
    if settings.row.averages_prototypes or merging[0] == "mean":
        return uploads
    for name in vectors_in(settings.exchange.up):
        sent = vectors_of(uploads, name)
        close = dict(zip(sent, without_the_farthest(list(sent.values()), *merging), strict=True))
        uploads = [each.having(**{name: close[each.site]}) if each.site in close else each for each in uploads]
    return uploads

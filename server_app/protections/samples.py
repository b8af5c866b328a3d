"""Bound how much a client weighs: by its training samples, or by how many vectors it sends.

How far clients may differ stands in `server_app/run/bounds.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

import torch

from protofl_common.maths.aggregation import MIN_CLIENTS_FOR_MEDIAN
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Value
from protofl_common.wire.schema import vectors_in
from server_app.protections.base import Accepted
from server_app.protections.outliers import with_vectors
from server_app.run.bounds import Bounds
from server_app.run.replies import Upload, vectors_of
from server_app.strategies.base import Strategy


def bound_samples(uploads: list[Upload], strategy: Strategy) -> Accepted:
    """Bound the number of samples by which an upload is weighted.

    A client's claim cannot be verified, and a huge one would make the mean its own upload.
    """
    if strategy.settings.privacy.sums_only:
        return Accepted(uploads)
    cards = strategy.federation.cards
    claims = [card.train_samples for card in cards.values()]
    most, setting = most_samples(claims, strategy.federation.bounds)
    bounded = []
    reduced = set()
    for upload in uploads:
        site = upload.site
        trained_on = upload.report.train_samples
        joined_with = cards[site].train_samples
        if 0 < trained_on < joined_with:
            reduced.add(
                f"{site}: {trained_on} training samples, but it joined with {joined_with}: its "
                "data have changed, and it may be tested on what it was trained on"
            )
        claimed = upload.train_samples
        if claimed > most:
            reduced.add(f"{site}: {claimed:g} training samples weigh as {most:g} ({setting})")
            # what it sent may have counts of its own, by which it weighs: they shrink alike
            entries = {}
            for name, value in upload.payload.entries.items():
                entries[name] = _with_counts(value, most / claimed)
            upload = replace(upload.with_entries(**entries), max_weight=most)
        bounded.append(upload)
    return Accepted(bounded, reduced=reduced)


def most_samples(claims: Sequence[int], bounds: Bounds) -> tuple[float, str]:
    """Return the largest number of samples a client may count for, and the setting behind it.

    There are two limits, and the smaller one holds. A multiple of the median claim
    (``max-samples-ratio``) bounds any minority of liars, but must be large, as honest clients
    differ much. A multiple of the largest claim that is left when as many of the largest are
    skipped as there may be liars (``max-samples-lead``) is tighter.
    """
    limits = [(_times(bounds.max_samples_ratio, median_low(claims)), "max-samples-ratio")]
    if len(claims) >= MIN_CLIENTS_FOR_MEDIAN:
        largest_first = sorted(claims, reverse=True)
        # one at least, as the lead may be set without liars; no more than a minority of the claims
        skipped = min(max(1, bounds.liars), (len(claims) - 1) // 2)
        limits.append((_times(bounds.max_samples_lead, largest_first[skipped]), "max-samples-lead"))
    most, setting = min(limits)
    return max(1.0, most), setting  # one sample, or vector, may always count


def _times(factor: float, claim: int) -> float:
    """Return the factor times the claim; without a bound that is infinity, for a claim of 0 too."""
    return math.inf if math.isinf(factor) else factor * claim


def _with_counts(value: Value, factor: float) -> Value:
    """Return the value with its counts of samples times ``factor``, rounded up.

    A tensor that is uploaded by itself holds counts.
    """
    if isinstance(value, torch.Tensor):
        return (value.double() * factor).ceil().long()
    if not isinstance(value, Prototypes) or value.counts is None:
        return value
    return replace(value, counts=(value.counts.double() * factor).ceil().long())


def bound_vectors(uploads: list[Upload], strategy: Strategy) -> Accepted:
    """Thin the vectors of a client that sends too many, as each has a weight of its own.

    An algorithm may say how many vectors a number of samples can give (`most_vectors`). Where it
    does not, and sites may lie, the vectors of each class are bounded as samples are.
    """
    bounds = strategy.federation.bounds
    reduced: set[str] = set()
    for name, entry in vectors_in(strategy.settings.exchange.up).items():
        if not entry.several:  # one vector of each class at most
            continue
        thinned = _thinned_to_samples(uploads, name, strategy, reduced)
        if bounds.liars and not thinned:
            thinned = _thinned_by_class(uploads, name, bounds, reduced)
        uploads = with_vectors(uploads, name, thinned)
    return Accepted(uploads, reduced=reduced)


def _thinned_to_samples(
    uploads: list[Upload], name: str, strategy: Strategy, reduced: set[str]
) -> dict[str, Prototypes]:
    """Return each site's vectors, no more than its samples can give, by site.

    Return {} if the algorithm sets no limit. A line for each site that loses some is added to
    ``reduced``.
    """
    sent = vectors_of(uploads, name)
    thinned = {}
    for upload in uploads:
        most = strategy.most_vectors(upload)
        if most is None or upload.site not in sent:
            continue
        vectors = sent[upload.site]
        thinned[upload.site] = vectors.thinned(most)
        if len(vectors) > most:
            reduced.add(f"{upload.site}: more {name} than its samples have; {most:g} count")
    return thinned


def _thinned_by_class(
    uploads: list[Upload], name: str, bounds: Bounds, reduced: set[str]
) -> dict[str, Prototypes]:
    """Return each site's vectors, of each class at most as many as `most_samples` allows, by site.

    The claims that it compares are the numbers of vectors that sites have sent of the class. A line
    for each site that loses some is added to ``reduced``.
    """
    thinned = vectors_of(uploads, name)
    labels: set[int] = set()
    for vectors in thinned.values():
        labels.update(vectors.labels.tolist())

    for label in sorted(labels):
        numbers = {}
        for site, vectors in thinned.items():
            number = int((vectors.labels == label).sum())
            if number:
                numbers[site] = number
        most, setting = most_samples(list(numbers.values()), bounds)
        for site, number in numbers.items():
            if number <= most:
                continue
            is_of_class = thinned[site].labels == label
            of_class = thinned[site].only(is_of_class).thinned(most)
            of_others = thinned[site].only(~is_of_class)
            thinned[site] = Prototypes.joined([of_others, of_class])
            reduced.add(f"{site}: {number} {name} of a class count as {most:g} ({setting})")
    return thinned

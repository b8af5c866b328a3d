"""Refuse uploads, or leave out prototypes, that are unlike all others of the round."""

from collections.abc import Mapping

import numpy as np
import torch

from protofl_common.maths.aggregation import (
    MIN_CLIENTS_FOR_MEDIAN,
    joint_norm,
    lengths_for_median,
)
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload, Value
from protofl_common.wire.schema import vectors_in
from server_app.protections.base import Accepted
from server_app.run.replies import Upload, vectors_of
from server_app.strategies.base import Strategy


def refuse_outliers(uploads: list[Upload], strategy: Strategy) -> Accepted:
    """Refuse uploads much longer than the others, and their reports, too (``max-norm-ratio``)."""
    if strategy.settings.privacy.sums_only:
        return Accepted(uploads)
    payloads = {upload.site: upload.payload for upload in uploads}
    refused = outliers(payloads, strategy.federation.bounds.max_norm_ratio)
    return Accepted([upload for upload in uploads if upload.site not in refused], refused)


def outliers(payloads: Mapping[str, Payload], ratio: float) -> dict[str, str]:
    """Return why sites are refused, by site: an entry is longer than ``ratio`` times the median.

    While more than half of the clients are honest, the median cannot exceed an honest client's
    norm. Entries of too few clients for a median are not compared.
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
    """Return the norm of the longest prototype, or of all weights together; 0 for other values."""
    if isinstance(value, Prototypes):
        return float(torch.linalg.vector_norm(value.means.double(), dim=1).max())
    return joint_norm(value.values()) if isinstance(value, dict) else 0.0


def leave_out_farthest(uploads: list[Upload], strategy: Strategy) -> Accepted:
    """Leave out the prototypes least like the others (``merging``).

    This is for algorithms whose server trains on prototypes or clusters them. Where it averages
    them, the average itself is a trimmed mean or median.
    """
    aggregator = strategy.federation.bounds.prototype_aggregator
    if aggregator.merging == "mean" or strategy.row.averages_prototypes:
        return Accepted(uploads)
    for name in vectors_in(strategy.settings.exchange.up):
        sent = vectors_of(uploads, name)
        kept = aggregator.without_outliers(list(sent.values()))
        uploads = with_vectors(uploads, name, dict(zip(sent, kept, strict=True)))
    return Accepted(uploads)


def with_vectors(
    uploads: list[Upload], name: str, vectors: Mapping[str, Prototypes]
) -> list[Upload]:
    """Return the uploads with ``vectors`` (by site) in place of those sent under ``name``."""
    changed = []
    for upload in uploads:
        if upload.site in vectors:
            upload = upload.with_entries(**{name: vectors[upload.site]})
        changed.append(upload)
    return changed

"""Checks that take more than a well-formed reply: what its site said when it joined, and the replies of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

from protofl_common.maths.aggregation import FEWEST
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.limits import RefusedMessage
from protofl_common.wire.payloads import Payload, Value
from protofl_common.wire.records import Report, SiteCard


def check_claims(report: Report, payload: Payload, card: SiteCard, training: bool) -> None:
    """Hold a reply to the site's introduction.

    What a site claims of its own data cannot be verified, but it cannot claim more as the run goes on: samples weigh
    its model, counts its prototypes, and a class that it does not hold is one that it never declared.

    RefusedMessage if the reply claims more samples or other classes than the introduction.
    """
    if training and report.train_samples < 1:
        raise RefusedMessage("a training reply without training samples")
    for what in ("train_samples", "test_samples", "validation_samples"):
        now, before = getattr(report, what), getattr(card, what)
        if now > before:
            raise RefusedMessage(f"{what} = {now}, but it joined with {before}")
    statistics = payload.statistics() if "statistics" in payload.entries else None
    if statistics is not None and (total := float(statistics.counts.double().sum())) > report.train_samples:
        raise RefusedMessage(f"statistics of {total:g} samples, but it has {report.train_samples} for training")
    if statistics is not None and statistics.labels is not None and len(statistics.labels) > report.test_samples:
        raise RefusedMessage(
            f"statistics of {len(statistics.labels)} features, but {report.test_samples} samples for testing"
        )
    for vectors in (value for value in payload.entries.values() if isinstance(value, Prototypes)):
        if len(vectors) > report.train_samples:
            raise RefusedMessage(f"{len(vectors)} prototypes of {report.train_samples} training samples")
        if alien := sorted(set(vectors.labels.tolist()) - set(card.holds)):
            names = ", ".join(card.classes[label] for label in alien[:3])
            raise RefusedMessage(f"a prototype of a class that it did not declare when it joined: {names}")
        if vectors.counts is not None:
            _check_counts(vectors.counts, report)
    for counts in (value for value in payload.entries.values() if isinstance(value, Tensor)):
        if not set(counts.nonzero().flatten().tolist()) <= set(card.holds):
            raise RefusedMessage("samples of a class that it did not declare when it joined")
        _check_counts(counts, report)


def _check_counts(counts: Tensor, report: Report) -> None:
    if (total := float(counts.double().sum())) > report.train_samples:
        raise RefusedMessage(f"counts of {total:g} samples, but it has {report.train_samples} for training")


def outliers(payloads: Mapping[str, Payload], ratio: float) -> dict[str, str]:
    """Site -> why its upload is out of all proportion to the others of the round (``max-norm-ratio``).

    The measure is the largest norm of a prototype, and the norm of the model; usual is the median over the replies,
    which is that of an honest client while more than half of them are.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for payload in payloads.values() for name in payload.entries):
        norms = {site: _norm(payload.entries[name]) for site, payload in payloads.items() if name in payload.entries}
        found |= _far_above(norms, ratio, name)
    return found


def _norm(value: Value) -> float:
    """The largest norm of a vector, or the norm of all weights together."""
    if isinstance(value, Prototypes):
        return float(torch.linalg.vector_norm(value.means.double(), dim=1).max())
    tensors = value.values() if isinstance(value, dict) else ()
    squares = [float(one.double().square().sum()) for one in tensors if one.is_floating_point()]
    return math.sqrt(sum(squares))


def _far_above(norms: Mapping[str, float], ratio: float, what: str) -> dict[str, str]:
    if len(norms) < FEWEST:
        return {}
    usual = median(norms.values())
    return {
        site: f"{what} of norm {norm:.3g}, above {ratio:g} times the round's median of {usual:.3g} (max-norm-ratio)"
        for site, norm in norms.items()
        if norm > ratio * usual
    }

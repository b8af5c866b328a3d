"""Hiding labels, for semi-supervised settings: ``positive-rate``."""

from __future__ import annotations

import numpy as np

from protofl_common.datasets.raw import Ints
from protofl_common.datasets.shares import Generator, by_class

UNLABELLED = -1
"""The label of a training sample whose label the client does not know."""


def hide_labels(labels: Ints, rate: float, rng: Generator) -> Ints:
    """``labels`` int64 [n] of which a random ``rate`` of every class is kept, and at least one; others: `UNLABELLED`.

    The same generator state hides nested sets: what is labelled at a rate is labelled at every larger one.
    """
    if rate >= 1:
        return labels
    hidden = np.full_like(labels, UNLABELLED)
    for positions in by_class(labels, rng):
        kept = positions[: max(1, round(rate * len(positions)))]
        hidden[kept] = labels[kept]
    return hidden

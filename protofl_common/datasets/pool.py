"""The samples that are divided among the clients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protofl_common.datasets.raw import Ints

Shares = list[Ints]
"""For each client the positions of its samples in the pool."""


@dataclass(frozen=True)
class Pool:
    """The samples to divide: ``rows`` int64 [n] of the data set, their ``labels`` and ``domains`` int64 [n]."""

    rows: Ints
    labels: Ints
    domains: Ints
    domain_names: tuple[str, ...]
    for_training: NDArray[np.bool_] | None = None
    """Bool [n]: which samples may be trained on, where that is settled before the clients' shares are."""

    def take(self, positions: Ints) -> Pool:
        """Only these samples."""
        some = replace(self, rows=self.rows[positions], labels=self.labels[positions], domains=self.domains[positions])
        return some if self.for_training is None else replace(some, for_training=self.for_training[positions])

    def only(self, domain: str) -> Pool:
        """Only the samples of one domain, as a pool of a single domain."""
        part = self.take(np.flatnonzero(self.domains == self.domain_names.index(domain)))
        return replace(part, domains=np.zeros_like(part.domains), domain_names=(domain,))

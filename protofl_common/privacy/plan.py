"""Which messages of a run differential privacy covers, with how much noise, and what they cost after each round.

In a round a client trains by DP-SGD (`client_app/private_training.py`), and sends a table of class sums or counts with
noise (`release.py`); both see its training data. All rounds are composed (`accountant.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from protofl_common.config.sections import PrivacySettings
from protofl_common.privacy.accountant import Mechanism, epsilon, least_noise

NOT_COVERED: dict[str, str] = {
    "fedplvm": "clusters of features",
    "mpft": "centres of clusters of features",
    "feddistill": "outputs that are summed up while it trains",
    "fedfa": "statistics of maps inside the network",
    "fedrep": "a body trained with a head that has no noise",
    "per-fedavg": "a model that two batches change in one step",
    "pfedme": "a model that follows one without noise",
}
"""Algorithms that send what neither DP-SGD nor noisy class sums can make private."""
TABLES_SHARE = 0.5
"""Of ε, what the tables alone may cost where training costs too, and the noise is not given."""


@dataclass(frozen=True)
class Plan:
    """What the messages of one client cost."""

    privacy: PrivacySettings
    samples: int
    """N, its training samples."""
    rate: float
    """q: the part of them that is expected in a batch."""
    batches: int
    """Steps of DP-SGD in an epoch."""
    epochs: int
    """In a round."""
    tables: tuple[int, ...]
    """How many tables of classes it sends, for each round of the run."""

    @property
    def steps(self) -> int:
        """Of DP-SGD in a round."""
        return self.batches * self.epochs

    @cached_property
    def table_noise(self) -> float:
        """σ of the tables."""
        if self.privacy.dp_noise or not any(self.tables):
            return self.privacy.dp_noise
        most = self.privacy.dp_epsilon * (TABLES_SHARE if self.steps else 1)
        sent = sum(self.tables)
        return self._least(lambda noise: [Mechanism(1.0, noise, sent)], most)

    @cached_property
    def noise(self) -> float:
        """σ of DP-SGD: as given, or what the budget leaves for all rounds."""
        if self.privacy.dp_noise or not self.steps:
            return self.privacy.dp_noise
        return self._least(lambda noise: self._spent(len(self.tables), noise), self.privacy.dp_epsilon)

    def _least(self, spent: Callable[[float], list[Mechanism]], most: float) -> float:
        return least_noise(spent, self.privacy.dp_delta, most, f"dp-epsilon = {self.privacy.dp_epsilon:g}")

    def spent(self, rounds: int) -> list[Mechanism]:
        """What ``rounds`` rounds from the first cost; rounds that were repeated count as further ones at the end."""
        return self._spent(rounds, self.noise)

    def of_round(self, number: int) -> list[Mechanism]:
        """What the round ``number`` costs."""
        return [Mechanism(self.rate, self.noise, self.steps), Mechanism(1.0, self.table_noise, self.tables[number - 1])]

    def epsilon(self, rounds: int) -> float:
        """ε at ``dp-delta`` after ``rounds`` rounds."""
        return epsilon(self.spent(rounds), self.privacy.dp_delta)

    def _spent(self, rounds: int, noise: float) -> list[Mechanism]:
        tables = sum(self.tables[:rounds]) + max(0, rounds - len(self.tables)) * max(self.tables)
        training = Mechanism(self.rate, noise, rounds * self.steps)
        return [one for one in (training, Mechanism(1.0, self.table_noise, tables)) if one.times]


@cache
def plan_of(privacy: PrivacySettings, samples: int, batch_size: int, epochs: int, tables: tuple[int, ...]) -> Plan:
    """The plan of a client with ``samples`` training samples."""
    batches = max(1, math.ceil(samples / batch_size))
    return Plan(privacy, samples, min(1.0, batch_size / max(1, samples)), batches, epochs, tables)

"""Which messages of a run differential privacy covers, with how much noise, and what they cost after each round.

In a round a client trains by DP-SGD (`client_app/private_training.py`), and sends a table of class sums or counts with
noise (`release.py`); both see its training data. All rounds are composed (`accountant.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

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
    rate: float
    """q: the part of its training samples that is expected in a batch."""
    steps: int
    """Of DP-SGD in a round; 0 where nothing is trained that leaves."""
    tables: tuple[int, ...]
    """How many tables of classes it sends, for each round of the run."""

    @property
    def expected(self) -> str:
        """The budget, for messages."""
        return f"dp-epsilon = {self.privacy.dp_epsilon:g}"

    @cached_property
    def table_noise(self) -> float:
        """σ of the tables."""
        if self.privacy.dp_noise or not any(self.tables):
            return self.privacy.dp_noise
        most = self.privacy.dp_epsilon * (TABLES_SHARE if self.steps else 1)
        sent = sum(self.tables)
        return least_noise(lambda noise: [Mechanism(1.0, noise, sent)], self.privacy.dp_delta, most, self.expected)

    @cached_property
    def noise(self) -> float:
        """σ of DP-SGD: as given, or what the budget leaves for all rounds."""
        if self.privacy.dp_noise or not self.steps:
            return self.privacy.dp_noise
        rounds = len(self.tables)
        return least_noise(
            lambda noise: self._spent(rounds, noise), self.privacy.dp_delta, self.privacy.dp_epsilon, self.expected
        )

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


def plan_of(
    privacy: PrivacySettings, samples: int, batch_size: int, epochs: int, tables: tuple[int, ...]
) -> Plan:
    """The plan of a client with ``samples`` training samples; an epoch has as many steps as it has batches."""
    batches = max(1, math.ceil(samples / batch_size))
    return Plan(privacy, min(1.0, batch_size / max(1, samples)), epochs * batches, tables)

"""The samples that are divided, and their stratified dealing, splitting and capping.

The functions take the labels int64 [n] of some samples, and return positions into these (int64).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protofl_common.data.raw import Ints

Generator = np.random.Generator
Shares = list[Ints]  # positions in the pool of each client's samples


@dataclass(frozen=True)
class Pool:
    """The samples to divide: ``rows`` int64 [n] of the data set, their ``labels`` and ``domains`` int64 [n]."""

    rows: Ints
    labels: Ints
    domains: Ints
    domain_names: tuple[str, ...]
    for_training: NDArray[np.bool_] | None = None  # bool [n]; None: decided after they are dealt

    def take(self, positions: Ints) -> Pool:
        """Only these samples, of which nothing is decided yet."""
        return Pool(self.rows[positions], self.labels[positions], self.domains[positions], self.domain_names)

    def only(self, domain: str) -> Pool:
        """Only the samples of one domain, as a pool of a single domain."""
        part = self.take(np.flatnonzero(self.domains == self.domain_names.index(domain)))
        return replace(part, domains=np.zeros_like(part.domains), domain_names=(domain,))


def shuffled_by_class(labels: Ints, rng: Generator) -> list[Ints]:
    """The positions of each class that occurs, in the order of the labels, shuffled within the class."""
    shuffled = rng.permutation(len(labels))
    deck = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return np.split(deck, np.flatnonzero(np.diff(labels[deck])) + 1) if len(deck) else []


def dealt_evenly(labels: Ints, clients: int, rng: Generator) -> Shares:
    """Shares of (nearly) equal size and equal class proportions; needs a sample at least."""
    deck = np.concatenate(shuffled_by_class(labels, rng))
    return [deck[client::clients] for client in range(clients)]


def split(labels: Ints, train_fraction: float, rng: Generator) -> tuple[Ints, Ints]:
    """Training and test positions; ``train_fraction`` of every class, rounded, is for training.

    A class of two samples or more has at least one on either side. A single sample is for training, except that
    one of them is for testing when there would be no test sample at all. Needs two samples.
    """
    train, test = [], []
    for positions in shuffled_by_class(labels, rng):
        count = len(positions)
        cut = min(max(round(train_fraction * count), 1), max(count - 1, 1))
        train.append(positions[:cut])
        test.append(positions[cut:])
    for_training, for_testing = np.concatenate(train), np.concatenate(test)
    if not len(for_testing):
        return for_training[:-1], for_training[-1:]
    return for_training, for_testing


def set_aside(labels: Ints, fraction: float, rng: Generator) -> tuple[Ints, Ints]:
    """Positions that stay and about ``fraction`` of each class that go, in rising order; one of each class stays."""
    spare = np.sort(np.concatenate([positions[1:] for positions in shuffled_by_class(labels, rng)]))
    wanted = min(round(fraction * len(labels)), len(spare))
    aside = spare[proportional(labels[spare], wanted, rng)[0]] if wanted else spare[:0]
    return np.setdiff1d(np.arange(len(labels)), aside), aside


def balanced(labels: Ints, limit: int, rng: Generator) -> tuple[Ints, Ints]:
    """At most ``limit`` positions (0: all) with as equal class counts as possible, and the positions left over."""
    turns = np.empty(len(labels))
    for positions in shuffled_by_class(labels, rng):
        turns[positions] = np.arange(len(positions))
    return _first(turns, limit, rng)


def proportional(labels: Ints, limit: int, rng: Generator) -> tuple[Ints, Ints]:
    """At most ``limit`` positions (0: all) with about the class proportions of ``labels``, and those left over."""
    turns = np.empty(len(labels))
    for positions in shuffled_by_class(labels, rng):
        turns[positions] = (np.arange(len(positions)) + rng.random()) / len(positions)
    return _first(turns, limit, rng)


def _first(turns: NDArray[np.float64], limit: int, rng: Generator) -> tuple[Ints, Ints]:
    """The ``limit`` positions with the lowest turn (0: all), ties at random, and the others; both in rising order."""
    limit, lots = min(limit or len(turns), len(turns)), rng.random(len(turns))
    last = np.partition(turns, limit - 1)[limit - 1] if limit else -np.inf
    within, tied = turns < last, np.flatnonzero(turns == last)
    within[tied[np.argsort(lots[tied], kind="stable")[: limit - within.sum()]]] = True
    return np.flatnonzero(within), np.flatnonzero(~within)

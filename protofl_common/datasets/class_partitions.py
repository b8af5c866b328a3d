"""Partitions that give each client its own classes: ``pathological``, ``n-way-k-shot``, ``label-shift``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.pool import Pool, Shares
from protofl_common.datasets.raw import DataError, Ints
from protofl_common.datasets.shares import Generator, by_class


def pathological(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """``classes-per-client`` classes for each client, divided among a class's holders in random, unequal amounts.

    Each client takes the classes that the fewest clients hold so far, ties at random: so all classes are held when
    clients × classes-per-client allows it (Flower's ``PathologicalPartitioner`` promises that only for as many
    clients as classes, and divides evenly). A holder's weight is uniform in [0.1, 1], on top of 2 samples.

    Raises
    ------
    DataError
        When there are fewer classes than that, or fewer samples of a class than holders.
    """
    decks = by_class(pool.labels, rng)
    if settings.classes_per_client > len(decks):
        raise DataError(f"classes-per-client = {settings.classes_per_client}: the data have only {len(decks)} classes")
    holders: list[list[int]] = [[] for _ in decks]
    for client in range(clients):
        fewest = np.lexsort((rng.random(len(decks)), np.array([len(held_by) for held_by in holders])))
        for deck in fewest[: settings.classes_per_client]:
            holders[deck].append(client)
    parts: list[Shares] = [[] for _ in range(clients)]
    for deck, held_by in zip(decks, holders, strict=True):
        if not held_by:
            continue
        if len(deck) < len(held_by):
            raise DataError(
                f"partition = 'pathological': class {pool.labels[deck[0]]} has {len(deck)} samples for "
                f"{len(held_by)} clients; use fewer clients or a smaller classes-per-client"
            )
        for client, part in zip(held_by, _unequal(deck, len(held_by), rng), strict=True):
            parts[client].append(part)
    return [np.concatenate(part) for part in parts]


def n_way_k_shot(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """FedProto's clients of n random classes with k training samples each.

    n is uniform in ``ways`` ± ``ways-stdev``, within 2 … number of classes, and k uniform in ``shots`` ±
    ``shots-stdev`` (at least 1), both drawn for each client. When a class runs out, its samples are dealt out again
    from the start, so that clients come to share some; a client never has a sample twice, and gets all of a class that
    has too few. With test-from = "split" each class is split first, and the test samples, as many as
    ``train-fraction`` says, are dealt from a deck of their own: nobody trains on what another is tested on.
    """
    decks = by_class(pool.labels, rng)
    known = np.ones(len(pool.rows), dtype=bool) if pool.for_training is None else pool.for_training
    training = {int(pool.labels[deck[0]]): _Deck(deck[known[deck]]) for deck in decks}
    testing = {int(pool.labels[deck[0]]): _Deck(deck[~known[deck]]) for deck in decks}
    high = min(len(decks), settings.ways + settings.ways_stdev)
    low = min(max(min(2, len(decks)), settings.ways - settings.ways_stdev), high)
    shares = []
    for _ in range(clients):
        labels = rng.choice(list(training), size=rng.integers(low, high + 1), replace=False)
        shots = rng.integers(settings.shots - settings.shots_stdev, settings.shots + settings.shots_stdev + 1)
        count = max(1, int(shots))
        more = max(1, round(count / settings.train_fraction) - count)
        parts = [[training[label].deal(count), testing[label].deal(more)] for label in labels]
        shares.append(np.concatenate([dealt for part in parts for dealt in part]))
    return shares


def label_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Shares of equal size, whatever the domain, with class proportions from Dir(alpha) for each client.

    Clients draw one after the other without replacement; for a class that has run out, the client's other classes
    step in (Hsu et al., 2019, arXiv:1909.06335), so the last clients get what is left.
    """
    decks = by_class(pool.labels, rng)
    left = np.array([len(deck) for deck in decks])
    sizes = [len(part) for part in np.array_split(pool.rows, clients)]
    shares = []
    for size in sizes:
        counts = _drawn(rng.dirichlet(np.full(len(decks), settings.alpha)), left, size, rng)
        shares.append(np.concatenate([deck[n - count : n] for deck, n, count in zip(decks, left, counts, strict=True)]))
        left = left - counts
    return shares


class _Deck:
    """The shuffled samples of one class, dealt out from the top and from the start again when they run out."""

    def __init__(self, positions: Ints) -> None:
        self._positions = positions
        self._next = 0

    def deal(self, count: int) -> Ints:
        """``count`` different samples, or all of them when there are fewer (of no sample, none)."""
        taken = self._next + np.arange(min(count, len(self._positions)))
        self._next += len(taken)
        return self._positions[taken % max(1, len(self._positions))]


def _unequal(deck: Ints, holders: int, rng: Generator) -> Shares:
    """``deck`` cut into parts of random size; at least 2 samples each when there are so many, else at least 1."""
    least = min(2, len(deck) // holders)
    weights = rng.uniform(0.1, 1, size=holders)
    cuts = np.floor(np.cumsum(weights / weights.sum()) * (len(deck) - least * holders)).astype(np.int64)
    return np.split(deck, (cuts + least * np.arange(1, holders + 1))[:-1])


def _drawn(proportions: NDArray[np.float64], left: Ints, size: int, rng: Generator) -> Ints:
    """How many samples of each class [C] to take for ``size`` in all, when ``left`` [C] are there."""
    counts = np.zeros_like(left)
    while (missing := size - counts.sum()) > 0:
        weights = proportions * (counts < left)
        if weights.sum() < 1e-9:  # only classes are left that this client would hardly have
            weights = (left - counts).astype(np.float64)
        counts += np.minimum(rng.multinomial(missing, weights / weights.sum()), left - counts)
    return counts

"""Partitions that divide each class over the clients in proportions from Dir(alpha).

The draw is repeated while a client has too few samples. When `TRIES` draws fail, as they all do with hundreds of
clients and a small alpha, the richest clients of the last one fill up the poorest (`_filled_up`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protofl_common.data.raw import Ints
from protofl_common.data.shares import Generator, Pool, Shares

Floats = NDArray[np.float64]
TRIES = 220
TINY = 1e-300
"""A proportion where none was drawn; it changes no other one."""


def dirichlet(pool: Pool, clients: int, rng: Generator, alpha: float) -> Shares:
    """Deal the same shares as Flower's ``DirichletPartitioner``, with at least 10 samples each.

    A fifth of an equal share is enough where that is less, but not below 2 samples.
    """
    size = len(pool.rows)
    least = min(10, max(2, size // (5 * clients)), size // clients)
    return _dirichlet(pool, clients, np.random.default_rng(int(rng.integers(2**31))), alpha, least)


def balanced_dirichlet(pool: Pool, clients: int, rng: Generator, alpha: float) -> Shares:
    """Deal the same shares as PFLlib's generator: a client with an equal share or more gets nothing of further classes.

    At least 40 samples each; half of an equal share is enough where that is less, but not below 2 samples.
    """
    size = len(pool.rows)
    least = min(40, max(2, size // (2 * clients)), size // clients)
    return _dirichlet(pool, clients, rng, alpha, least, full=size / clients)


def _dirichlet(
    pool: Pool, clients: int, rng: Generator, alpha: float, least: int, full: float = float("inf")
) -> Shares:
    """Shares of ``least`` samples or more each, shuffled; a client of ``full`` samples gets no further class."""
    decks = [np.flatnonzero(pool.labels == label) for label in np.unique(pool.labels)]
    sizes = [len(deck) for deck in decks]
    for _ in range(TRIES):
        counts_CN, drawn_CN = _drawn(sizes, np.full(clients, alpha), rng, full)
        if counts_CN.sum(0).min() >= least:
            break
    else:
        counts_CN = _filled_up(counts_CN, drawn_CN + TINY * rng.random(drawn_CN.shape), least)
    owners = np.concatenate([np.repeat(np.arange(clients), counts_N) for counts_N in counts_CN])
    dealt = np.concatenate(decks)[np.argsort(owners, kind="stable")]
    shares = np.split(dealt, np.cumsum(counts_CN.sum(0))[:-1])
    for share in shares:
        rng.shuffle(share)
    return shares


def _drawn(sizes: list[int], alpha_N: Floats, rng: Generator, full: float) -> tuple[Ints, Floats]:
    """One draw: how many samples of each class every client gets, and the proportions drawn, both [C, N]."""
    counts, drawn = [], []
    total_N = np.zeros(len(alpha_N), dtype=np.int64)
    for size in sizes:
        proportions_N = rng.dirichlet(alpha_N)
        if full < float("inf"):
            proportions_N = np.maximum(proportions_N, TINY) * (total_N < full)
            proportions_N /= proportions_N.sum()
        cuts = (np.cumsum(proportions_N) * size).astype(np.int64)[:-1]
        counts.append(np.diff(cuts, prepend=0, append=size))
        drawn.append(proportions_N)
        total_N = total_N + counts[-1]
    return np.stack(counts), np.stack(drawn)


def _filled_up(counts_CN: Ints, drawn_CN: Floats, least: int) -> Ints:
    """The counts after clients with fewer than ``least`` samples have been given what they lack.

    Sample by sample, each gets the class that it lacks most by the proportions drawn for it, from the client that has
    most of that class; nobody gives below ``least``.
    """
    counts_CN = counts_CN.copy()
    sizes_N = counts_CN.sum(0)
    spare_CN = counts_CN * (sizes_N > least)
    for poor in np.flatnonzero(sizes_N < least):
        wanted_C = least * drawn_CN[:, poor] / drawn_CN[:, poor].sum()
        for _ in range(least - sizes_N[poor]):
            needed = np.argsort(counts_CN[:, poor] - wanted_C)
            label = next(label for label in needed if spare_CN[label].any())
            rich = spare_CN[label].argmax()
            counts_CN[label, [rich, poor]] += -1, 1
            sizes_N[rich] -= 1
            spare_CN[:, rich] = counts_CN[:, rich] * (sizes_N[rich] > least)
    return counts_CN

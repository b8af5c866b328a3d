"""The division of a data set among clients: one function for each legal value of ``partition``.

Every function takes the pool of samples, the settings, the number of clients and a random generator, and returns for
each client the positions (int64) of its share in the pool. Shares are disjoint, but for `n_way_k_shot`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.sections import DataSettings
from protofl_common.data.raw import DataError, Ints

Floats = NDArray[np.float64]
Generator = np.random.Generator
Shares = list[Ints]  # positions in the pool of each client's samples
TRIES = 220  # draws of Dirichlet partitions, before the richest clients fill up the poorest
TINY = 1e-300  # a proportion where none was drawn; it changes no other one


@dataclass(frozen=True)
class Pool:
    """The samples to divide: ``rows`` int64 [n] of the data set, their ``labels`` and ``domains`` int64 [n]."""

    rows: Ints
    labels: Ints
    domains: Ints
    domain_names: tuple[str, ...]
    for_training: NDArray[np.bool_] | None = None  # bool [n]; None: decided after they are dealt

    def take(self, positions: Ints) -> "Pool":
        """Only these samples, of which nothing is decided yet."""
        return Pool(self.rows[positions], self.labels[positions], self.domains[positions], self.domain_names)


def natural(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """The clients that the data name: client i has the samples of the i-th name; DataError unless there are as many."""
    names = pool.domain_names
    if len(names) != clients:
        cure = "in simulation run that many (--clients; in a table clients), or choose feature-shift"
        which = "which divides a name among several or leaves some out"
        raise DataError(f"partition = 'natural': the data name {len(names)} clients, not {clients}; {cure}, {which}")
    return [np.flatnonzero(pool.domains == client) for client in range(clients)]


def dirichlet(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """The class counts of Flower's ``DirichletPartitioner``: at least 10 samples, a fifth of an equal share, or 2."""
    size = len(pool.rows)
    least = min(10, max(2, size // (5 * clients)), size // clients)
    return _dirichlet(pool, clients, np.random.default_rng(int(rng.integers(2**31))), settings.alpha, least)


def balanced_dirichlet(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """PFLlib's: who has an equal share gets no further class; at least 40 samples, or half of such a share, or 2."""
    size = len(pool.rows)
    least = min(40, max(2, size // (2 * clients)), size // clients)
    return _dirichlet(pool, clients, rng, settings.alpha, least, full=size / clients)


def _dirichlet(pool: Pool, clients: int, rng: Generator, alpha: float, least: int, full: float = math.inf) -> Shares:
    """Shares of at least ``least`` samples; after `TRIES` draws in vain the richest clients fill up the poorest."""
    sizes = np.unique(pool.labels, return_counts=True)[1].tolist()
    for _ in range(TRIES):
        counts_CN, drawn_CN = _counts_drawn(sizes, np.full(clients, alpha), rng, full)
        if counts_CN.sum(0).min() >= least:
            break
    else:
        counts_CN = _filled_up(counts_CN, drawn_CN + TINY * rng.random(drawn_CN.shape), least)
    owners = np.concatenate([np.repeat(np.arange(clients), counts_N) for counts_N in counts_CN])
    # at random within a class: files are in the order of looks, patients or dates
    dealt = np.concatenate(shuffled_by_class(pool.labels, rng))[np.argsort(owners, kind="stable")]
    return np.split(dealt, np.cumsum(counts_CN.sum(0))[:-1])


def _counts_drawn(sizes: list[int], alpha_N: Floats, rng: Generator, full: float) -> tuple[Ints, Floats]:
    """One draw: how many samples of each class every client gets, and the proportions drawn, both [C, N]."""
    counts, drawn = [], []
    total_N = np.zeros(len(alpha_N), dtype=np.int64)
    for size in sizes:
        proportions_N = rng.dirichlet(alpha_N)
        if full < math.inf:
            proportions_N = np.maximum(proportions_N, TINY) * (total_N < full)
            proportions_N /= proportions_N.sum()
        counts.append(np.diff((np.cumsum(proportions_N) * size).astype(np.int64)[:-1], prepend=0, append=size))
        drawn.append(proportions_N)
        total_N = total_N + counts[-1]
    return np.stack(counts), np.stack(drawn)


def _filled_up(counts_CN: Ints, drawn_CN: Floats, least: int) -> Ints:
    """Give poor clients, one by one, samples of the class that they lack most, from who has and can spare most."""
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


def pathological(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """``classes_per_client`` classes for each client, divided among a class's holders in random, unequal amounts.

    Each client takes the classes that the fewest clients have so far, ties at random: so all classes are used when
    clients × classes-per-client allows it. A holder's weight is uniform in [0.1, 1], on top of 2 samples.
    """
    decks, classes_per_client = shuffled_by_class(pool.labels, rng), settings.classes_per_client
    if classes_per_client > len(decks):
        raise DataError(f"classes-per-client = {classes_per_client}: the data have only {len(decks)} classes")
    holders: list[list[int]] = [[] for _ in decks]
    for client in range(clients):
        fewest = np.lexsort((rng.random(len(decks)), np.array([len(members) for members in holders])))
        for deck in fewest[:classes_per_client]:
            holders[deck].append(client)
    parts: list[Shares] = [[] for _ in range(clients)]
    for deck, members in zip(decks, holders, strict=True):
        if not members:
            continue
        if len(deck) < len(members):
            few = f"class {pool.labels[deck[0]]} has {len(deck)} samples for {len(members)} clients"
            raise DataError(f"partition = 'pathological': {few}; use fewer clients or a smaller classes-per-client")
        for client, part in zip(members, _unequal(deck, len(members), rng), strict=True):
            parts[client].append(part)
    return [np.concatenate(part) for part in parts]


def _unequal(deck: Ints, holders: int, rng: Generator) -> Shares:
    """``deck`` cut into parts of random size; at least 2 samples each when there are so many, else at least 1."""
    least, weights = min(2, len(deck) // holders), rng.uniform(0.1, 1, size=holders)
    cuts = np.floor(np.cumsum(weights / weights.sum()) * (len(deck) - least * holders)).astype(np.int64)
    return np.split(deck, (cuts + least * np.arange(1, holders + 1))[:-1])


def n_way_k_shot(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """FedProto's clients of n random classes with k training samples each.

    n is uniform in ``ways`` ± ``ways-stdev`` within 2 … number of classes; so is k (at least 1). When a class runs out,
    its samples are dealt out again from the start, so that clients come to share some; a client never has one twice.
    Samples that the pool marks for testing are dealt from a deck of their own, as many as ``train_fraction`` says:
    nobody trains on another's test samples.
    """
    decks = shuffled_by_class(pool.labels, rng)
    for_training = np.ones(len(pool.rows), dtype=bool) if pool.for_training is None else pool.for_training
    parts = ([deck[chosen[deck]].tolist() for deck in decks] for chosen in (for_training, ~for_training))
    training, testing = ([(cycle(samples), len(samples)) for samples in part] for part in parts)
    high = min(len(decks), settings.ways + settings.ways_stdev)
    low = min(max(min(2, len(decks)), settings.ways - settings.ways_stdev), high)
    shares = []
    for _ in range(clients):
        classes = rng.choice(len(decks), size=rng.integers(low, high + 1), replace=False)
        shots = rng.integers(settings.shots - settings.shots_stdev, settings.shots + settings.shots_stdev + 1)
        count = max(1, int(shots))
        more = max(1, round(count / settings.train_fraction) - count)
        decks_of = [deck for i in classes for deck in ((*training[i], count), (*testing[i], more))]
        dealt = [list(islice(samples, min(many, size))) for samples, size, many in decks_of]
        shares.append(np.concatenate(dealt).astype(np.int64))
    return shares


def label_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Equal sizes in proportions from Dir(alpha) (Hsu et al., arXiv:1909.06335); the last get what is left."""
    decks = shuffled_by_class(pool.labels, rng)
    left, shares = np.array([len(deck) for deck in decks]), list[Ints]()
    for part in np.array_split(pool.rows, clients):
        counts = _drawn(rng.dirichlet(np.full(len(decks), settings.alpha)), left, len(part), rng)
        shares.append(np.concatenate([deck[n - count : n] for deck, n, count in zip(decks, left, counts, strict=True)]))
        left = left - counts
    return shares


def _drawn(proportions: Floats, left: Ints, size: int, rng: Generator) -> Ints:
    """Number of samples of each class [C] to take for ``size`` in all, when ``left`` [C] are there."""
    counts = np.zeros_like(left)
    while (missing := size - counts.sum()) > 0:
        weights = proportions * (counts < left)
        if weights.sum() < 1e-9:  # only classes are left that this client would hardly have
            weights = (left - counts).astype(np.float64)
        counts += np.minimum(rng.multinomial(missing, weights / weights.sum()), left - counts)
    return counts


def feature_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """One domain per client, divided evenly: i mod n, or by ``clients-per-domain``."""
    domains = np.array(_domain_of_clients(settings.clients_per_domain, pool.domain_names, clients))
    shares = [np.empty(0, dtype=np.int64)] * clients
    for domain in np.unique(domains):
        members, positions = np.flatnonzero(domains == domain), np.flatnonzero(pool.domains == domain)
        if len(positions) < len(members):
            few = f"domain {pool.domain_names[domain]!r} has {len(positions)} samples for {len(members)} clients"
            raise DataError(f"partition = {settings.partition!r}: {few}; use fewer clients, or a larger total-samples")
        for client, share in zip(members, dealt_evenly(pool.labels[positions], len(members), rng), strict=True):
            shares[client] = positions[share]
    return shares


def feature_label_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """One domain per client as in `feature_shift`; within it, class c is thinned out to p_c / max p, p ~ Dir(alpha).

    So the client's most frequent class keeps all its samples, and the samples thinned out are used by nobody. Where
    only one would be left, the client gets two, of its most frequent classes.
    """
    shares = []
    for share in feature_shift(pool, settings, clients, rng):
        decks = shuffled_by_class(pool.labels[share], rng)
        wanted = rng.dirichlet(np.full(len(decks), settings.alpha))
        parts = [deck[: round(len(deck) * part)] for deck, part in zip(decks, wanted / wanted.max(), strict=True)]
        positions = np.concatenate(parts)
        if len(positions) < 2:
            positions = np.concatenate([decks[index] for index in np.argsort(-wanted, kind="stable")])[:2]
        shares.append(share[positions])
    return shares


def parse_clients_per_domain(text: str) -> list[int]:
    """``"1,4,2,2,1"`` -> the number of clients of each domain; empty for ``""``."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise DataError(f"clients-per-domain = {text!r}: must be numbers separated by commas, such as '1,4,2,2,1'")
    return [int(part) for part in parts]


def _domain_of_clients(text: str, domain_names: tuple[str, ...], clients: int) -> list[int]:
    if not (counts := parse_clients_per_domain(text)):
        return [client % len(domain_names) for client in range(clients)]
    if len(counts) != len(domain_names):
        has = f"the data have {len(domain_names)}: {', '.join(domain_names)}"
        raise DataError(f"clients-per-domain = {text!r} names {len(counts)} domains; {has}")
    if sum(counts) != clients:
        raise DataError(f"clients-per-domain = {text!r} sums to {sum(counts)} clients, but num-partitions is {clients}")
    return [domain for domain, count in enumerate(counts) for _ in range(count)]


# -- stratified dealing: labels int64 [n] of some samples -> positions into these (int64)
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
    """Training and test positions; ``train_fraction`` of every class, rounded, is for training. Needs two samples.

    A class of two samples or more has one at least on either side; a single sample is for training. Where no test
    sample would be left, the last training sample is one.
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


DIVIDE: dict[str, Callable[[Pool, DataSettings, int, Generator], Shares]] = {
    "iid": lambda pool, _, clients, rng: np.array_split(rng.permutation(len(pool.rows)), clients),
    "dirichlet": dirichlet,
    "balanced-dirichlet": balanced_dirichlet,
    "pathological": pathological,
    "n-way-k-shot": n_way_k_shot,
    "feature-shift": feature_shift,
    "label-shift": label_shift,
    "feature-label-shift": feature_label_shift,
    "natural": natural,
    "own": lambda pool, *_: [np.arange(len(pool.rows))],
}  # the legal values of ``partition``
DOMAIN_PARTITIONS = ("feature-shift", "feature-label-shift", "natural")  # the partitions that need data with domains

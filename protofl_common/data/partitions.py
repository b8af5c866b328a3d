"""The division of a data set among clients: one function for each legal value of ``partition``.

Every function takes the pool of samples, the settings, the number of clients and a random
generator, and returns for each client the positions (int64) of its share in the pool. Shares are
disjoint, but for `n_way_k_shot`.
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
    """The samples to divide."""

    rows: Ints  # int64 [n], of the data set
    labels: Ints  # int64 [n]
    domains: Ints  # int64 [n], indices into ``domain_names``
    domain_names: tuple[str, ...]
    for_training: NDArray[np.bool_] | None = None  # bool [n]; None: decided after they are dealt

    def take(self, positions: Ints) -> "Pool":
        """Only these samples, of which nothing is decided yet."""
        return Pool(
            self.rows[positions], self.labels[positions], self.domains[positions], self.domain_names
        )


def iid(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Deal the samples out at random, to each client as many."""
    return np.array_split(rng.permutation(len(pool.rows)), clients)


def own(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give the one client everything."""
    return [np.arange(len(pool.rows))]


def natural(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give client i the samples of the i-th name in the data, which must be as many."""
    names = len(pool.domain_names)
    if names != clients:
        raise DataError(
            f"partition = 'natural': the data name {names} clients, not {clients}; "
            "in simulation run that many (--clients; in a table clients), or choose feature-shift, "
            "which divides a name among several or leaves some out"
        )
    return [np.flatnonzero(pool.domains == client) for client in range(clients)]


# -- Dirichlet
def dirichlet(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Divide each class by Dir(alpha), with the class counts of Flower's ``DirichletPartitioner``.

    Each client gets at least 10 samples, or a fifth of an equal share where that is less, or 2.
    """
    size = len(pool.rows)
    least = min(10, max(2, size // (5 * clients)), size // clients)
    own_rng = np.random.default_rng(int(rng.integers(2**31)))
    return _dirichlet(pool, clients, own_rng, settings.alpha, least)


def balanced_dirichlet(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Divide each class by Dir(alpha), as PFLlib does.

    A client that has an equal share already gets no further class.
    Each client gets at least 40 samples, or half of an equal share where that is less, or 2.
    """
    size = len(pool.rows)
    least = min(40, max(2, size // (2 * clients)), size // clients)
    return _dirichlet(pool, clients, rng, settings.alpha, least, full=size / clients)


def _dirichlet(
    pool: Pool,
    clients: int,
    rng: Generator,
    alpha: float,
    least: int,
    full: float = math.inf,
) -> Shares:
    """Draw until each client has ``least`` samples.

    After `TRIES` draws in vain the richest clients fill up the poorest.
    """
    class_sizes = np.unique(pool.labels, return_counts=True)[1].tolist()
    for _ in range(TRIES):
        counts_CN, drawn_CN = _counts_drawn(class_sizes, np.full(clients, alpha), rng, full)
        if counts_CN.sum(0).min() >= least:
            break
    else:
        positive_CN = drawn_CN + TINY * rng.random(drawn_CN.shape)
        counts_CN = _filled_up(counts_CN, positive_CN, least)

    owners = np.concatenate([np.repeat(np.arange(clients), counts_N) for counts_N in counts_CN])
    # at random within a class: files are in the order of looks, patients or dates
    deck = np.concatenate(shuffled_by_class(pool.labels, rng))
    dealt = deck[np.argsort(owners, kind="stable")]
    return np.split(dealt, np.cumsum(counts_CN.sum(0))[:-1])


def _counts_drawn(
    class_sizes: list[int], alpha_N: Floats, rng: Generator, full: float
) -> tuple[Ints, Floats]:
    """Draw each client's number of samples of each class, and its proportions, both [C, N]."""
    counts = []
    drawn = []
    total_N = np.zeros(len(alpha_N), dtype=np.int64)
    for size in class_sizes:
        proportions_N = rng.dirichlet(alpha_N)
        if full < math.inf:
            proportions_N = np.maximum(proportions_N, TINY) * (total_N < full)
            proportions_N /= proportions_N.sum()
        cuts = (np.cumsum(proportions_N) * size).astype(np.int64)[:-1]
        counts_N = np.diff(cuts, prepend=0, append=size)
        counts.append(counts_N)
        drawn.append(proportions_N)
        total_N = total_N + counts_N
    return np.stack(counts), np.stack(drawn)


def _filled_up(counts_CN: Ints, drawn_CN: Floats, least: int) -> Ints:
    """Move samples to poor clients until each has ``least``.

    A poor client gets, one by one, a sample of the class that it lacks most, from the client that
    has most of it and can spare one.
    """
    counts_CN = counts_CN.copy()
    sizes_N = counts_CN.sum(0)
    spare_CN = counts_CN * (sizes_N > least)
    for poor in np.flatnonzero(sizes_N < least):
        wanted_C = least * drawn_CN[:, poor] / drawn_CN[:, poor].sum()
        for _ in range(least - sizes_N[poor]):
            lacking_most_first = np.argsort(counts_CN[:, poor] - wanted_C)
            label = next(label for label in lacking_most_first if spare_CN[label].any())
            rich = spare_CN[label].argmax()
            counts_CN[label, rich] -= 1
            counts_CN[label, poor] += 1
            sizes_N[rich] -= 1
            spare_CN[:, rich] = counts_CN[:, rich] * (sizes_N[rich] > least)
    return counts_CN


# -- a number of classes for each client
def pathological(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give each client ``classes_per_client`` classes, in random, unequal amounts.

    Each client takes the classes that the fewest clients have so far, ties at random: so all
    classes are used when clients × classes-per-client allows it. A holder's weight is uniform in
    [0.1, 1], on top of 2 samples.
    """
    decks = _decks_of_enough_classes(pool, settings, rng)
    holders: list[list[int]] = [[] for _ in decks]
    for client in range(clients):
        holder_counts = np.array([len(members) for members in holders])
        fewest_first = np.lexsort((rng.random(len(decks)), holder_counts))
        for deck_index in fewest_first[: settings.classes_per_client]:
            holders[deck_index].append(client)

    parts: list[Shares] = [[] for _ in range(clients)]
    for deck, members in zip(decks, holders, strict=True):
        if not members:
            continue
        _check_each_gets_one(pool, deck, len(members), settings)
        for client, part in zip(members, _unequal(deck, len(members), rng), strict=True):
            parts[client].append(part)
    return [np.concatenate(part) for part in parts]


def _unequal(deck: Ints, holders: int, rng: Generator) -> Shares:
    """Cut ``deck`` into parts of random size, of at least 2 samples, or 1 if they are few."""
    least = min(2, len(deck) // holders)
    weights = rng.uniform(0.1, 1, size=holders)
    fractions = np.cumsum(weights / weights.sum())
    to_share_out = len(deck) - least * holders
    cuts = np.floor(fractions * to_share_out).astype(np.int64)
    cuts += least * np.arange(1, holders + 1)
    return np.split(deck, cuts[:-1])


def pathological_in_order(
    pool: Pool, settings: DataSettings, clients: int, rng: Generator
) -> Shares:
    """Give each client ``classes_per_client`` classes at most, as PFLlib does.

    Class after class goes to the first clients that still lack one: with 20 clients and two of ten
    classes each, the first four share the classes 0 and 1. Each of them but the last draws its
    number of samples between a tenth of an equal part and an equal part. The last takes the rest.
    """
    decks = _decks_of_enough_classes(pool, settings, rng)
    holders_of_a_class = math.ceil(clients * settings.classes_per_client / len(decks))
    least_of_a_class = int(min(40, len(pool.rows) / clients / 2) / len(decks))
    lacking_N = np.full(clients, settings.classes_per_client)
    parts: list[Shares] = [[] for _ in range(clients)]
    for deck in decks:
        members = np.flatnonzero(lacking_N)[:holders_of_a_class]
        if not len(members):
            break
        _check_each_gets_one(pool, deck, len(members), settings)
        equal = len(deck) // len(members)
        least = min(max(2, equal // 10, least_of_a_class), equal)
        sizes = rng.integers(least, max(equal, least + 1), size=len(members) - 1)
        for client, part in zip(members, np.split(deck, np.cumsum(sizes)), strict=True):
            parts[client].append(part)
        lacking_N[members] -= 1
    return [np.concatenate(part) for part in parts]


def _decks_of_enough_classes(pool: Pool, settings: DataSettings, rng: Generator) -> list[Ints]:
    decks = shuffled_by_class(pool.labels, rng)
    wanted = settings.classes_per_client
    if wanted > len(decks):
        raise DataError(f"classes-per-client = {wanted}: the data have only {len(decks)} classes")
    return decks


def _check_each_gets_one(pool: Pool, deck: Ints, holders: int, settings: DataSettings) -> None:
    if len(deck) < holders:
        few = f"class {pool.labels[deck[0]]} has {len(deck)} samples for {holders} clients"
        cure = "use fewer clients or a smaller classes-per-client"
        raise DataError(f"partition = {settings.partition!r}: {few}; {cure}")


def n_way_k_shot(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give each client n random classes with k training samples each, as FedProto does.

    n is uniform in ``ways`` ± ``ways-stdev`` within 2 … number of classes; so is k (at least 1).
    When a class runs out, its samples are dealt out again from the start, so that clients come to
    share some; a client never has one twice. Samples that the pool marks for testing are dealt from
    a deck of their own, as many as ``train_fraction`` says: nobody trains on another's test
    samples.
    """
    decks = shuffled_by_class(pool.labels, rng)
    for_training = pool.for_training
    if for_training is None:
        for_training = np.ones(len(pool.rows), dtype=bool)
    training_decks = [_EndlessDeck(deck[for_training[deck]]) for deck in decks]
    test_decks = [_EndlessDeck(deck[~for_training[deck]]) for deck in decks]

    most_classes = min(len(decks), settings.ways + settings.ways_stdev)
    fewest_classes = max(min(2, len(decks)), settings.ways - settings.ways_stdev)
    fewest_classes = min(fewest_classes, most_classes)
    fewest_shots = settings.shots - settings.shots_stdev
    most_shots = settings.shots + settings.shots_stdev

    shares = []
    for _ in range(clients):
        ways = rng.integers(fewest_classes, most_classes + 1)
        classes = rng.choice(len(decks), size=ways, replace=False)
        shots = max(1, int(rng.integers(fewest_shots, most_shots + 1)))
        tests = max(1, round(shots / settings.train_fraction) - shots)
        positions: list[int] = []
        for label in classes:
            positions += training_decks[label].deal(shots)
            positions += test_decks[label].deal(tests)
        shares.append(np.array(positions, dtype=np.int64))
    return shares


class _EndlessDeck:
    """The positions of a class, dealt out again from the start when they run out."""

    def __init__(self, positions: Ints) -> None:
        self._size = len(positions)
        self._dealer = cycle(positions.tolist())

    def deal(self, count: int) -> list[int]:
        """The next ``count`` positions, or the whole deck once where it has fewer."""
        return list(islice(self._dealer, min(count, self._size)))


# -- label and feature shift
def label_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Deal equal sizes in proportions from Dir(alpha) (Hsu et al., arXiv:1909.06335).

    The last clients get what is left.
    """
    decks = shuffled_by_class(pool.labels, rng)
    left = np.array([len(deck) for deck in decks])
    shares = []
    sizes = [len(part) for part in np.array_split(pool.rows, clients)]
    for size in sizes:
        proportions = rng.dirichlet(np.full(len(decks), settings.alpha))
        counts = _drawn(proportions, left, size, rng)
        still_left = left - counts
        taken = [deck[still_left[i] : left[i]] for i, deck in enumerate(decks)]
        shares.append(np.concatenate(taken))
        left = still_left
    return shares


def _drawn(proportions: Floats, left: Ints, size: int, rng: Generator) -> Ints:
    """Draw how many samples of each class to take, of those ``left``, both [C]: ``size`` in all."""
    counts = np.zeros_like(left)
    while (missing := size - counts.sum()) > 0:
        weights = proportions * (counts < left)
        if weights.sum() < 1e-9:  # only classes are left that this client would hardly have
            weights = (left - counts).astype(np.float64)
        drawn = rng.multinomial(missing, weights / weights.sum())
        counts += np.minimum(drawn, left - counts)
    return counts


def feature_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give each client one domain: number i mod n, or by ``clients-per-domain``.

    Clients of one domain divide it evenly.
    """
    domain_of_client = np.array(
        _domain_of_clients(settings.clients_per_domain, pool.domain_names, clients)
    )
    shares = [np.empty(0, dtype=np.int64)] * clients
    for domain in np.unique(domain_of_client):
        members = np.flatnonzero(domain_of_client == domain)
        positions = np.flatnonzero(pool.domains == domain)
        if len(positions) < len(members):
            name = pool.domain_names[domain]
            few = f"domain {name!r} has {len(positions)} samples for {len(members)} clients"
            cure = "use fewer clients, or a larger total-samples"
            raise DataError(f"partition = {settings.partition!r}: {few}; {cure}")
        dealt = dealt_evenly(pool.labels[positions], len(members), rng)
        for client, share in zip(members, dealt, strict=True):
            shares[client] = positions[share]
    return shares


def feature_label_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give each client one domain as in `feature_shift`, and its own class proportions.

    Class c is thinned out to p_c / max p, with p ~ Dir(alpha). So the client's most frequent class
    keeps all its samples, and the samples thinned out are used by nobody. Where only one would be
    left, the client gets two, of its most frequent classes.
    """
    shares = []
    for share in feature_shift(pool, settings, clients, rng):
        decks = shuffled_by_class(pool.labels[share], rng)
        proportions = rng.dirichlet(np.full(len(decks), settings.alpha))
        fractions = proportions / proportions.max()
        thinned = [deck[: round(len(deck) * fractions[i])] for i, deck in enumerate(decks)]
        positions = np.concatenate(thinned)
        if len(positions) < 2:
            frequent_first = np.argsort(-proportions, kind="stable")
            positions = np.concatenate([decks[index] for index in frequent_first])[:2]
        shares.append(share[positions])
    return shares


def parse_clients_per_domain(text: str) -> list[int]:
    """``"1,4,2,2,1"`` -> the number of clients of each domain; empty for ``""``."""
    if not text:
        return []
    counts = [count.strip() for count in text.split(",")]
    if not all(count.isdecimal() for count in counts):
        wanted = "must be numbers separated by commas, such as '1,4,2,2,1'"
        raise DataError(f"clients-per-domain = {text!r}: {wanted}")
    return [int(count) for count in counts]


def _domain_of_clients(text: str, domain_names: tuple[str, ...], clients: int) -> list[int]:
    """The domain of each client, as an index into ``domain_names``."""
    counts = parse_clients_per_domain(text)
    if not counts:
        return [client % len(domain_names) for client in range(clients)]
    if len(counts) != len(domain_names):
        has = f"the data have {len(domain_names)}: {', '.join(domain_names)}"
        raise DataError(f"clients-per-domain = {text!r} names {len(counts)} domains; {has}")
    if sum(counts) != clients:
        raise DataError(
            f"clients-per-domain = {text!r} sums to {sum(counts)} clients, "
            f"but num-partitions is {clients}"
        )
    return np.repeat(np.arange(len(counts)), counts).tolist()


# -- stratified dealing: labels int64 [n] of some samples -> positions into these (int64)
def shuffled_by_class(labels: Ints, rng: Generator) -> list[Ints]:
    """The positions of each class that occurs, shuffled; classes in the order of their labels."""
    shuffled = rng.permutation(len(labels))
    deck = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return np.split(deck, np.flatnonzero(np.diff(labels[deck])) + 1) if len(deck) else []


def dealt_evenly(labels: Ints, clients: int, rng: Generator) -> Shares:
    """Shares of (nearly) equal size and equal class proportions; needs a sample at least."""
    deck = np.concatenate(shuffled_by_class(labels, rng))
    return [deck[client::clients] for client in range(clients)]


def split(labels: Ints, train_fraction: float, rng: Generator) -> tuple[Ints, Ints]:
    """Training and test positions: ``train_fraction`` of every class, rounded, is for training.

    There must be two samples. A class of two samples or more has one at least on either side; a
    single sample is for training. Where no test sample would be left, the last training sample is
    one.
    """
    train = []
    test = []
    for positions in shuffled_by_class(labels, rng):
        count = len(positions)
        cut = min(max(round(train_fraction * count), 1), max(count - 1, 1))
        train.append(positions[:cut])
        test.append(positions[cut:])
    for_training = np.concatenate(train)
    for_testing = np.concatenate(test)
    if not len(for_testing):
        return for_training[:-1], for_training[-1:]
    return for_training, for_testing


def set_aside(labels: Ints, fraction: float, rng: Generator) -> tuple[Ints, Ints]:
    """Positions that stay, and those that go: about ``fraction`` of each class.

    Both are in rising order. One sample of each class stays.
    """
    decks = shuffled_by_class(labels, rng)
    spare = np.sort(np.concatenate([positions[1:] for positions in decks]))
    wanted = min(round(fraction * len(labels)), len(spare))
    aside = spare[:0]
    if wanted:
        aside = spare[proportional(labels[spare], wanted, rng)[0]]
    return np.setdiff1d(np.arange(len(labels)), aside), aside


def balanced(labels: Ints, limit: int, rng: Generator) -> tuple[Ints, Ints]:
    """At most ``limit`` positions (0: all), of every class as many, and those left over."""
    turns = np.empty(len(labels))
    for positions in shuffled_by_class(labels, rng):
        turns[positions] = np.arange(len(positions))
    return _first(turns, limit, rng)


def proportional(labels: Ints, limit: int, rng: Generator) -> tuple[Ints, Ints]:
    """At most ``limit`` positions (0: all), in about the class proportions, and those left over."""
    turns = np.empty(len(labels))
    for positions in shuffled_by_class(labels, rng):
        turns[positions] = (np.arange(len(positions)) + rng.random()) / len(positions)
    return _first(turns, limit, rng)


def _first(turns: Floats, limit: int, rng: Generator) -> tuple[Ints, Ints]:
    """The ``limit`` positions whose turn is first (0: all), ties at random, and the others.

    Both are in rising order.
    """
    lots = rng.random(len(turns))
    if limit == 0 or limit >= len(turns):
        return np.arange(len(turns)), np.arange(0)

    last_turn = np.partition(turns, limit - 1)[limit - 1]
    is_chosen = turns < last_turn
    tied = np.flatnonzero(turns == last_turn)
    tied_by_lot = tied[np.argsort(lots[tied], kind="stable")]
    is_chosen[tied_by_lot[: limit - is_chosen.sum()]] = True
    return np.flatnonzero(is_chosen), np.flatnonzero(~is_chosen)


DIVIDE: dict[str, Callable[[Pool, DataSettings, int, Generator], Shares]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "balanced-dirichlet": balanced_dirichlet,
    "pathological": pathological,
    "pathological-in-order": pathological_in_order,
    "n-way-k-shot": n_way_k_shot,
    "feature-shift": feature_shift,
    "label-shift": label_shift,
    "feature-label-shift": feature_label_shift,
    "natural": natural,
    "own": own,
}
"""The legal values of ``partition``."""

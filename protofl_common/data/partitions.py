"""The division of a data set among clients: one function for each legal value of ``partition``.

Every function takes the pool of samples, the settings, the number of clients and a random
generator, and returns for each client the positions (int64) of its share in the pool. Shares are
disjoint, but for `n_way_k_shot`. A *deck* is an array of positions in the order in which they are
dealt, as cards are.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.data.raw import Bools, DataError, Floats, Ints

Generator = np.random.Generator
Shares = list[Ints]  # positions in the pool of each client's samples
TRIES = 220  # draws of Dirichlet partitions, before the richest clients fill up the poorest
PFLLIB_SAMPLES = 40  # PFLlib's least for a client: then a quarter, for tests, is its batch of 10
TINY = 1e-300  # stands for a proportion of 0 where their sum divides; too small to change others


@dataclass(frozen=True)
class Pool:
    """The samples to divide."""

    rows: Ints  # int64 [n], of the data set
    labels: Ints  # int64 [n]
    domains: Ints  # int64 [n], indices into ``domain_names``
    domain_names: tuple[str, ...]
    for_training: Bools | None = None  # bool [n]; None: decided after they are dealt

    @property
    def may_train(self) -> Bools:
        """Which samples are for training, bool [n]; all if that is not decided yet."""
        if self.for_training is None:
            return np.ones(len(self.rows), dtype=bool)
        return self.for_training

    def take(self, positions: Ints) -> "Pool":
        """Return a pool of these samples alone, with ``for_training`` still undecided."""
        return Pool(
            self.rows[positions], self.labels[positions], self.domains[positions], self.domain_names
        )


def iid(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Deal the samples out at random, to each client equally many, or one more."""
    return np.array_split(rng.permutation(len(pool.rows)), clients)


def own(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give the one client everything."""
    return [np.arange(len(pool.rows))]


def natural(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give client i the samples of the i-th client, or domain, that the data name.

    DataError if the run has not as many clients as the data name.
    """
    named = len(pool.domain_names)
    if named != clients:
        raise DataError(
            f"partition = 'natural': the data name {named} clients, not {clients}; "
            "in simulation run that many (--clients; in a table clients), or choose feature-shift, "
            "which divides a name among several or leaves some out"
        )
    return [np.flatnonzero(pool.domains == client) for client in range(clients)]


# -- Dirichlet
def dirichlet(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Divide each class by Dir(alpha), with the class counts of Flower's ``DirichletPartitioner``.

    Each client gets at least 10 samples. Where a fifth of an equal share is less, that is enough,
    but never fewer than 2 if there are 2 for each.
    """
    equal_share = len(pool.rows) // clients
    min_samples = min(10, max(2, equal_share // 5), equal_share)
    # Flower's partitioner takes a seed: with this one it draws the same counts
    seeded_rng = np.random.default_rng(int(rng.integers(2**31)))
    return _dirichlet(pool, clients, seeded_rng, settings.alpha, min_samples)


def balanced_dirichlet(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Divide each class by Dir(alpha), as PFLlib does.

    A client that has an equal share already gets no further class. Each client gets at least 40
    samples (`PFLLIB_SAMPLES`). Where half of an equal share is less, that is enough, but never
    fewer than 2 if there are 2 for each.
    """
    size = len(pool.rows)
    min_samples = min(PFLLIB_SAMPLES, max(2, size // (2 * clients)), size // clients)
    return _dirichlet(pool, clients, rng, settings.alpha, min_samples, full=size / clients)


def _dirichlet(
    pool: Pool,
    clients: int,
    rng: Generator,
    alpha: float,
    min_samples: int,
    full: float = math.inf,
) -> Shares:
    """Divide each class (C) among the clients (N) in proportions from Dir(alpha).

    Draw anew until each client has ``min_samples``; after `TRIES` draws in vain samples of the
    richest clients go to the poorest. The classes are dealt one after another: a client that has
    ``full`` samples by then gets none of the classes that remain.
    """
    _, class_sizes = np.unique(pool.labels, return_counts=True)
    for _ in range(TRIES):
        counts_CN, drawn_CN = _counts_drawn(
            class_sizes.tolist(), np.full(clients, alpha), rng, full
        )
        if counts_CN.sum(0).min() >= min_samples:
            break
    else:  # no draw gave each client enough: mend the last one
        # for a client whose proportions are all 0, tiny random ones stand in: any class may fill
        # it up, and their sum divides
        positive_CN = drawn_CN + TINY * rng.random(drawn_CN.shape)
        counts_CN = _filled_up(counts_CN, positive_CN, min_samples)

    # at random within a class: files are in the order of looks, patients or dates
    deck = np.concatenate(shuffled_by_class(pool.labels, rng))
    # who gets each card of the deck, which has the classes one after the other
    clients_by_class = np.tile(np.arange(clients), len(counts_CN))
    clients_of_deck = np.repeat(clients_by_class, counts_CN.ravel())
    deck_by_client = deck[np.argsort(clients_of_deck, kind="stable")]
    ends_N = np.cumsum(counts_CN.sum(0))
    return np.split(deck_by_client, ends_N[:-1])


def _counts_drawn(
    class_sizes: list[int], alpha_N: Floats, rng: Generator, full: float
) -> tuple[Ints, Floats]:
    """Draw each client's number of samples of each class, and its proportions, both [C, N].

    ``class_sizes`` has the C classes' numbers of samples, ``alpha_N`` the parameters of Dir. The
    classes are drawn one after another, and a client that has ``full`` samples by then gets none of
    the later classes. ``full`` is a client's equal share of all samples, so that one client is
    always below it, or infinite.
    """
    counts = []
    proportions = []
    total_N = np.zeros(len(alpha_N), dtype=np.int64)
    for size in class_sizes:
        proportions_N = rng.dirichlet(alpha_N)
        if full < math.inf:
            # at least TINY: those that are not full may all have drawn 0, and their sum divides
            proportions_N = np.maximum(proportions_N, TINY) * (total_N < full)
            proportions_N /= proportions_N.sum()
        # the first client gets the samples before the first cut, the last those after the last
        cuts = (np.cumsum(proportions_N) * size).astype(np.int64)[:-1]
        counts_N = np.diff(cuts, prepend=0, append=size)
        counts.append(counts_N)
        proportions.append(proportions_N)
        total_N = total_N + counts_N
    return np.stack(counts), np.stack(proportions)


def _filled_up(counts_CN: Ints, drawn_CN: Floats, min_samples: int) -> Ints:
    """Return the numbers of samples [C, N] after some have moved to clients below ``min_samples``.

    A poor client gets, one by one, a sample of the class that it lacks most, from the client that
    has most of it and keeps ``min_samples`` itself. What it lacks follows from the proportions
    ``drawn_CN`` that were drawn for it, at ``min_samples`` in all.
    """
    counts_CN = counts_CN.copy()
    sizes_N = counts_CN.sum(0)
    spare_CN = counts_CN * (sizes_N > min_samples)  # of clients that can give a sample away
    for poor in np.flatnonzero(sizes_N < min_samples):
        wanted_C = min_samples * drawn_CN[:, poor] / drawn_CN[:, poor].sum()
        for _ in range(min_samples - sizes_N[poor]):
            lacking_most_first = np.argsort(counts_CN[:, poor] - wanted_C)
            label = next(label for label in lacking_most_first if spare_CN[label].any())
            rich = spare_CN[label].argmax()
            counts_CN[label, rich] -= 1
            counts_CN[label, poor] += 1
            sizes_N[rich] -= 1
            spare_CN[:, rich] = counts_CN[:, rich] * (sizes_N[rich] > min_samples)
    return counts_CN


# -- a number of classes for each client
def pathological(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give each client ``classes_per_client`` classes, in random, unequal amounts.

    Each client takes the classes that the fewest clients have so far, ties at random: so all
    classes are used when clients × classes-per-client allows it. The clients that hold a class
    divide it into parts of random size.
    """
    decks = _decks_of_enough_classes(pool, settings, rng)
    holders: list[list[int]] = [[] for _ in decks]
    for client in range(clients):
        holder_counts = np.array([len(members) for members in holders])
        ties = rng.random(len(decks))
        fewest_first = np.lexsort((ties, holder_counts))  # by the last of these, then by ties
        for deck_index in fewest_first[: settings.classes_per_client]:
            holders[deck_index].append(client)

    def cuts(size: int, number: int) -> Ints:
        """Each part has 2 samples, or 1 if they are too few for that.

        What is left is divided in proportion to weights, uniform in [0.1, 1].
        """
        min_samples = min(2, size // number)
        to_share_out = size - min_samples * number
        weights = rng.uniform(0.1, 1, size=number)
        fractions = np.cumsum(weights / weights.sum())
        # the i-th part ends after the i fixed amounts and the weighted ones of all parts up to it
        ends: Ints = np.floor(fractions * to_share_out).astype(np.int64)
        ends += min_samples * np.arange(1, number + 1)
        return ends[:-1]

    return _cut_among(holders, decks, clients, cuts, pool, settings)


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
    # PFLlib's least of a class: its least for a client over the number of classes
    pfllib_min = int(min(PFLLIB_SAMPLES, len(pool.rows) / clients / 2) / len(decks))
    lacking_N = np.full(clients, settings.classes_per_client)  # classes that each client lacks yet
    holders = []
    for _ in decks:
        members = np.flatnonzero(lacking_N)[:holders_of_a_class]
        holders.append(members.tolist())
        lacking_N[members] -= 1

    def cuts(size: int, number: int) -> Ints:
        equal = size // number
        min_samples = min(max(2, equal // 10, pfllib_min), equal)
        bound = max(equal, min_samples + 1)  # which a draw stays below
        sizes = rng.integers(min_samples, bound, size=number - 1)
        return np.cumsum(sizes)

    return _cut_among(holders, decks, clients, cuts, pool, settings)


def _decks_of_enough_classes(pool: Pool, settings: DataSettings, rng: Generator) -> list[Ints]:
    decks = shuffled_by_class(pool.labels, rng)
    wanted = settings.classes_per_client
    if wanted > len(decks):
        raise DataError(f"classes-per-client = {wanted}: the data have only {len(decks)} classes")
    return decks


def _cut_among(
    holders: Sequence[Sequence[int]],
    decks: Shares,
    clients: int,
    cuts: Callable[[int, int], Ints],
    pool: Pool,
    settings: DataSettings,
) -> Shares:
    """Cut each class's deck among the clients that hold the class; return all clients' shares.

    ``cuts`` says where a deck is cut, from its size and the number of parts. DataError for a
    class with fewer samples than holders.
    """
    parts: list[Shares] = [[] for _ in range(clients)]
    for deck, members in zip(decks, holders, strict=True):
        if not members:
            continue
        if len(deck) < len(members):
            raise DataError(
                f"partition = {settings.partition!r}: "
                f"class {pool.labels[deck[0]]} has {len(deck)} samples for {len(members)} clients; "
                "use fewer clients or a smaller classes-per-client"
            )
        dealt = np.split(deck, cuts(len(deck), len(members)))
        for client, part in zip(members, dealt, strict=True):
            parts[client].append(part)
    return [np.concatenate(part) for part in parts]


def n_way_k_shot(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give each client n random classes with k training samples each, as FedProto does.

    n is uniform in ``ways`` ± ``ways-stdev``, but from 2 to the number of classes; k is uniform in
    ``shots`` ± ``shots-stdev``, but at least 1. When all samples of a class have been dealt, they
    are dealt again from the start, so that clients come to share some; a client never has one
    twice. Samples that the pool marks for testing are dealt from a deck of their own, so nobody
    trains on another's test samples. Of each class a client gets so many of these that its k
    training samples are the part ``train-fraction`` of all.
    """
    decks = shuffled_by_class(pool.labels, rng)
    may_train = pool.may_train
    training_decks = [deque(deck[may_train[deck]]) for deck in decks]
    test_decks = [deque(deck[~may_train[deck]]) for deck in decks]

    most_classes = min(settings.ways + settings.ways_stdev, len(decks))
    fewest_classes = min(max(2, settings.ways - settings.ways_stdev), most_classes)
    fewest_shots = settings.shots - settings.shots_stdev
    most_shots = settings.shots + settings.shots_stdev

    shares = []
    for _ in range(clients):
        ways = rng.integers(fewest_classes, most_classes + 1)  # + 1: a draw stays below the bound
        classes = rng.choice(len(decks), size=ways, replace=False)
        shots = max(1, int(rng.integers(fewest_shots, most_shots + 1)))
        tests = max(1, round(shots / settings.train_fraction) - shots)
        positions: list[int] = []
        for label in classes:
            positions += _dealt_round(training_decks[label], shots)
            positions += _dealt_round(test_decks[label], tests)
        shares.append(np.array(positions, dtype=np.int64))
    return shares


def _dealt_round(deck: deque[int], count: int) -> list[int]:
    """Return the next ``count`` positions, or each once if there are fewer; they go to the end."""
    dealt = list(islice(deck, count))
    deck.rotate(-len(dealt))
    return dealt


# -- label and feature shift
def label_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give each client equally many samples, of class proportions drawn from Dir(alpha).

    Source: Hsu et al., arXiv:1909.06335. The last clients get what the others have left.
    """
    decks = shuffled_by_class(pool.labels, rng)
    left_C = np.array([len(deck) for deck in decks])  # samples that nobody has yet
    shares = []
    sizes = [len(part) for part in np.array_split(pool.rows, clients)]
    for size in sizes:
        proportions_C = rng.dirichlet(np.full(len(decks), settings.alpha))
        counts_C = _drawn(proportions_C, left_C, size, rng)
        still_left_C = left_C - counts_C
        # a deck is dealt from its end
        taken = [deck[still_left_C[i] : left_C[i]] for i, deck in enumerate(decks)]
        shares.append(np.concatenate(taken))
        left_C = still_left_C
    return shares


def _drawn(proportions_C: Floats, left_C: Ints, size: int, rng: Generator) -> Ints:
    """Draw how many samples of each class a client gets, [C]: ``size`` in all.

    ``left_C`` are the samples of each class that nobody has yet. What a class cannot give is drawn
    again from the classes that still have samples.
    """
    counts_C = np.zeros_like(left_C)
    while (missing := size - counts_C.sum()) > 0:
        has_more_C = counts_C < left_C
        weights_C = proportions_C * has_more_C
        if weights_C.sum() < 1e-9:  # only classes are left that this client would hardly have
            weights_C = (left_C - counts_C).astype(np.float64)
        drawn_C = rng.multinomial(missing, weights_C / weights_C.sum())
        counts_C += np.minimum(drawn_C, left_C - counts_C)
    return counts_C


def feature_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give each client samples of one domain; clients of the same domain divide it evenly.

    Of n domains client i has number i mod n, or the one that ``clients-per-domain`` says. DataError
    for a domain with fewer samples than clients.
    """
    domain_of_client = _domain_of_clients(settings.clients_per_domain, pool.domain_names, clients)
    shares = [np.empty(0, dtype=np.int64)] * clients
    for domain in np.unique(domain_of_client):
        members = np.flatnonzero(domain_of_client == domain)
        positions = np.flatnonzero(pool.domains == domain)
        if len(positions) < len(members):
            name = pool.domain_names[domain]
            raise DataError(
                f"partition = {settings.partition!r}: "
                f"domain {name!r} has {len(positions)} samples for {len(members)} clients; "
                "use fewer clients, or a larger total-samples"
            )
        parts = dealt_evenly(pool.labels[positions], len(members), rng)
        for client, part in zip(members, parts, strict=True):
            shares[client] = positions[part]
    return shares


def feature_label_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Give each client one domain as in `feature_shift`, and its own class proportions.

    With p ~ Dir(alpha) the client keeps the part p_c / max p of the samples of class c, so all of
    the class with the largest p; nobody uses the others. A client that would keep fewer than two
    samples, one for training and one for testing, gets two of the classes with the largest p.
    """
    shares = []
    for share in feature_shift(pool, settings, clients, rng):
        decks = shuffled_by_class(pool.labels[share], rng)
        proportions = rng.dirichlet(np.full(len(decks), settings.alpha))
        fractions = proportions / proportions.max()
        thinned = [deck[: round(len(deck) * fractions[i])] for i, deck in enumerate(decks)]
        positions = np.concatenate(thinned)
        if len(positions) < 2:
            largest_first = np.argsort(-proportions, kind="stable")
            positions = np.concatenate([decks[index] for index in largest_first])[:2]
        shares.append(share[positions])
    return shares


def parse_clients_per_domain(text: str) -> list[int]:
    """Read ``clients-per-domain``, such as ``"1,4,2,2,1"``: a number for each domain; [] for "".

    DataError for anything else.
    """
    if not text:
        return []
    counts = [count.strip() for count in text.split(",")]
    if not all(count.isdecimal() for count in counts):
        raise DataError(
            f"clients-per-domain = {text!r}: "
            "must be numbers separated by commas, such as '1,4,2,2,1'"
        )
    return [int(count) for count in counts]


def _domain_of_clients(text: str, domain_names: tuple[str, ...], clients: int) -> Ints:
    """Return the domain of each client, as an index into ``domain_names``.

    ``text`` is the setting ``clients-per-domain``. If it is "", the clients have the domains in
    turn; otherwise the first clients have the first domain, and so on. DataError if its numbers are
    not one for each domain, or do not sum to the number of clients.
    """
    counts = parse_clients_per_domain(text)
    if not counts:
        return np.arange(clients) % len(domain_names)
    if len(counts) != len(domain_names):
        raise DataError(
            f"clients-per-domain = {text!r} names {len(counts)} domains; "
            f"the data have {len(domain_names)}: {', '.join(domain_names)}"
        )
    if sum(counts) != clients:
        raise DataError(
            f"clients-per-domain = {text!r} sums to {sum(counts)} clients, "
            f"but num-partitions is {clients}"
        )
    return np.repeat(np.arange(len(counts)), counts)


# -- stratified dealing: labels int64 [n] of some samples -> positions into these (int64)
def shuffled_by_class(labels: Ints, rng: Generator) -> list[Ints]:
    """Return a shuffled deck of positions for each class that occurs, in the order of labels."""
    shuffled = rng.permutation(len(labels))
    deck = shuffled[np.argsort(labels[shuffled], kind="stable")]
    if not len(deck):
        return []
    starts = np.flatnonzero(np.diff(labels[deck])) + 1  # of each class but the first
    return np.split(deck, starts)


def dealt_evenly(labels: Ints, clients: int, rng: Generator) -> Shares:
    """Return shares of nearly equal size and class proportions; there must be a sample."""
    deck = np.concatenate(shuffled_by_class(labels, rng))
    return [deck[client::clients] for client in range(clients)]


def split(labels: Ints, train_fraction: float, rng: Generator) -> tuple[Ints, Ints]:
    """Split samples for training and for testing; return the positions of both.

    ``train_fraction`` of each class, rounded, is for training. A class of two samples or more has
    at least one on either side; a single sample is for training. If no test sample would be left,
    the last training sample becomes one; so there must be two samples.
    """
    train = []
    test = []
    for positions in shuffled_by_class(labels, rng):
        count = len(positions)
        most_for_training = max(count - 1, 1)
        cut = min(max(round(train_fraction * count), 1), most_for_training)
        train.append(positions[:cut])
        test.append(positions[cut:])
    for_training = np.concatenate(train)
    for_testing = np.concatenate(test)
    if not len(for_testing):
        return for_training[:-1], for_training[-1:]
    return for_training, for_testing


def set_aside(labels: Ints, fraction: float, rng: Generator) -> tuple[Ints, Ints]:
    """Set about ``fraction`` of each class aside; return the positions that stay, and those aside.

    Both are in rising order. At least one sample of each class stays.
    """
    decks = shuffled_by_class(labels, rng)
    # the first of each class stays
    spare = np.sort(np.concatenate([positions[1:] for positions in decks]))
    wanted = min(round(fraction * len(labels)), len(spare))
    aside = spare[:0]
    if wanted:  # a limit of 0 would choose all
        aside = spare[proportional(labels[spare], wanted, rng)]
    stay = np.setdiff1d(np.arange(len(labels)), aside)
    return stay, aside


def balanced(labels: Ints, limit: int, rng: Generator) -> Ints:
    """Choose at most ``limit`` samples (0: all), of each class equally many where it has them.

    Return their positions in rising order. A class's n-th sample has turn n, and lower turns are
    chosen first.
    """
    turns = np.empty(len(labels))
    for positions in shuffled_by_class(labels, rng):
        turns[positions] = np.arange(len(positions))
    return _first(turns, limit, rng)


def proportional(labels: Ints, limit: int, rng: Generator) -> Ints:
    """Choose at most ``limit`` samples (0: all), in about the proportions of the classes.

    Return their positions in rising order. The turns of a class are spread evenly over [0, 1), from
    a random start, and lower turns are chosen first.
    """
    turns = np.empty(len(labels))
    for positions in shuffled_by_class(labels, rng):
        turns[positions] = (np.arange(len(positions)) + rng.random()) / len(positions)
    return _first(turns, limit, rng)


def _first(turns: Floats, limit: int, rng: Generator) -> Ints:
    """Return the ``limit`` positions of the lowest turns (0: all), in rising order.

    Of positions with the same turn, those with the lowest lots are chosen.
    """
    lots = rng.random(len(turns))
    if limit == 0:
        return np.arange(len(turns))
    return np.sort(np.lexsort((lots, turns))[:limit])  # by turn, then by lot


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

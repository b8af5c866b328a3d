"""From a data set to each client's training and test samples; the result is cached beside the data.

Steps: choose the pool (``test-from``, ``total-samples``), divide it (``partition``), split and cap each share, set a
validation part aside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.options import key_of, keys_affecting
from protofl_common.config.sections import DataSettings
from protofl_common.datasets.partitions import DIVIDE, DOMAIN_PARTITIONS
from protofl_common.datasets.pool import Pool
from protofl_common.datasets.raw import VALIDATION, DataError, Ints
from protofl_common.datasets.shares import balanced, proportional, set_aside, split
from protofl_common.datasets.store import StoredData, cache_root, digest, locked
from protofl_common.files import replacing
from protofl_common.seeding import derive_seed

FORMAT = 3
"""Raised whenever the same settings come to mean another division."""


@dataclass(frozen=True)
class Share:
    """One client's rows of the data set, int64 [n], in rising order."""

    train: Ints
    test: Ints
    validation: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


PARTS = ("train", "test", "validation")
UNSHAPED = ("iid", "feature-shift", "own")
"""Partitions that give clients no class proportions of their own: ``train-samples`` balances the classes."""
COMMON = ("official", "official-all")
"""Values of ``test-from`` by which clients are tested on samples that are in nobody's share, official ones."""
DEALT_AGAIN = ("n-way-k-shot",)
"""Partitions in which clients may share samples: split into training and test samples before they are dealt out."""

Finish = Callable[[StoredData, Ints, "DataSettings", np.random.Generator], Share]
"""(data, a client's rows, settings, its generator) -> its training and test rows."""


def client_share(
    data: StoredData, settings: DataSettings, *, seed: int, client: int, clients: int, domain: str = ""
) -> Share:
    """The rows of client ``client`` of ``clients``, as `placed`; ``domain`` is what the client says of itself.

    Raises
    ------
    DataError
        When the data cannot be divided like this.
    """
    if clients < 1:
        raise DataError(f"num-partitions = {clients}: must say among how many clients the data are divided")
    if not 0 <= client < clients:
        raise DataError(f"partition-id = {client}: must be from 0 to num-partitions - 1 = {clients - 1}")
    of_the_result = keys_affecting(type(settings), "result")  # the data's own key stands in the file's name
    shaping = {name: value for name, value in asdict(settings).items() if key_of(name) in of_the_result}
    key = digest(FORMAT, seed, clients, domain, shaping)
    file = cache_root(settings) / f"{data.key}-division-{key}.npy"
    share = _opened(file, client)
    if share is None:
        with locked(cache_root(settings) / data.key):
            if _opened(file, client) is None:
                _write(file, divide(data, settings, seed=seed, clients=clients, domain=domain))
        share = _opened(file, client)
    if share is None:
        raise DataError(f"cache-dir: {file} cannot be read back after writing it; is the disk full?")
    return share


def placed(settings: DataSettings, client: int, clients: int, domain: str) -> tuple[int, int]:
    """Client and number of clients; one that is alone (``own``, or a domain it names) is 0 of 1, whoever it is."""
    return (0, 1) if settings.partition == "own" or domain else (client, clients)


def divide(data: StoredData, settings: DataSettings, *, seed: int, clients: int, domain: str = "") -> list[Share]:
    """Every client's share; the settings have passed `check_data_settings`.

    All randomness comes from ``seed``, one stream for each purpose and client.
    """
    pool = _pool(data, settings, seed)
    if domain:
        pool, settings = _only(pool, settings, domain), replace(settings, clients_per_domain="")
    _check_given(data, pool, settings)
    least = 1 if settings.test_from in COMMON else 2
    if len(pool.rows) < least * clients:
        raise DataError(_too_few(f"{len(pool.rows)} samples are too few for {clients} clients", settings))
    for_testing = np.zeros(0, np.int64)
    if settings.test_from == "balanced":
        of_split = np.random.default_rng(derive_seed(seed, "split", domain))
        (pool, for_testing), least = _held_back(data, pool, settings, of_split), 1
    if settings.partition in DEALT_AGAIN:  # a sample marked for validation is no shot
        pool = pool.take(np.flatnonzero(np.asarray(data.official)[pool.rows] != VALIDATION))
    if settings.partition in DEALT_AGAIN and settings.test_from == "split":
        for_training = np.zeros(len(pool.rows), dtype=bool)
        of_split = np.random.default_rng(derive_seed(seed, "split", domain))
        for_training[split(pool.labels, settings.train_fraction, of_split)[0]] = True
        pool = replace(pool, for_training=for_training)
    if settings.test_from == "official-own":
        pool = replace(pool, for_training=np.asarray(data.official)[pool.rows] == 0)
    rng = np.random.default_rng(derive_seed(seed, "partition", settings.partition, domain))
    positions = DIVIDE[settings.partition](pool, settings, clients, rng)
    marked = np.asarray(data.official)[pool.rows] == VALIDATION
    for client, share in enumerate(positions):
        if (many := len(share) - np.count_nonzero(marked[share])) < least:
            raise DataError(_too_few(f"client {client} of {clients} would have {many} samples", settings))
    finish, found = _finisher(data, pool, for_testing, settings, seed), []
    for client, share in enumerate(positions):
        drawing = np.random.default_rng(derive_seed(seed, "share", client, domain))
        one = finish(data, pool.rows[share[~marked[share]]], settings, drawing)
        aside = np.random.default_rng(derive_seed(seed, "validation", client, domain))
        found.append(_with_validation(one, pool.rows[share[marked[share]]], data, settings, aside))
    return found


def _with_validation(
    share: Share, marked: Ints, data: StoredData, settings: DataSettings, rng: np.random.Generator
) -> Share:
    """What the data mark for validation (``marked``: in the client's share), else ``validation-fraction`` of training.

    Where the official test part is common to the clients, or they may share samples, so is the marked validation part.
    """
    labels, official = np.asarray(data.labels), np.asarray(data.official)
    if (official == VALIDATION).any():
        if settings.test_from in COMMON or settings.partition in DEALT_AGAIN:
            marked = np.flatnonzero(official == VALIDATION)
            if settings.test_from != "official-all":
                marked = marked[np.isin(labels[marked], labels[share.train])]
        return replace(share, validation=np.sort(marked))
    if not settings.validation_fraction:
        return share
    stay, aside = set_aside(labels[share.train], settings.validation_fraction, rng)
    return replace(share, train=share.train[stay], validation=share.train[aside])


def _pool(data: StoredData, settings: DataSettings, seed: int) -> Pool:
    """What is divided: all samples, or the official training part; ``total-samples`` of them, drawn at random."""
    rows = np.arange(len(data.labels))
    if settings.test_from in COMMON:
        rows = np.flatnonzero(data.official == 0)
    if settings.total_samples > len(rows):
        raise DataError(f"total-samples = {settings.total_samples}: there are only {len(rows)}; use at most that, or 0")
    if settings.total_samples:
        rng = np.random.default_rng(derive_seed(seed, "total-samples"))
        rows = np.sort(rng.choice(rows, size=settings.total_samples, replace=False))
    return Pool(rows, np.asarray(data.labels)[rows], np.asarray(data.domains)[rows], data.domain_names)


def _check_given(data: StoredData, pool: Pool, settings: DataSettings) -> None:
    """DataError where the settings ask for domains, or a test part, that a user's data do not have."""
    if settings.partition in DOMAIN_PARTITIONS and not pool.domain_names:
        raise DataError(
            f"partition = {settings.partition!r}: the data name no clients or domains; give them a column 'client', or "
            "choose another partition"
        )
    if settings.test_from.startswith("official") and not (data.official == 1).any():
        raise DataError(f"test-from = {settings.test_from!r}: the data mark no test samples; use 'split' or 'balanced'")


def _held_back(data: StoredData, pool: Pool, settings: DataSettings, rng: np.random.Generator) -> tuple[Pool, Ints]:
    """What is divided, ``train-fraction`` of every class of every domain, and the rows on which nobody trains.

    A class has a sample to train on in every domain that it occurs in, and where it has two, one to test on.
    """
    free = np.flatnonzero(np.asarray(data.official)[pool.rows] != VALIDATION)
    groups = pool.domains[free] * len(data.classes) + pool.labels[free]
    tested = split(groups, settings.train_fraction, rng)[1]
    stay = np.setdiff1d(np.arange(len(pool.rows)), free[tested])
    return pool.take(stay), np.sort(pool.rows[free[tested]])


def _only(pool: Pool, settings: DataSettings, domain: str) -> Pool:
    """The pool's samples of the domain that a client says it has."""
    allowed = ("own", *DOMAIN_PARTITIONS)
    if settings.partition not in allowed:
        raise DataError(f"domain = {domain!r}: has no meaning with partition {settings.partition!r}, only {allowed}")
    if domain not in pool.domain_names:
        known = ", ".join(pool.domain_names) or "none"
        raise DataError(f"domain = {domain!r}: dataset {settings.dataset!r} has no such domain; its domains: {known}")
    return pool.only(domain)


def _finisher(data: StoredData, pool: Pool, for_testing: Ints, settings: DataSettings, seed: int) -> Finish:
    """What ``test-from`` makes of a client's rows: which are for training, and what is for testing."""
    if settings.test_from == "balanced":
        return partial(_with_balanced_test, for_testing)
    if settings.test_from == "official-all":
        return partial(_with_common_test, _common_test(data, settings, seed))
    if pool.for_training is not None:
        known = np.zeros(len(data.labels), dtype=bool)
        known[pool.rows[pool.for_training]] = True
        return partial(_split_before, known)
    return _split if settings.test_from == "split" else partial(_with_official_test, {})


def _split(data: StoredData, rows: Ints, settings: DataSettings, rng: np.random.Generator) -> Share:
    """Split by ``train-fraction``; training samples beyond ``train-samples`` are used for testing."""
    labels = np.asarray(data.labels)[rows]
    train, test = split(labels, settings.train_fraction, rng)
    kept, surplus = _capped(labels[train], settings, rng)
    test = np.concatenate([test, train[surplus]])
    test = test[proportional(labels[test], settings.test_samples, rng)[0]]
    return Share(np.sort(rows[train[kept]]), np.sort(rows[test]))


def _split_before(
    for_training: NDArray[np.bool_], data: StoredData, rows: Ints, settings: DataSettings, rng: np.random.Generator
) -> Share:
    """The split is made: ``for_training`` says of every row whether somebody may train on it; on others all test."""
    labels = np.asarray(data.labels)
    train, test = rows[for_training[rows]], rows[~for_training[rows]]
    train = train[_capped(labels[train], settings, rng)[0]]
    test = test[proportional(labels[test], settings.test_samples, rng)[0]]
    if not (len(train) and len(test)):
        raise DataError(
            f"partition = {settings.partition!r}, test-from = {settings.test_from!r}: a client has {len(train)} "
            f"training and {len(test)} test samples; leave out classes of few samples, or use a larger total-samples"
        )
    return Share(np.sort(train), np.sort(test))


def _capped(labels: Ints, settings: DataSettings, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Positions of at most ``train-samples`` training samples, and those left over.

    Classes are balanced, but where the partition gives each client class proportions of its own: there they stay.
    """
    cap = balanced if settings.partition in UNSHAPED else proportional
    return cap(labels, settings.train_samples, rng)


def _with_official_test(
    known: dict[bytes, Ints], data: StoredData, rows: Ints, settings: DataSettings, rng: np.random.Generator
) -> Share:
    """Train on the share, test on the official test samples of its classes, which clients have in common.

    ``known``: these samples for each set of classes that a client before this one had.
    """
    labels = np.asarray(data.labels)
    train = rows[_capped(labels[rows], settings, rng)[0]]
    held = np.unique(labels[train])
    if held.tobytes() not in known:
        known[held.tobytes()] = np.flatnonzero((np.asarray(data.official) == 1) & np.isin(labels, held))
    test = known[held.tobytes()]
    if settings.test_samples:
        test = test[proportional(labels[test], settings.test_samples, rng)[0]]
    if not len(test):
        classes = ", ".join(sorted(data.classes[label] for label in held))
        raise DataError(f"test-from = 'official': the official test part has no sample of classes {classes}")
    return Share(np.sort(train), test)


def _with_balanced_test(
    for_testing: Ints, data: StoredData, rows: Ints, settings: DataSettings, rng: np.random.Generator
) -> Share:
    """Train on the share; test on its domains' part of ``for_testing``, on ``test-samples``, each class as often.

    Where a class has too few, the others have more; with ``test-samples`` 0 all have as many as the rarest.
    """
    labels, domains = np.asarray(data.labels), np.asarray(data.domains)
    train = rows[_capped(labels[rows], settings, rng)[0]]
    test = for_testing[np.isin(domains[for_testing], domains[train])]
    if not len(test):
        raise DataError(
            "test-from = 'balanced': a client's domain has one sample of each class, and none to test on; use 'split'"
        )
    counts = np.unique(labels[test], return_counts=True)[1]
    test = test[balanced(labels[test], settings.test_samples or len(counts) * min(counts), rng)[0]]
    return Share(np.sort(train), test)


def _with_common_test(
    test: Ints, data: StoredData, rows: Ints, settings: DataSettings, rng: np.random.Generator
) -> Share:
    """Train on the share, test on what everybody tests on."""
    train = rows[_capped(np.asarray(data.labels)[rows], settings, rng)[0]]
    return Share(np.sort(train), test)


def _common_test(data: StoredData, settings: DataSettings, seed: int) -> Ints:
    """The official test part, or ``test-samples`` of it: the same ones for every client."""
    test = np.flatnonzero(data.official == 1)
    rng = np.random.default_rng(derive_seed(seed, "official-all"))
    return test[proportional(np.asarray(data.labels)[test], settings.test_samples, rng)[0]]


def _too_few(what: str, settings: DataSettings) -> str:
    return (
        f"partition = {settings.partition!r}: {what} (each needs one for training and one for testing); "
        "use fewer clients (num-partitions), a larger total-samples or another partition"
    )


def _opened(file: Path, client: int) -> Share | None:
    """The client's share from the cache file, which is not read whole; None when there is none or it is damaged."""
    try:
        saved = np.load(file, mmap_mode="r")
        width = 2 * len(PARTS)
        bounds = saved[width * client : width * (client + 1)].reshape(len(PARTS), 2)
        return Share(*(np.array(saved[start:end]) for start, end in bounds))
    except (OSError, ValueError, IndexError, EOFError):
        return None


def _write(file: Path, shares: list[Share]) -> None:
    """Where each client's parts begin and end, and all parts; the caller holds the lock of the data.

    Rows that all clients have in common are written once.
    """
    of_shares = [[getattr(share, name) for name in PARTS] for share in shares]
    parts = {id(part): part for of_one in of_shares for part in of_one}
    ends = np.cumsum([2 * len(PARTS) * len(shares), *(len(part) for part in parts.values())])
    place = dict(zip(parts, pairwise(ends), strict=True))
    bounds = np.array([[place[id(part)] for part in of_one] for of_one in of_shares])
    with replacing(file, private=True) as beside, beside.open("wb") as whole:
        np.save(whole, np.concatenate([bounds.ravel(), *parts.values()]))

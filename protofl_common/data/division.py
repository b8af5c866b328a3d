"""From a data set to each client's training, test and validation samples: the same in every process, from the seed.

Steps: choose the pool (``test-from``, ``total-samples``), divide it, split and cap each share, set validation aside.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.seeding import derive_seed
from protofl_common.config.datasets import is_own
from protofl_common.config.sections import DataSettings
from protofl_common.data.partitions import DIVIDE, DOMAIN_PARTITIONS, Pool, balanced, proportional, set_aside, split
from protofl_common.data.raw import VALIDATION, DataError, Ints
from protofl_common.data.store import StoredData

UNSHAPED = ("iid", "feature-shift", "own")  # no class proportions of their own: ``train-samples`` balances the classes
COMMON = ("official", "official-all")  # values of ``test-from`` with test samples that are in nobody's share
DEALT_AGAIN = ("n-way-k-shot",)  # clients may share samples: split into training and test before they are dealt out


class Share(NamedTuple):
    """One client's rows of the data set, int64 [n], in rising order."""

    train: Ints
    test: Ints
    validation: Ints


def placed(settings: DataSettings, client: int, clients: int, domain: str = "") -> tuple[int, int]:
    """A client's number and the number of clients: (0, 1) where nobody else shares its data (``own``, or a domain)."""
    if settings.partition == "own" or domain:
        return 0, 1
    if clients < 1:
        raise DataError(f"num-partitions = {clients}: must say among how many clients the data are divided")
    if not 0 <= client < clients:
        raise DataError(f"partition-id = {client}: must be from 0 to num-partitions - 1 = {clients - 1}")
    return client, clients


@lru_cache(maxsize=8)
def shares_of(data: StoredData, settings: DataSettings, seed: int, clients: int, domain: str = "") -> list[Share]:
    """The share of each of so many clients, made once per process; ``domain``: the only one that a client has."""
    return Division(data, settings, seed, domain).shares(clients)


class Division:
    """Divides the data set; the settings have passed `check_data_settings`."""

    def __init__(self, data: StoredData, settings: DataSettings, seed: int, domain: str) -> None:
        self.data, self.seed, self.domain = data, seed, domain
        self.settings = replace(settings, clients_per_domain="") if domain else settings
        self.labels, self.domains, self.official = map(np.asarray, (data.labels, data.domains, data.official))
        self.marked = self.reserved = self.official == VALIDATION  # or whole clients on whom nobody trains
        named = data.by_client and is_own(settings.dataset) and len(data.domain_names) > 1  # by the user: as patients
        self.by_client = named and not domain and settings.partition not in DOMAIN_PARTITIONS
        self.owners, self.domains = self.domains, self.domains * (not self.by_client)
        self.tests_of: dict[bytes, Ints] = {}  # set of classes -> its official test samples

    def random(self, *purpose: str | int) -> np.random.Generator:
        return np.random.default_rng(derive_seed(self.seed, *purpose))

    def shares(self, clients: int) -> list[Share]:
        settings, pool, tests = self.settings, self._pool(), np.flatnonzero(self.official == 1)
        least = 1 if settings.test_from in COMMON else 2
        if len(pool.rows) < least * clients:
            raise self._too_few(f"{len(pool.rows)} samples are too few for {clients} clients")
        if settings.partition in DEALT_AGAIN:  # a sample marked for validation is no shot
            pool = pool.take(np.flatnonzero(~self.marked[pool.rows]))
        pool = replace(pool, for_training=self._for_training(pool))
        if settings.test_from == "balanced" and pool.for_training is not None:
            tests, least = np.sort(pool.rows[~pool.for_training]), 1
            pool = pool.take(np.flatnonzero(pool.for_training))
        if settings.test_from == "official-all":
            tests = tests[proportional(self.labels[tests], settings.test_samples, self.random("official-all"))[0]]
        trains = np.ones(len(pool.rows), dtype=bool) if pool.for_training is None else pool.for_training
        if self.by_client and settings.validation_fraction and not self.marked.any():
            rows, rng = pool.rows[trains], self.random("validation", 0, self.domain)
            aside = set_aside(self.labels[rows], settings.validation_fraction, rng)[1]
            self.reserved = np.isin(np.arange(len(self.labels)), self._cut(rows, aside, rng)[1])
        rng, free = self.random("partition", settings.partition, self.domain), ~self.reserved[pool.rows]
        for _ in range(50 if self.by_client else 1):  # draws, until each client has samples on both sides
            dealt = DIVIDE[settings.partition](pool, settings, clients, rng)
            if all(len(np.unique(trains[of[free[of]]])) == 2 - trains.all() for of in dealt):
                break
        for client, positions in enumerate(dealt):
            if (many := int(free[positions].sum())) < least:
                raise self._too_few(f"client {client} of {clients} would have {many} samples")
        return [self._share(client, pool, positions, tests) for client, positions in enumerate(dealt)]

    def _pool(self) -> Pool:
        """All samples, or the official training part; ``total-samples`` of them at random; those of the domain."""
        settings, names = self.settings, self.data.domain_names
        rows = np.flatnonzero(self.official == 0) if settings.test_from in COMMON else np.arange(len(self.labels))
        if (total := settings.total_samples) > len(rows):
            raise DataError(f"total-samples = {total}: there are only {len(rows)}; use at most that, or 0")
        if total:
            rows = np.sort(self.random("total-samples").choice(rows, size=total, replace=False))
        pool = Pool(rows, self.labels[rows], self.domains[rows], names)
        if self.domain:
            allowed, which = ("own", *DOMAIN_PARTITIONS), f"domain = {self.domain!r}"
            if settings.partition not in allowed:
                raise DataError(f"{which}: has no meaning with partition {settings.partition!r}, only {allowed}")
            if self.domain not in names:
                has = f"has no such domain; its domains: {', '.join(names) or 'none'}"
                raise DataError(f"{which}: dataset {settings.dataset!r} {has}")
            pool = pool.take(np.flatnonzero(pool.domains == names.index(self.domain)))
            pool = replace(pool, domains=np.zeros_like(pool.domains), domain_names=(self.domain,))
        if settings.partition in DOMAIN_PARTITIONS and not pool.domain_names:
            without = "the data name no clients or domains; give them a column 'client', or choose another partition"
            raise DataError(f"partition = {settings.partition!r}: {without}")
        filled = {names[owner] for owner in np.unique(self.owners)} if names else set()
        if settings.partition in DOMAIN_PARTITIONS and not self.domain and (empty := {*names} - filled):
            raise DataError(f"partition = {settings.partition!r}: domain {min(empty)!r} is empty; fill or remove it")
        if settings.test_from.startswith("official") and not (self.official == 1).any():
            raise DataError(f"test-from = {settings.test_from!r}: the data mark no test samples; use split or balanced")
        return pool

    def _for_training(self, pool: Pool) -> NDArray[np.bool_] | None:
        """Decide which samples nobody is tested on, bool [n], where that comes before they are dealt out.

        By ``test-from = "balanced"`` a class has a sample to train on in every domain that it occurs in, and where it
        has two, one to test on.
        """
        settings, rng = self.settings, self.random("split", self.domain)
        if settings.test_from == "official-own":
            return np.asarray(self.official[pool.rows] == 0)
        by_domain, early = settings.test_from == "balanced", self.by_client or settings.partition in DEALT_AGAIN
        if not by_domain and (settings.test_from != "split" or not early):
            return None
        free = pool.take(np.flatnonzero(~self.marked[pool.rows]))
        _, test = split(by_domain * free.domains * len(self.data.classes) + free.labels, settings.train_fraction, rng)
        return np.isin(pool.rows, self._cut(free.rows, test, rng, tested=True)[1], invert=True)

    def _share(self, client: int, pool: Pool, dealt: Ints, tests: Ints) -> Share:
        """The client's rows; of a share that is split, training samples above ``train-samples`` are for testing."""
        settings, labels, rng = self.settings, self.labels, self.random("share", client, self.domain)
        positions = dealt[~self.reserved[pool.rows[dealt]]]
        train, splits_share = pool.rows[positions], settings.test_from == "split" and pool.for_training is None
        if splits_share:
            train, tests = (train[part] for part in split(labels[train], settings.train_fraction, rng))
        elif pool.for_training is not None:
            train, tests = train[pool.for_training[positions]], train[~pool.for_training[positions]]
        cap = balanced if settings.partition in UNSHAPED else proportional
        within, beyond = cap(labels[train], settings.train_samples, rng)
        if splits_share:
            tests = np.concatenate([tests, train[beyond]])
        train = np.sort(train[within])
        tests = self._tested(train, tests, rng)
        train, validation = self._validated(client, train, pool.rows[dealt])
        return Share(train, tests, validation)

    def _tested(self, train: Ints, tests: Ints, rng: np.random.Generator) -> Ints:
        """The rows among ``tests`` that a client is tested on; ``balanced``: of the domains of its training rows."""
        settings, labels, limit = self.settings, self.labels, self.settings.test_samples
        if settings.test_from == "official-all":
            return tests
        if settings.test_from == "official":
            classes = np.unique(labels[train])
            tests = self.tests_of.setdefault(classes.tobytes(), tests[np.isin(labels[tests], classes)])
            if not len(tests):
                names = ", ".join(sorted(self.data.classes[label] for label in classes))
                raise DataError(f"test-from = 'official': the official test part has no sample of classes {names}")
            return tests[proportional(labels[tests], limit, rng)[0]] if limit else tests
        if settings.test_from == "balanced":
            tests = tests[np.isin(self.domains[tests], self.domains[train])]
            if not len(tests):
                raise DataError("test-from = 'balanced': a client's domain has no sample left to test on; use split")
            counts = np.trim_zeros(np.sort(np.bincount(labels[tests])))  # of the classes there are, rarest first
            return tests[balanced(labels[tests], limit or len(counts) * counts[0], rng)[0]]
        tests = np.sort(tests[proportional(labels[tests], limit, rng)[0]])
        if not (len(train) and len(tests)):
            few = f"a client has {len(train)} training and {len(tests)} test samples"
            cure = "leave out classes of few samples, or of one `client`, or use fewer clients or more total-samples"
            raise DataError(f"partition = {settings.partition!r}, test-from = {settings.test_from!r}: {few}; {cure}")
        return tests

    def _validated(self, client: int, train: Ints, rows: Ints) -> tuple[Ints, Ints]:
        """Training and validation rows: those held back, common where shares are, else ``validation-fraction``."""
        settings, labels = self.settings, self.labels
        if (marked := self.marked.any()) or self.by_client or not settings.validation_fraction:
            common = marked and (settings.test_from in COMMON or settings.partition in DEALT_AGAIN)
            chosen = np.flatnonzero(self.marked) if common else rows[self.reserved[rows]]
            if common and settings.test_from != "official-all":
                chosen = chosen[np.isin(labels[chosen], labels[train])]
            return train, np.sort(chosen)
        rng = self.random("validation", client, self.domain)
        stay, go = set_aside(labels[train], settings.validation_fraction, rng)
        return train[stay], train[go]

    def _cut(self, rows: Ints, aside: Ints, rng: np.random.Generator, tested: bool = False) -> tuple[Ints, Ints]:
        """Cut ``aside`` off the rows; if `by_client`, whole clients, about as much of each class. All classes stay."""
        if not self.by_client:
            return np.delete(rows, aside), rows[aside]
        labels, classes = self.labels[rows], len(self.data.classes)
        names, client_of = np.unique(self.owners[rows], return_inverse=True)
        part = 1 / np.maximum(np.bincount(labels, minlength=classes), 1)  # of its class that a sample is
        has = np.bincount(client_of * classes + labels, minlength=len(names) * classes).reshape(-1, classes) * part
        wanted, gone = np.bincount(labels[aside], minlength=classes) * part, np.zeros(classes)
        goes, order = np.zeros(len(names), dtype=bool), rng.permutation(len(names))
        small_first = order[has[order].sum(1).argsort(kind="stable")] if tested else order[:0]
        for turn, client in takewhile(lambda _: (gone < wanted - 1e-9).any(), enumerate((*order, *small_first))):
            then = gone + has[client]
            nearer = 2 * (abs(wanted - gone) - abs(wanted - then)).sum() >= has[client].sum()
            new = turn >= len(order) and (then > 0)[gone == 0].any()  # who is tested has each class if two clients do
            if (nearer or new) and not goes[client] and (then < 1 - 1e-9).all():
                goes[client], gone[:] = True, then
        return rows[~goes[client_of]], rows[goes[client_of]]

    def _too_few(self, what: str) -> DataError:
        cure = "use fewer clients (num-partitions), a larger total-samples or another partition"
        each = "each needs one for training and one for testing"
        return DataError(f"partition = {self.settings.partition!r}: {what} ({each}); {cure}")

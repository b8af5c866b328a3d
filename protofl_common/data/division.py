"""From a data set to each client's training, test and validation samples: the same in every process, from the seed.

Steps: choose the pool (``test-from``, ``total-samples``), divide it, split and cap each share, set validation aside.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
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
        self.marked = self.official == VALIDATION
        brought = is_own(settings.dataset) and settings.dataset != "domain-folder" and not domain
        self.by_client = settings.partition == "own" and brought and len(data.domain_names) > 1  # such as patients
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
        rng = self.random("partition", settings.partition, self.domain)
        dealt = DIVIDE[settings.partition](pool, settings, clients, rng)
        for client, positions in enumerate(dealt):
            if (many := int((~self.marked[pool.rows[positions]]).sum())) < least:
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
        if settings.test_from.startswith("official") and not (self.official == 1).any():
            raise DataError(f"test-from = {settings.test_from!r}: the data mark no test samples; use split or balanced")
        return pool

    def _for_training(self, pool: Pool) -> NDArray[np.bool_] | None:
        """Decide which samples nobody is tested on, bool [n], where that comes before they are dealt out.

        By ``test-from = "balanced"`` a class has a sample to train on in every domain that it occurs in, and where it
        has two, one to test on.
        """
        settings, groups = self.settings, pool.labels
        if settings.test_from == "official-own":
            return np.asarray(self.official[pool.rows] == 0)
        if settings.test_from == "balanced":
            groups = pool.domains * len(self.data.classes) + pool.labels
        elif settings.test_from != "split" or settings.partition not in DEALT_AGAIN:
            return None
        free = np.flatnonzero(~self.marked[pool.rows])
        tested = free[split(groups[free], settings.train_fraction, self.random("split", self.domain))[1]]
        return np.isin(np.arange(len(pool.rows)), tested, invert=True)

    def _share(self, client: int, pool: Pool, dealt: Ints, tests: Ints) -> Share:
        """The client's rows; of a share that is split, training samples above ``train-samples`` are for testing."""
        settings, labels, rng = self.settings, self.labels, self.random("share", client, self.domain)
        positions = dealt[~self.marked[pool.rows[dealt]]]
        train = pool.rows[positions]
        splits_share = settings.test_from == "split" and pool.for_training is None
        if splits_share:
            train, tests = self._cut(train, lambda classes: split(classes, settings.train_fraction, rng))
        elif pool.for_training is not None:
            train, tests = train[pool.for_training[positions]], train[~pool.for_training[positions]]
        cap = balanced if settings.partition in UNSHAPED else proportional
        within, beyond = cap(labels[train], settings.train_samples, rng)
        if splits_share and not self.by_client:
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
            cure = "leave out classes of few samples, or of one `client`, or use a larger total-samples"
            raise DataError(f"partition = {settings.partition!r}, test-from = {settings.test_from!r}: {few}; {cure}")
        return tests

    def _validated(self, client: int, train: Ints, rows: Ints) -> tuple[Ints, Ints]:
        """Training and validation rows: the marked ones, common where shares are, else ``validation-fraction``."""
        settings, labels = self.settings, self.labels
        if self.marked.any():
            marked = rows[self.marked[rows]]
            if settings.test_from in COMMON or settings.partition in DEALT_AGAIN:
                marked = np.flatnonzero(self.marked)
                if settings.test_from != "official-all":
                    marked = marked[np.isin(labels[marked], labels[train])]
            return train, np.sort(marked)
        if not settings.validation_fraction:
            return train, train[:0]
        rng = self.random("validation", client, self.domain)
        return self._cut(train, lambda classes: set_aside(classes, settings.validation_fraction, rng))

    def _cut(self, rows: Ints, cut: Callable[[Ints], tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
        """Cut the rows in two by class; if `by_client`, whole clients by the rarest class of each; all classes stay."""
        labels = self.labels[rows]
        if not self.by_client:
            first, second = cut(labels)
            return rows[first], rows[second]
        names, client_of = np.unique(self.domains[rows], return_inverse=True)
        has = np.zeros((len(names), len(self.data.classes)), dtype=bool)
        has[client_of, labels] = True
        stay, go = cut(np.where(has, has.sum(0), len(names) + 1).argmin(1))
        aside, left = list[int](), has.sum(0)
        for client in (*go, *stay):  # who stays may take the place of a class's last client
            if len(aside) < len(go) and (left[has[client]] > 1).all():
                aside.append(client)
                left = left - has[client]
        goes = np.isin(client_of, aside)
        return rows[~goes], rows[goes]

    def _too_few(self, what: str) -> DataError:
        cure = "use fewer clients (num-partitions), a larger total-samples or another partition"
        each = "each needs one for training and one for testing"
        return DataError(f"partition = {self.settings.partition!r}: {what} ({each}); {cure}")

"""From a data set to each client's training, test and validation samples.

The seed alone decides: every process divides alike. Steps: choose the pool (``test-from``,
``total-samples``), divide it, split and cap each share, set validation aside.

``test-from`` decides what a client is tested on, and when that is decided:

- ``split``: each share is split once it is dealt. Where samples of one person stay together, or
  clients may share samples, the pool is split before it is dealt.
- ``official-own``: the data set marks the test samples, which are dealt like the others.
- ``balanced``: the pool is split first; training samples alone are dealt, the others are for tests.
- ``keyed``: at a site with data of its own a keyed hash of each sample, or of whose it is, decides,
  with a key that the site keeps. So one sample more, or less, moves no other; how many samples are
  on a side is left to chance.
- ``official``, ``official-all``: the data set marks the test samples, and nobody's share has them.
"""

from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.seeding import derive_seed
from protofl_common.config.datasets import PARTITIONS, is_own
from protofl_common.config.sections import KEYED, DataSettings
from protofl_common.data.partitions import (
    DIVIDE,
    Generator,
    Pool,
    balanced,
    proportional,
    set_aside,
    split,
)
from protofl_common.data.raw import VALIDATION, DataError, Ints
from protofl_common.data.store import StoredData

COMMON_TESTS = ("official", "official-all")
"""Values of ``test-from`` with test samples that are in nobody's share."""
DRAWS_BY_CLIENT = 50  # of a division, until each client has samples for training and for testing
NEARLY = 1e-9  # two parts of a class that differ by less are one


class Share(NamedTuple):
    """One client's rows of the data set, int64 [n], in rising order."""

    train: Ints
    test: Ints
    validation: Ints


def client_and_number(
    settings: DataSettings, client: int, clients: int, domain: str = ""
) -> tuple[int, int]:
    """Return a client's number, and among how many clients its data are divided.

    (0, 1) where nobody else has a part of them: with partition ``own``, or a domain of its own.
    """
    if settings.partition == "own" or domain:
        return 0, 1
    if clients < 1:
        wanted = "must say among how many clients the data are divided"
        raise DataError(f"num-partitions = {clients}: {wanted}")
    if not 0 <= client < clients:
        wanted = f"must be from 0 to num-partitions - 1 = {clients - 1}"
        raise DataError(f"partition-id = {client}: {wanted}")
    return client, clients


@lru_cache(maxsize=8)
def shares_of(
    data: StoredData,
    settings: DataSettings,
    seed: int,
    clients: int,
    domain: str = "",
    key: bytes = b"",
) -> list[Share]:
    """The share of each client, made once per process; with ``domain`` of that domain alone.

    ``key`` is that of a site with data of its own.
    """
    return Division(data, settings, seed, domain, key).shares(clients)


def names_persons(data: StoredData, settings: DataSettings, domain: str) -> bool:
    """True where a column ``client`` of the user's own data says whose each sample is.

    With a ``domain``, or a partition by domains, each of its values is a client of a run instead.
    """
    by_domain = bool(domain) or PARTITIONS[settings.partition].needs_domains
    return data.by_client and is_own(settings.dataset) and not by_domain


class Division:
    """Divides the data set; the settings have passed `check_data_settings`."""

    def __init__(
        self, data: StoredData, settings: DataSettings, seed: int, domain: str, key: bytes = b""
    ) -> None:
        self.data = data
        self.key = key
        self.seed = seed
        self.domain = domain
        self.settings = replace(settings, clients_per_domain="") if domain else settings
        self.partition = PARTITIONS[settings.partition]
        self.strata_names = data.task.strata_names
        self.labels = data.task.strata(np.asarray(data.labels))  # indices into these
        self.official = np.asarray(data.official)
        self.owners = np.asarray(data.domains)

        # samples of one `client` of the user's own data, as a patient, stay together: nobody trains
        # on some of them and is tested on others
        several = len(data.domain_names) > 1
        self.by_client = several and names_persons(data, settings, domain)
        self.domains = np.zeros_like(self.owners) if self.by_client else self.owners

        self.marked = self.official == VALIDATION
        self.reserved = self.marked  # for validation: the marked samples, or else whole clients
        self.is_keyed = settings.test_from == KEYED
        self.tests_of: dict[bytes, Ints] = {}  # set of classes -> its official test samples

    def random(self, *purpose: str | int) -> Generator:
        return np.random.default_rng(derive_seed(self.seed, *purpose))

    def shares(self, clients: int) -> list[Share]:
        """Each client's share; DataError where the data do not suffice for so many clients."""
        settings = self.settings
        pool = self._pool()
        least = 1 if settings.test_from in COMMON_TESTS else 2
        if len(pool.rows) < least * clients:
            raise self._too_few(f"{len(pool.rows)} samples are too few for {clients} clients")
        if self.partition.shares_samples:  # a sample marked for validation is no shot
            pool = pool.take(np.flatnonzero(~self.marked[pool.rows]))
        pool = replace(pool, for_training=self._for_training(pool))

        tests = np.flatnonzero(self.official == 1)
        if settings.test_from == "official-all":
            rng = self.random("official-all")
            tests = tests[proportional(self.labels[tests], settings.test_samples, rng)[0]]
        if settings.test_from == "balanced" and pool.for_training is not None:
            tests = np.sort(pool.rows[~pool.for_training])
            pool = pool.take(np.flatnonzero(pool.for_training))
            least = 1

        if settings.validation_fraction and not self.marked.any():
            if self.is_keyed:
                self._reserve_by_hash(pool)
            elif self.by_client:
                self._reserve_clients(pool)
        dealt = self._dealt(pool, clients)
        for client, positions in enumerate(dealt):
            many = int((~self.reserved[pool.rows[positions]]).sum())
            if many < least:
                raise self._too_few(f"client {client} of {clients} would have {many} samples")
        return [self._share(client, pool, share, tests) for client, share in enumerate(dealt)]

    # -- the pool
    def _pool(self) -> Pool:
        """Return the samples that are divided among the clients.

        They are all samples, or the official training part where tests are in nobody's share
        (`COMMON_TESTS`); of these ``total-samples``, if it is set, and of them those of the domain.
        """
        settings = self.settings
        rows = np.arange(len(self.labels))
        if settings.test_from in COMMON_TESTS:
            rows = np.flatnonzero(self.official == 0)
        total = settings.total_samples
        if total > len(rows):
            cure = "use at most that, or 0"
            raise DataError(f"total-samples = {total}: there are only {len(rows)}; {cure}")
        if total:
            rng = self.random("total-samples")
            rows = np.sort(rng.choice(rows, size=total, replace=False))

        pool = Pool(rows, self.labels[rows], self.domains[rows], self.data.domain_names)
        if self.domain:
            pool = self._of_domain(pool)
        if self.partition.needs_domains:
            self._check_domains(pool)
        if settings.test_from.startswith("official") and not (self.official == 1).any():
            without = "the data mark no test samples; use split or balanced"
            raise DataError(f"test-from = {settings.test_from!r}: {without}")
        return pool

    def _of_domain(self, pool: Pool) -> Pool:
        """The samples of the client's domain, as if it were the only one."""
        settings = self.settings
        names = pool.domain_names
        which = f"domain = {self.domain!r}"
        by_domains = [name for name, row in PARTITIONS.items() if row.needs_domains]
        allowed = ("own", *by_domains)
        if settings.partition not in allowed:
            without = f"has no meaning with partition {settings.partition!r}, only {allowed}"
            raise DataError(f"{which}: {without}")
        if self.domain not in names:
            has = f"has no such domain; its domains: {', '.join(names) or 'none'}"
            raise DataError(f"{which}: dataset {settings.dataset!r} {has}")
        pool = pool.take(np.flatnonzero(pool.domains == names.index(self.domain)))
        return replace(pool, domains=np.zeros_like(pool.domains), domain_names=(self.domain,))

    def _check_domains(self, pool: Pool) -> None:
        """DataError if a partition by domains finds no domains, or one without samples."""
        which = f"partition = {self.settings.partition!r}"
        if not pool.domain_names:
            cure = "give them a column 'client', or choose another partition"
            raise DataError(f"{which}: the data name no clients or domains; {cure}")
        if self.domain:  # the pool has this domain alone: what the others have does not matter
            return
        filled = {pool.domain_names[owner] for owner in np.unique(self.owners)}
        empty = set(pool.domain_names) - filled
        if empty:
            raise DataError(f"{which}: domain {min(empty)!r} is empty; fill or remove it")

    def _for_training(self, pool: Pool) -> NDArray[np.bool_] | None:
        """Decide which samples nobody is tested on, bool [n]; None: after they are dealt.

        By ``test-from = "balanced"`` a class has a sample to train on in every domain that it
        occurs in, and where it has two, one to test on.
        """
        settings = self.settings
        if settings.test_from == "official-own":
            return np.asarray(self.official[pool.rows] == 0)
        if settings.test_from in COMMON_TESTS:
            return None
        if self.is_keyed:
            return self._hashes("test", pool.rows) < settings.train_fraction
        is_balanced = settings.test_from == "balanced"
        if not (is_balanced or self.by_client or self.partition.shares_samples):
            return None

        free = pool.take(np.flatnonzero(~self.marked[pool.rows]))
        groups = free.labels
        if is_balanced:
            groups = free.domains * len(self.strata_names) + free.labels
        rng = self.random("split", self.domain)
        test = split(groups, settings.train_fraction, rng)[1]
        return ~np.isin(pool.rows, self._rows_aside(free.rows, test, rng, for_testing=True))

    def _hashes(self, purpose: str, rows: Ints) -> NDArray[np.float64]:
        """A number from 0 to 1 for each of these rows, which follows from the sample and the key.

        Samples of one `client` have one in common.
        """
        if not self.key:
            which = f"test-from = {KEYED!r}"
            raise DataError(f"{which}: only in the node config of a site with data of its own")
        if self.by_client:
            contents = [self.data.domain_names[owner].encode() for owner in self.owners[rows]]
        else:
            contents = [digest.tobytes() for digest in self.data.contents[rows]]
            if contents and not contents[0]:
                cure = "choose split, or keep them as files"
                raise DataError(f"test-from = {KEYED!r}: not with {self.settings.dataset}; {cure}")
        hashes = [
            blake2b(content, key=self.key, person=purpose.encode(), digest_size=8).digest()
            for content in contents
        ]
        return np.frombuffer(b"".join(hashes), "<u8") / 2**64

    def _reserve_by_hash(self, pool: Pool) -> None:
        """Reserve about ``validation-fraction`` of the training samples, each by itself."""
        assert pool.for_training is not None
        rows = pool.rows[pool.for_training]
        is_reserved = self._hashes("validation", rows) < self.settings.validation_fraction
        self.reserved = np.zeros_like(self.marked)
        self.reserved[rows[is_reserved]] = True

    def _reserve_clients(self, pool: Pool) -> None:
        """Reserve about ``validation-fraction`` of the training samples: those of whole clients."""
        rows = pool.rows
        if pool.for_training is not None:
            rows = rows[pool.for_training]
        rng = self.random("validation", 0, self.domain)
        aside = set_aside(self.labels[rows], self.settings.validation_fraction, rng)[1]
        self.reserved = np.zeros_like(self.marked)
        self.reserved[self._rows_aside(rows, aside, rng)] = True

    def _rows_aside(
        self, rows: Ints, aside: Ints, rng: Generator, *, for_testing: bool = False
    ) -> Ints:
        """The rows at positions ``aside``; if `by_client`, those of whole clients instead.

        Clients go in random order, whoever brings the parts of the classes that are gone nearer to
        those of ``aside``. No class goes as a whole. With ``for_testing`` a second turn, small
        clients first, adds who has a class that nobody brought: so each class is tested that two
        clients have.
        """
        if not self.by_client:
            return rows[aside]
        labels = self.labels[rows]
        classes = len(self.strata_names)
        names, client_of = np.unique(self.owners[rows], return_inverse=True)
        cells = client_of * classes + labels
        counts_NC = np.bincount(cells, minlength=len(names) * classes).reshape(-1, classes)

        # all amounts are parts of a class: 1 is all its samples
        of_class_C = 1 / np.maximum(np.bincount(labels, minlength=classes), 1)
        has_NC = counts_NC * of_class_C
        wanted_C = np.bincount(labels[aside], minlength=classes) * of_class_C
        gone_C = np.zeros(classes)

        goes_N = np.zeros(len(names), dtype=bool)
        order = rng.permutation(len(names))
        turns = order
        if for_testing:
            small_first = order[has_NC[order].sum(1).argsort(kind="stable")]
            turns = np.concatenate([order, small_first])
        for turn, client in enumerate(turns):
            if (gone_C >= wanted_C - NEARLY).all():
                break
            then_C = gone_C + has_NC[client]
            if goes_N[client] or (then_C >= 1 - NEARLY).any():
                continue
            gain = (abs(wanted_C - gone_C) - abs(wanted_C - then_C)).sum()
            is_nearer = 2 * gain >= has_NC[client].sum()
            brings_class = turn >= len(order) and (then_C > 0)[gone_C == 0].any()
            if is_nearer or brings_class:
                goes_N[client] = True
                gone_C = then_C
        return rows[goes_N[client_of]]

    def _dealt(self, pool: Pool, clients: int) -> list[Ints]:
        """Positions in the pool of each client's samples.

        Where samples of one person stay together, draw again until each client has some on both
        sides.
        """
        settings = self.settings
        divide = DIVIDE[settings.partition]
        rng = self.random("partition", settings.partition, self.domain)
        if not self.by_client:
            return divide(pool, settings, clients, rng)

        is_free = ~self.reserved[pool.rows]
        for_training = pool.for_training
        if for_training is None:
            for_training = np.ones(len(pool.rows), dtype=bool)
        sides = 1 if for_training.all() else 2
        for _ in range(DRAWS_BY_CLIENT):
            dealt = divide(pool, settings, clients, rng)
            used = [for_training[share[is_free[share]]] for share in dealt]
            if all(len(np.unique(marks)) == sides for marks in used):
                break
        return dealt

    # -- a share
    def _share(self, client: int, pool: Pool, dealt: Ints, tests: Ints) -> Share:
        """The client's rows; ``tests`` are those that are in nobody's share.

        Of a share that is split, training samples above ``train-samples`` are for testing.
        """
        settings = self.settings
        rng = self.random("share", client, self.domain)
        positions = dealt[~self.reserved[pool.rows[dealt]]]
        train = pool.rows[positions]
        is_split_here = settings.test_from == "split" and pool.for_training is None
        if is_split_here:
            for_training, for_testing = split(self.labels[train], settings.train_fraction, rng)
            tests = train[for_testing]
            train = train[for_training]
        elif pool.for_training is not None:
            is_training = pool.for_training[positions]
            tests = train[~is_training]
            train = train[is_training]

        cap = balanced if self.partition.balances_classes else proportional
        within, beyond = cap(self.labels[train], settings.train_samples, rng)
        if is_split_here:
            tests = np.concatenate([tests, train[beyond]])
        train = np.sort(train[within])

        tests = self._tested(train, tests, rng)
        train, validation = self._validated(client, train, pool.rows[dealt])
        return Share(train, tests, validation)

    def _tested(self, train: Ints, tests: Ints, rng: Generator) -> Ints:
        """The rows among ``tests`` that a client with these training rows is tested on."""
        mode = self.settings.test_from
        if mode == "official-all":  # capped once, for all clients alike
            return tests
        if mode == "official":
            return self._tested_on_classes(train, tests, rng)
        if mode == "balanced":
            return self._tested_on_domains(train, tests, rng)
        return self._tested_on_own(train, tests, rng)

    def _tested_on_classes(self, train: Ints, tests: Ints, rng: Generator) -> Ints:
        """The official test samples of the client's classes."""
        classes = np.unique(self.labels[train])
        key = classes.tobytes()
        if key not in self.tests_of:
            self.tests_of[key] = tests[np.isin(self.labels[tests], classes)]
        tests = self.tests_of[key]
        if not len(tests):
            names = ", ".join(sorted(self.strata_names[label] for label in classes))
            without = f"the official test part has no sample of classes {names}"
            raise DataError(f"test-from = 'official': {without}")
        limit = self.settings.test_samples
        if not limit:
            return tests
        return tests[proportional(self.labels[tests], limit, rng)[0]]

    def _tested_on_domains(self, train: Ints, tests: Ints, rng: Generator) -> Ints:
        """The test samples of the client's domains, each class as often."""
        tests = tests[np.isin(self.domains[tests], self.domains[train])]
        if not len(tests):
            without = "a client's domain has no sample left to test on; use split"
            raise DataError(f"test-from = 'balanced': {without}")
        counts = np.bincount(self.labels[tests])
        counts = counts[counts > 0]
        limit = self.settings.test_samples or len(counts) * counts.min()
        return tests[balanced(self.labels[tests], limit, rng)[0]]

    def _tested_on_own(self, train: Ints, tests: Ints, rng: Generator) -> Ints:
        """The test samples of the client's own share."""
        settings = self.settings
        within = proportional(self.labels[tests], settings.test_samples, rng)[0]
        tests = np.sort(tests[within])
        if not (len(train) and len(tests)):
            which = f"partition = {settings.partition!r}, test-from = {settings.test_from!r}"
            few = f"a client has {len(train)} training and {len(tests)} test samples"
            cure = (
                "leave out classes of few samples, or of one `client`, "
                "or use fewer clients or more total-samples"
            )
            raise DataError(f"{which}: {few}; {cure}")
        return tests

    def _validated(self, client: int, train: Ints, share: Ints) -> tuple[Ints, Ints]:
        """Training and validation rows of a client with this ``share``."""
        settings = self.settings
        is_marked = self.marked.any()
        if is_marked and self._validates_in_common():
            validation = np.flatnonzero(self.marked)
            if settings.test_from != "official-all":
                of_classes = np.isin(self.labels[validation], self.labels[train])
                validation = validation[of_classes]
            return train, validation
        if is_marked or self.by_client or self.is_keyed:
            return train, np.sort(share[self.reserved[share]])
        if not settings.validation_fraction:
            return train, train[:0]
        rng = self.random("validation", client, self.domain)
        stay, go = set_aside(self.labels[train], settings.validation_fraction, rng)
        return train[stay], train[go]

    def _validates_in_common(self) -> bool:
        """True where the samples marked for validation are in nobody's share."""
        return self.settings.test_from in COMMON_TESTS or self.partition.shares_samples

    def _too_few(self, what: str) -> DataError:
        each = "each needs one for training and one for testing"
        cure = "use fewer clients (num-partitions), a larger total-samples or another partition"
        return DataError(f"partition = {self.settings.partition!r}: {what} ({each}); {cure}")

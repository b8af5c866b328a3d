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
from protofl_common.data.raw import VALIDATION, Bools, DataError, Floats, Ints
from protofl_common.data.store import StoredData

COMMON_TESTS = ("official", "official-all")
"""Values of ``test-from`` with test samples that are in nobody's share."""
MOST_DRAWS = 50  # of a division where the samples of one person stay together, see `_dealt`
ROUNDING_ERROR = 1e-9  # of sums: what differs by less is equal


class Share(NamedTuple):
    """One client's rows of the data set, int64 [n], in rising order."""

    train: Ints
    test: Ints
    validation: Ints


def number_in_division(
    settings: DataSettings, client: int, clients: int, domain: str = ""
) -> tuple[int, int]:
    """Return a client's number, and among how many clients the data that it reads are divided.

    ``client`` and ``clients`` are its node config's ``partition-id`` and ``num-partitions``, and
    are returned as they are. With the partition ``own``, or a ``domain`` of its own, nobody else
    has a part of these data: then (0, 1) is returned, whatever they are. DataError if they are out
    of range.
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
    """Divide the data among ``clients``; return the share of each. Results are cached.

    With a ``domain`` only its samples are divided. ``key`` is the secret that decides, with
    ``test-from = "keyed"``, which samples of a site's own data are for testing.
    """
    return Division(data, settings, seed, domain, key).shares(clients)


def names_persons(data: StoredData, settings: DataSettings, domain: str) -> bool:
    """True if a column ``client`` of the user's own data says whose each sample is.

    With a ``domain``, or a partition by domains, the column's values are the clients of the run
    instead.
    """
    by_domain = bool(domain) or PARTITIONS[settings.partition].needs_domains
    return data.by_client and is_own(settings.dataset) and not by_domain


class Division:
    """A division of a data set among clients; the settings have passed `check_data_settings`."""

    def __init__(
        self, data: StoredData, settings: DataSettings, seed: int, domain: str, key: bytes = b""
    ) -> None:
        self.data = data
        self.key = key
        self.seed = seed
        self.domain = domain
        if domain:  # which this client has alone: clients-per-domain counts those of all domains
            settings = replace(settings, clients_per_domain="")
        self.settings = settings
        self.partition = PARTITIONS[settings.partition]
        self.strata_names = data.task.strata_names
        self.labels = data.task.strata(np.asarray(data.labels))  # indices into these
        self.official = np.asarray(data.official)
        self.owners = np.asarray(data.domains)

        # samples of one `client` of the user's own data, as a patient, stay together: nobody trains
        # on some of them and is tested on others; those of the only one have to be split
        several = len(data.domain_names) > 1
        self.by_client = several and names_persons(data, settings, domain)
        # patients are no domains: then all samples are of one
        self.domains = np.zeros_like(self.owners) if self.by_client else self.owners

        self.is_keyed = settings.test_from == KEYED
        # for each row, bool: whether it is in the validation part that the data set may have
        self.official_validation: Bools = self.official == VALIDATION
        has_official = bool(self.official_validation.any())
        in_no_share = settings.test_from in COMMON_TESTS or self.partition.shares_samples
        self.validates_in_common = has_official and in_no_share
        self.reserves_validation = has_official or self.is_keyed or self.by_client
        # for each row, bool: whether it was set aside for validation before the pool is dealt:
        # that part, or what `shares` chooses in its place
        self.reserved = self.official_validation
        self.tests_of: dict[bytes, Ints] = {}  # set of classes -> its official test samples

    def random(self, *purpose: str | int) -> Generator:
        return np.random.default_rng(derive_seed(self.seed, *purpose))

    def shares(self, clients: int) -> list[Share]:
        """Return each client's share; DataError if the data do not suffice for so many clients.

        Each client's share is split into its parts once it has been dealt (`_share`). What must not
        depend on who is dealt a sample is decided before. That is which tests are in nobody's
        share. Where samples of one person stay together, clients may share samples, or a hash
        decides, it is also which of the dealt samples are for training, testing and validation.
        """
        test_from = self.settings.test_from
        pool = self._pool()
        # each client needs a sample to train on, and if its tests are of its share, one for these
        min_samples = 1 if test_from in COMMON_TESTS else 2
        if len(pool.rows) < min_samples * clients:
            raise self._too_few(f"{len(pool.rows)} samples are too few for {clients} clients")
        if self.validates_in_common:
            pool = pool.take(np.flatnonzero(~self.official_validation[pool.rows]))
        pool = replace(pool, for_training=self._for_training(pool))

        tests = self._tests_outside_shares(pool)
        if test_from == "balanced":
            pool = pool.take(np.flatnonzero(pool.may_train))
            min_samples = 1  # the tests have just left the pool
        self.reserved = self._for_validation(pool)

        dealt = self._dealt(pool, clients)
        for client, positions in enumerate(dealt):
            count = int((~self.reserved[pool.rows[positions]]).sum())
            if count < min_samples:
                raise self._too_few(f"client {client} of {clients} would have {count} samples")
        return [self._share(client, pool, share, tests) for client, share in enumerate(dealt)]

    # -- the pool
    def _pool(self) -> Pool:
        """Return the samples that are divided among the clients.

        They are all samples, or the official training part if the test samples are in nobody's
        share (`COMMON_TESTS`). If ``total-samples`` is set, so many of them are drawn; a client
        with a domain of its own gets those of its domain. DataError if the data do not have what
        the settings ask of them.
        """
        settings = self.settings
        rows = np.arange(len(self.labels))
        if settings.test_from in COMMON_TESTS:
            rows = np.flatnonzero(self.official == 0)
        total = settings.total_samples
        if total > len(rows):
            raise DataError(
                f"total-samples = {total}: there are only {len(rows)}; use at most that, or 0"
            )
        if total:
            rng = self.random("total-samples")
            rows = np.sort(rng.choice(rows, size=total, replace=False))

        pool = Pool(rows, self.labels[rows], self.domains[rows], self.data.domain_names)
        if self.domain:
            pool = self._of_domain(pool)
        if self.partition.needs_domains:
            self._check_domains(pool)
        if settings.test_from.startswith("official") and not (self.official == 1).any():
            raise DataError(
                f"test-from = {settings.test_from!r}: "
                "the data mark no test samples; use split or balanced"
            )
        return pool

    def _of_domain(self, pool: Pool) -> Pool:
        """Return the pool's samples of `self.domain`, as a data set that has no other domain."""
        settings = self.settings
        names = pool.domain_names
        which = f"domain = {self.domain!r}"
        by_domains = [name for name, row in PARTITIONS.items() if row.needs_domains]
        allowed = ("own", *by_domains)
        if settings.partition not in allowed:
            raise DataError(
                f"{which}: has no meaning with partition {settings.partition!r}, only {allowed}"
            )
        if self.domain not in names:
            raise DataError(
                f"{which}: dataset {settings.dataset!r} "
                f"has no such domain; its domains: {', '.join(names) or 'none'}"
            )
        pool = pool.take(np.flatnonzero(pool.domains == names.index(self.domain)))
        return replace(pool, domains=np.zeros_like(pool.domains), domain_names=(self.domain,))

    def _check_domains(self, pool: Pool) -> None:
        """Raise DataError if a partition by domains finds no domains, or one without samples."""
        which = f"partition = {self.settings.partition!r}"
        if not pool.domain_names:
            raise DataError(
                f"{which}: the data name no clients or domains; "
                "give them a column 'client', or choose another partition"
            )
        if self.domain:  # the pool has this domain alone: what the others have does not matter
            return
        with_samples = {pool.domain_names[owner] for owner in np.unique(self.owners)}
        empty = set(pool.domain_names) - with_samples
        if empty:
            raise DataError(f"{which}: domain {min(empty)!r} is empty; fill or remove it")

    def _for_training(self, pool: Pool) -> Bools | None:
        """Return which samples of the pool are for training, bool [n]; the others are for tests.

        None if that is decided for each share by itself, or if the tests are in nobody's share.
        ``test-from = "balanced"`` splits each class of each domain by itself, so that it has
        samples for training wherever it occurs, and samples for tests wherever it has two.
        """
        settings = self.settings
        if settings.test_from == "official-own":
            return np.asarray(self.official[pool.rows] == 0)
        if settings.test_from in COMMON_TESTS:
            return None
        if self.is_keyed:
            return self._hashes("test", pool.rows) < settings.train_fraction
        is_balanced = settings.test_from == "balanced"
        is_split_here = is_balanced or self.by_client or self.partition.shares_samples
        if not is_split_here:
            return None

        # a validation part of the data set stays out of this
        free = pool.take(np.flatnonzero(~self.official_validation[pool.rows]))
        groups = free.labels
        if is_balanced:  # a number for each pair of domain and class
            groups = free.domains * len(self.strata_names) + free.labels
        rng = self.random("split", self.domain)
        _, tests = split(groups, settings.train_fraction, rng)
        test_rows = self._rows_aside(free.rows, tests, rng, for_testing=True)
        return ~np.isin(pool.rows, test_rows)

    def _hashes(self, purpose: str, rows: Ints) -> Floats:
        """Return a number in [0, 1) for each row, a keyed hash of ``purpose`` and the sample.

        If samples of one `client` stay together, the client's name is hashed in the place of the
        sample, so that all its samples have one number. DataError without a key, or if the data set
        has no digests of its samples.
        """
        if not self.key:
            raise DataError(
                f"test-from = {KEYED!r}: only in the node config of a site with data of its own"
            )
        if self.by_client:
            contents = [self.data.domain_names[owner].encode() for owner in self.owners[rows]]
        else:
            contents = [digest.tobytes() for digest in self.data.contents[rows]]
            if contents and not contents[0]:  # `RawData.contents` is empty: no digests
                raise DataError(
                    f"test-from = {KEYED!r}: not with {self.settings.dataset}; "
                    "choose split, or keep them as files"
                )
        # ``person`` personalises the hash: one key gives other numbers for another purpose
        hashes = [
            blake2b(content, key=self.key, person=purpose.encode(), digest_size=8).digest()
            for content in contents
        ]
        return np.frombuffer(b"".join(hashes), "<u8") / 2**64  # each 8 bytes, a whole number

    def _tests_outside_shares(self, pool: Pool) -> Ints:
        """Return the rows that clients are tested on though nobody is dealt them.

        With ``test-from = "balanced"`` these are the rows of the ``pool`` that are not for
        training; the caller takes them out of it. Otherwise they are the data set's test part, of
        which "official-all" draws ``test-samples``. Where a client is tested on a part of its
        share, `_share` takes no notice of them.
        """
        settings = self.settings
        if settings.test_from == "balanced":
            return np.sort(pool.rows[~pool.may_train])
        tests = np.flatnonzero(self.official == 1)
        if settings.test_from == "official-all":
            rng = self.random("official-all")
            tests = tests[proportional(self.labels[tests], settings.test_samples, rng)]
        return tests

    def _for_validation(self, pool: Pool) -> Bools:
        """Return which samples are set aside for validation before the pool is dealt.

        The result is bool over all rows of the data set. If the data set has a validation part, it
        is that. Without one, about ``validation-fraction`` of the training samples are chosen here
        if a hash decides, or if samples of one person stay together. Otherwise none are:
        `_validated` chooses in each share by itself.
        """
        fraction = self.settings.validation_fraction
        if self.official_validation.any() or not self.reserves_validation:
            return self.official_validation

        rows = pool.rows[pool.may_train]
        if self.is_keyed:
            chosen = rows[self._hashes("validation", rows) < fraction]
        else:
            # 0 stands where `_validated` has a client's number: this draw is for all of them
            rng = self.random("validation", 0, self.domain)
            _, positions = set_aside(self.labels[rows], fraction, rng)
            chosen = self._rows_aside(rows, positions, rng)
        is_chosen = np.zeros(len(self.labels), dtype=bool)
        is_chosen[chosen] = True
        return is_chosen

    def _rows_aside(
        self, rows: Ints, aside: Ints, rng: Generator, *, for_testing: bool = False
    ) -> Ints:
        """Return the rows at positions ``aside``; if `by_client`, rows of whole persons instead.

        A person (N) is a value of the data's column `client`. Then ``aside`` only says how many
        samples of each class (C) are wanted. Persons are asked in random order. One is set aside
        if that brings the amounts clearly nearer to the wanted ones, and leaves some samples of
        each class. With ``for_testing`` they are asked again, those with few samples first, and
        one is set aside if it has a class that nobody aside has: so each class that two persons
        have is tested.
        """
        if not self.by_client:
            return rows[aside]
        labels = self.labels[rows]
        classes = len(self.strata_names)
        persons, person_of_row = np.unique(self.owners[rows], return_inverse=True)
        cells = person_of_row * classes + labels  # a number for each pair of person and class
        counts_NC = np.bincount(cells, minlength=len(persons) * classes).reshape(-1, classes)

        # all amounts are parts of a class: 1 is all its samples
        part_of_a_sample_C = 1 / np.maximum(np.bincount(labels, minlength=classes), 1)
        has_NC = counts_NC * part_of_a_sample_C
        wanted_C = np.bincount(labels[aside], minlength=classes) * part_of_a_sample_C
        aside_C = np.zeros(classes)

        is_aside_N = np.zeros(len(persons), dtype=bool)
        order = rng.permutation(len(persons))
        turns = order
        if for_testing:
            small_first = order[has_NC[order].sum(1).argsort(kind="stable")]
            turns = np.concatenate([order, small_first])
        for turn, person in enumerate(turns):
            if (aside_C >= wanted_C - ROUNDING_ERROR).all():
                break
            with_person_C = aside_C + has_NC[person]
            takes_all_of_a_class = (with_person_C >= 1 - ROUNDING_ERROR).any()
            if is_aside_N[person] or takes_all_of_a_class:
                continue
            gain = (abs(wanted_C - aside_C) - abs(wanted_C - with_person_C)).sum()
            # the gain is what is wanted of this person's samples, less what is not wanted of them
            is_clearly_nearer = gain >= has_NC[person].sum() / 2
            is_asked_again = turn >= len(order)
            brings_a_class = (with_person_C > 0)[aside_C == 0].any()
            if is_clearly_nearer or (is_asked_again and brings_a_class):
                is_aside_N[person] = True
                aside_C = with_person_C
        return rows[is_aside_N[person_of_row]]

    def _dealt(self, pool: Pool, clients: int) -> list[Ints]:
        """Deal the pool by the run's partition; return the positions of each client's samples.

        If the samples of one person stay together, deal anew until each client has samples for
        training and for testing, at most `MOST_DRAWS` times. The last division then stands, and
        `shares` refuses a client that lacks some.
        """
        settings = self.settings
        divide = DIVIDE[settings.partition]
        rng = self.random("partition", settings.partition, self.domain)
        if not self.by_client:
            return divide(pool, settings, clients, rng)

        is_free = ~self.reserved[pool.rows]  # not for validation
        may_train = pool.may_train
        # samples for training, and for testing if the pool has such
        needed_sides = 1 if may_train.all() else 2
        for _ in range(MOST_DRAWS):
            dealt = divide(pool, settings, clients, rng)
            sides_of = [np.unique(may_train[share[is_free[share]]]) for share in dealt]
            if all(len(sides) == needed_sides for sides in sides_of):
                break
        return dealt

    # -- a share
    def _share(self, client: int, pool: Pool, dealt: Ints, tests: Ints) -> Share:
        """Return the client's rows for training, testing and validation.

        ``dealt`` are the positions in the pool that it was dealt, ``tests`` the rows for tests that
        are in nobody's share. Of the samples for training at most ``train-samples`` stay. The
        others are unused, or for testing, too, if the share is split here.
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

        choose = balanced if self.partition.balances_classes else proportional
        chosen = choose(self.labels[train], settings.train_samples, rng)
        if is_split_here:
            tests = np.concatenate([tests, np.delete(train, chosen)])
        train = np.sort(train[chosen])

        tests = self._tested(train, tests, rng)
        train, validation = self._validated(client, train, pool.rows[dealt])
        return Share(train, tests, validation)

    def _tested(self, train: Ints, tests: Ints, rng: Generator) -> Ints:
        """Choose among ``tests`` the rows that a client with these training rows is tested on.

        They are at most ``test-samples``, or all if that is 0. With "official" they are of the
        classes that the client trains on. With "balanced" they are of its domains, and equally many
        of each class: if ``test-samples`` is 0, as many as the rarest class allows. DataError if
        there are none, or nothing to train on.
        """
        settings = self.settings
        mode = settings.test_from
        limit = settings.test_samples
        choose = proportional
        if mode == "official-all":  # capped once, for all clients alike
            return tests
        if mode == "official":
            tests = self._tests_of_classes(np.unique(self.labels[train]), tests)
            if not limit:
                return tests
        elif mode == "balanced":
            tests = tests[np.isin(self.domains[tests], self.domains[train])]
            if not len(tests):
                raise DataError(
                    "test-from = 'balanced': "
                    "a client's domain has no sample left to test on; use split"
                )
            _, counts = np.unique(self.labels[tests], return_counts=True)
            limit = limit or len(counts) * counts.min()
            choose = balanced

        tests = np.sort(tests[choose(self.labels[tests], limit, rng)])
        if not (len(train) and len(tests)):
            raise DataError(
                f"partition = {settings.partition!r}, test-from = {mode!r}: "
                f"a client has {len(train)} training and {len(tests)} test samples; "
                "leave out classes of few samples, or of one `client`, "
                "or use fewer clients or more total-samples"
            )
        return tests

    def _tests_of_classes(self, classes: Ints, tests: Ints) -> Ints:
        """Return the official test samples of these classes; DataError if there is none.

        They are found once for each set of classes, as many clients have the same set.
        """
        key = classes.tobytes()
        if key not in self.tests_of:
            self.tests_of[key] = tests[np.isin(self.labels[tests], classes)]
        if not len(self.tests_of[key]):
            names = ", ".join(sorted(self.strata_names[label] for label in classes))
            raise DataError(
                f"test-from = 'official': the official test part has no sample of classes {names}"
            )
        return self.tests_of[key]

    def _validated(self, client: int, train: Ints, share: Ints) -> tuple[Ints, Ints]:
        """Return a client's rows for training, and those for validation.

        ``train`` are the rows for training so far, ``share`` all rows that it was dealt. A
        validation part of the data set that is in nobody's share is for all clients: with
        "official-all" as a whole, otherwise as far as it is of the classes that the client trains
        on. Where rows are reserved for validation before the pool is dealt, the client has those in
        its share. In other cases ``validation-fraction`` of ``train`` is set aside here.
        """
        settings = self.settings
        if self.validates_in_common:
            validation = np.flatnonzero(self.official_validation)
            if settings.test_from != "official-all":
                is_of_trained_class = np.isin(self.labels[validation], self.labels[train])
                validation = validation[is_of_trained_class]
            return train, validation
        if self.reserves_validation or not settings.validation_fraction:
            return train, np.sort(share[self.reserved[share]])
        rng = self.random("validation", client, self.domain)
        stay, aside = set_aside(self.labels[train], settings.validation_fraction, rng)
        return train[stay], train[aside]

    def _too_few(self, what: str) -> DataError:
        return DataError(
            f"partition = {self.settings.partition!r}: {what} "
            "(each needs one for training and one for testing); "
            "use fewer clients (num-partitions), a larger total-samples or another partition"
        )

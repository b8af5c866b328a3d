"""Whose samples a client has: what differential privacy counts once.

Under ``dp = "person"`` neighbours differ in all samples of one person. So wherever samples are used
for what leaves, each person is drawn, and counts, once, however many samples there are of it:

- a private step draws persons, and cuts the mean gradient of a person's samples to C;
- a table of classes has one sample of each person, drawn anew for each table;
- a test or validation set has one sample of each person, and no person is in both.

The number of a person's samples, and which of them is drawn, concern this person alone. So given
these draws two neighbours differ in one row of a sum, of the length that the noise is for; and
Rényi divergence is quasi-convex, so that it is no larger for the mixture over the draws (van Erven
and Harremoës, "Rényi Divergence and Kullback-Leibler Divergence", 2014, Theorem 13).

Under ``dp = "sample"`` each sample is taken for a person of its own, and nothing is drawn.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from protofl_common.data.raw import Ints


class Persons:
    """The persons whose samples a data set has, and the rows of each.

    It is made of [N] numbers, one for each row, which are equal where the person is the same.
    """

    def __init__(self, owners_N: Ints) -> None:
        self.samples = len(owners_N)
        # the rows of one person after those of another; where each person's begin, and how many
        self._rows_N: Ints = np.argsort(owners_N, kind="stable")
        _, self._sizes_P = np.unique(owners_N, return_counts=True)
        self._starts_P = np.cumsum(self._sizes_P) - self._sizes_P

    @classmethod
    def one_per_sample(cls, samples: int) -> "Persons":
        """Return as many persons as samples, of whom each has one."""
        return cls(np.arange(samples))

    def __len__(self) -> int:
        return len(self._sizes_P)

    def first_of_each(self) -> Ints:
        """Return the first row of each person, in rising order.

        They are the first and not drawn from a seed: one person more would then change which
        samples of the others are taken.
        """
        return np.sort(self._rows_N[self._starts_P])

    def one_of_each(self, draw: np.random.Generator) -> Ints:
        """Draw one row of each person, [P]."""
        # which of the person's rows, from 0
        chosen_P = (draw.random(len(self)) * self._sizes_P).astype(np.int64)
        rows_P: Ints = self._rows_N[self._starts_P + chosen_P]
        return rows_P

    def rows_of(
        self, persons: Ints, most: int, draw: np.random.Generator
    ) -> tuple[Ints, list[int]]:
        """Return the rows of these ``persons``, one person after another, and how many of each.

        Of a person with more than ``most`` rows, ``most`` are drawn. At least one person is given.
        """
        rows_of_each = []
        for person in persons:
            start = self._starts_P[person]
            rows = self._rows_N[start : start + self._sizes_P[person]]
            if len(rows) > most:
                rows = draw.choice(rows, most, replace=False)
            rows_of_each.append(rows)
        return np.concatenate(rows_of_each), [len(rows) for rows in rows_of_each]


def sizes_in_groups(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Split the numbers of rows of persons, in their order, into groups of at most ``most`` rows.

    A person with more rows is a group alone.
    """
    group: list[int] = []
    total = 0
    for size in sizes:
        if group and total + size > most:
            yield group
            group = []
            total = 0
        group.append(size)
        total += size
    yield group

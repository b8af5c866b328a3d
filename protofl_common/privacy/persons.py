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
    """The rows of each person, by numbers [N] that say whose each sample is."""

    def __init__(self, owners_N: Ints) -> None:
        self.samples = len(owners_N)
        self._rows_N: Ints = np.argsort(owners_N, kind="stable")
        _, self._sizes_P = np.unique(owners_N, return_counts=True)
        self._starts_P = np.cumsum(self._sizes_P) - self._sizes_P

    @classmethod
    def apart(cls, samples: int) -> "Persons":
        """So many samples, each of another person."""
        return cls(np.arange(samples))

    def __len__(self) -> int:
        return len(self._sizes_P)

    def first_of_each(self) -> Ints:
        """The first row of each person, in rising order.

        No draw from a seed: then one person more would change which samples of others are taken.
        """
        return np.sort(self._rows_N[self._starts_P])

    def one_of_each(self, draw: np.random.Generator) -> Ints:
        """One row of each person, drawn at random, [P]."""
        steps_P = (draw.random(len(self)) * self._sizes_P).astype(np.int64)
        rows_P: Ints = self._rows_N[self._starts_P + steps_P]
        return rows_P

    def rows_of(
        self, persons: Ints, most: int, draw: np.random.Generator
    ) -> tuple[Ints, list[int]]:
        """The rows of these ``persons``, one after the other, and how many each has.

        Of more than ``most`` rows of a person so many are drawn at random.
        """
        rows = []
        for person in persons:
            start = self._starts_P[person]
            own = self._rows_N[start : start + self._sizes_P[person]]
            rows.append(own if len(own) <= most else draw.choice(own, most, replace=False))
        return np.concatenate(rows), [len(own) for own in rows]


def few_at_a_time(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Split ``sizes`` into parts that add up to ``most``, or are of one person who has more."""
    part: list[int] = []
    total = 0
    for size in sizes:
        if part and total + size > most:
            yield part
            part = []
            total = 0
        part.append(size)
        total += size
    yield part

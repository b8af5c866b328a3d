"""Membership inference: how well scores tell a client's training samples from others of the same class."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Candidates(NamedTuple):
    """Scores of samples of one class, higher for likelier members of one client's training data."""

    members: Floats  # [n]
    others: Floats  # [m], of the same class and origin

    @property
    def auc(self) -> float:
        """The chance that a member scores above another; a tie counts half."""
        above_NM = np.sign(self.members[:, None] - self.others[None, :])
        return float((above_NM.mean() + 1) / 2)


class Finding(NamedTuple):
    """The result of an attack over the classes of all clients."""

    classes: int  # groups of candidates
    advantage: float  # 2 · AUC − 1, averaged by members: 0 for guessing, 1 for naming all
    error: float  # its standard deviation under guessing: that of the Mann-Whitney statistic
    named: int  # classes whose likeliest candidate is a member
    by_chance: float  # how many that is for guessing

    @property
    def above_chance(self) -> bool:
        """Return whether guessing does as well in fewer than 1 of 1000 audits (three deviations)."""
        return self.advantage > 3 * self.error


def finding(groups: Iterable[Candidates]) -> Finding | None:
    """All groups together; None without any that has members and others."""
    sound = [group for group in groups if len(group.members) and len(group.others)]
    if not sound:
        return None
    sizes = np.array([(len(group.members), len(group.others)) for group in sound], dtype=float)
    weights = sizes[:, 0] / sizes[:, 0].sum()
    variances = 4 * (sizes.sum(axis=1) + 1) / (12 * sizes.prod(axis=1))
    return Finding(
        classes=len(sound),
        advantage=float(weights @ [2 * group.auc - 1 for group in sound]),
        error=math.sqrt(float(weights**2 @ variances)),
        named=sum(bool(group.members.max() > group.others.max()) for group in sound),
        by_chance=float((sizes[:, 0] / sizes.sum(axis=1)).sum()),
    )

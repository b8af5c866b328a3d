"""The sample of a round's clients: seeded, by the sites' own names, independent of Flower's random node ids."""

from collections.abc import Iterable

import numpy as np

from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import in_order


def number_asked(sites: int, participation: float) -> int:
    """How many of ``sites`` take part in a round: ``participation`` of them, rounded, and at least one."""
    return max(1, round(participation * sites))


def sample_sites(sites: Iterable[str], participation: float, seed: int, server_round: int) -> list[str]:
    """`number_asked` of the sites, without replacement, in natural order."""
    ordered = in_order(sites)
    number = number_asked(len(ordered), participation)
    if number == len(ordered):
        return ordered
    generator = np.random.default_rng(derive_seed(seed, "sampling", server_round))
    chosen = generator.choice(len(ordered), size=number, replace=False)
    return [ordered[index] for index in sorted(chosen)]

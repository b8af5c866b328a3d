"""The bounds that follow from ``liars``: they limit how far lying sites can move the server's aggregate.

Unless the run says otherwise, one of three or more sites with operators may lie, and in simulation, whose clients are
one person's own, the algorithms' equations hold as they stand. An expert's key counts in place of what would follow.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from protofl_common.experiment.settings import Settings
from protofl_common.maths.aggregation import FEWEST
from protofl_common.wire.records import SiteCard
from protofl_common.wire.schema import vectors_in
from server_app.network.admission import number_asked

RATIOS = {"norm_ratio": 5.0, "update_ratio": 2.0, "samples_ratio": 8.0, "samples_lead": 2.0}
"""The bounds with liars; honest prototypes are up to 2.9 times the median, in round 1 of unlike networks 5.9 times."""
WIDE_NORM_RATIO = 1000.0  # Without liars: what only a broken client sends


@dataclass(frozen=True)
class Bounds:
    """The bounds in a federation; infinity where there is none."""

    liars: int = 0
    max_norm_ratio: float = WIDE_NORM_RATIO
    max_update_ratio: float = math.inf
    max_samples_ratio: float = math.inf
    max_samples_lead: float = math.inf
    weights: tuple[str, float] = ("mean", 0)  # ``merging`` and ``trim`` of `aggregation.py`, for weights
    prototypes: tuple[str, float] = ("mean", 0)  # The same for what they send of classes

    def __str__(self) -> str:
        if not self.liars:
            return "liars = 0: no site may lie; one that does can spoil the result"
        return (
            f"liars = {self.liars}: replies above {self.max_norm_ratio:g} times the median norm are refused, changes "
            f"of weights cut to {self.max_update_ratio:g} times the median length; a site weighs at most as "
            f"{self.max_samples_ratio:g} times the median number of samples, and {self.max_samples_lead:g} times the "
            f"next; weights: {self.weights[0]}, prototypes: {self.prototypes[0]}"
        )


def bounds_of(settings: Settings, cards: Collection[SiteCard]) -> Bounds:
    liars, keys = settings.federation.liars, settings.bounds
    if liars < 0:  # one, where enough with operators take part, unless the server sees only their sum
        asked = number_asked(len(cards), settings.federation.participation)
        liars = int(any(card.real for card in cards) and asked >= FEWEST and not settings.privacy.sums_only)
    mean, merging = ("mean", 0.0), (keys.merging, keys.trim_fraction)
    trimmed = ("trimmed-mean", float(liars)) if liars and _comparable(settings, cards, liars) else mean
    usual = RATIOS if liars else dict.fromkeys(RATIOS, math.inf) | {"norm_ratio": WIDE_NORM_RATIO}
    ratios = {f"max_{name}": getattr(keys, f"max_{name}") or ratio for name, ratio in usual.items()}
    follows = (mean, trimmed) if keys.merging == "auto" else (merging, merging)
    return Bounds(liars, **ratios, weights=follows[0], prototypes=follows[1])


def _comparable(settings: Settings, cards: Collection[SiteCard], liars: int) -> bool:
    """Return whether the server averages vectors of classes that can be compared number by number.

    Features of networks with nothing in common cannot: their coordinate-wise median is close to zero. Weights, and
    what a server trains on or clusters, are not trimmed: among honest sites with unlike classes that costs accuracy.
    Where the run asks for one network, sites that name another count as the ``liars``, if they are no more than these.
    """
    archs = Counter(card.arch for card in cards)
    asked = {settings.architecture(number, settings.model.arch) for number in range(len(cards))}
    others = len(cards) - max(archs.values(), default=0)
    one_network = settings.starts_alike and (len(archs) == 1 or (len(asked) == 1 and others <= liars))
    of_classes = all(entry.width != "features" for entry in vectors_in(settings.exchange.up).values())
    return settings.row.averages_prototypes and (of_classes or one_network or settings.exchange.needs_one_architecture)

"""How many sites a round asks, and how far those that lie can move the aggregate (``liars``).

What each bound keeps off stands in `server_app/README.md`.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from protofl_common.experiment.settings import Settings
from protofl_common.maths.aggregation import MEAN, MIN_CLIENTS_FOR_MEDIAN, Aggregator
from protofl_common.wire.records import SiteCard
from protofl_common.wire.schema import vectors_in


def number_asked(sites: int, participation: float, fewest: int = 1) -> int:
    """Return how many of ``sites`` take part in a round.

    It is the fraction ``participation`` of them, rounded, but at least one, and at least ``fewest``
    or all sites if there are fewer.
    """
    return max(1, min(fewest, sites), round(participation * sites))


@dataclass(frozen=True)
class Bounds:
    """The bounds on uploads in a federation; infinity stands for no bound."""

    liars: int = 0
    max_norm_ratio: float = 1000.0
    """By default only the upload of a broken client is longer than this."""
    max_update_ratio: float = math.inf
    max_samples_ratio: float = math.inf
    max_samples_lead: float = math.inf
    weight_aggregator: Aggregator = MEAN
    prototype_aggregator: Aggregator = MEAN  # Of all that clients send of classes

    def __str__(self) -> str:
        if not self.liars:
            return "liars = 0: no site may lie; one that does can spoil the result"
        return (
            f"liars = {self.liars}: replies above {self.max_norm_ratio:g} times the median norm "
            f"are refused, changes of weights cut to {self.max_update_ratio:g} times the median "
            f"length; a site weighs at most as {self.max_samples_ratio:g} times the median number "
            f"of samples, and {self.max_samples_lead:g} times the next; "
            f"weights: {self.weight_aggregator.merging}, "
            f"prototypes: {self.prototype_aggregator.merging}"
        )


AGAINST_LIARS = Bounds(
    max_norm_ratio=5.0, max_update_ratio=2.0, max_samples_ratio=8.0, max_samples_lead=2.0
)
"""The ratios where sites may lie.

Honest prototypes are up to 2.9 times as long as the median, in round 1 of unlike networks up to 5.9
times.
"""


def bounds_of(settings: Settings, cards: Collection[SiteCard]) -> Bounds:
    """Return the bounds on these sites' uploads.

    A setting that is left open (0, or ``merging = "auto"``) follows from the number of liars.
    """
    liars = _expected_liars(settings, cards)
    chosen = settings.bounds
    if chosen.merging != "auto":
        by_setting = Aggregator(chosen.merging, trim=chosen.trim_fraction)
        for_weights = for_prototypes = by_setting
    else:
        for_weights = for_prototypes = MEAN
        if liars and _averages_comparable_prototypes(settings, cards, liars):
            # a ``trim`` of 1 or more is a number: so many values are left out at each end
            for_prototypes = Aggregator("trimmed-mean", trim=liars)

    default = AGAINST_LIARS if liars else Bounds()
    return Bounds(
        liars=liars,
        max_norm_ratio=chosen.max_norm_ratio or default.max_norm_ratio,
        max_update_ratio=chosen.max_update_ratio or default.max_update_ratio,
        max_samples_ratio=chosen.max_samples_ratio or default.max_samples_ratio,
        max_samples_lead=chosen.max_samples_lead or default.max_samples_lead,
        weight_aggregator=for_weights,
        prototype_aggregator=for_prototypes,
    )


def _expected_liars(settings: Settings, cards: Collection[SiteCard]) -> int:
    """Return how many sites may lie: ``liars``, or a default where that is left open (-1).

    The default is one if a site with an operator takes part and a round asks enough sites for a
    median, else none. It is none, too, where the server sees only the sum over sites, as single
    uploads cannot be compared then.
    """
    if settings.federation.liars >= 0:
        return settings.federation.liars
    if settings.privacy.sums_only or not any(card.real for card in cards):
        return 0
    asked = number_asked(len(cards), settings.federation.participation)
    return 1 if asked >= MIN_CLIENTS_FOR_MEDIAN else 0


def _averages_comparable_prototypes(
    settings: Settings, cards: Collection[SiteCard], liars: int
) -> bool:
    """Return whether the server averages prototypes whose coordinates mean the same at all sites.

    Only such means are trimmed by default. As many as ``liars`` of the ``cards`` may be false.
    Coordinates of features from networks with nothing in common cannot be compared: their median is
    close to zero. Weights, and vectors that a server trains on or clusters, are not trimmed, as
    that costs accuracy where honest sites have different classes.
    """
    if not settings.row.averages_prototypes:
        return False
    vectors = vectors_in(settings.exchange.up).values()
    if all(entry.width != "features" for entry in vectors):
        return True  # outputs of classes, or frozen features, are comparable at all sites
    return settings.exchange.needs_one_architecture or _share_a_network(settings, cards, liars)


def _share_a_network(settings: Settings, cards: Collection[SiteCard], liars: int) -> bool:
    """Return whether all sites have the same network, and begin with equal weights.

    Where the run's settings name one network for all, up to ``liars`` sites that name another one
    are ignored: they may lie.
    """
    if not settings.starts_alike:
        return False
    sites_with = Counter(card.arch for card in cards)  # network -> number of sites
    if len(sites_with) == 1:
        return True
    asked_for = {settings.architecture(number, settings.model.arch) for number in range(len(cards))}
    deviating_sites = len(cards) - max(sites_with.values(), default=0)
    return len(asked_for) == 1 and deviating_sites <= liars

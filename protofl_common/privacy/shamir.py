"""Shamir's secret sharing ("How to Share a Secret", CACM 1979) of 32 bytes among n clients.

The secret is f(0) mod p of a random polynomial f of degree t − 1, and client x has the share f(x): any t shares give
the secret, fewer tell nothing of it. p = 2^256 + 297 is the least prime above all secrets.

Flower's own (`flwr.common.secure_aggregation`) neither names a wrong share nor does without it, and takes a hundred
times as long for a hundred clients.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import reduce

PRIME = 2**256 + 297
SHARE = 33  # bytes of a share
FEWEST_SUMMED = 3  # clients whose sum hides one of them from the others


def needed(clients: int, fraction: float) -> int:
    """t, the threshold of so many clients."""
    return max(FEWEST_SUMMED, math.ceil(fraction * clients))


def points_of(sites: Iterable[str]) -> dict[str, int]:
    """At which point each site has its share, for everybody alike."""
    return {site: point for point, site in enumerate(sorted(sites), start=1)}


def split(secret: bytes, threshold: int, points: Iterable[int]) -> dict[int, bytes]:
    """Shares of the 32 bytes of ``secret`` at ``points`` of at least 1: ``threshold`` of them give it back."""
    polynomial = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    values = {x: reduce(lambda value, factor: (value * x + factor) % PRIME, reversed(polynomial), 0) for x in points}
    return {x: value.to_bytes(SHARE) for x, value in values.items()}


def recovered(
    shares: Mapping[int, bytes], threshold: int, fits: Callable[[bytes], bool]
) -> tuple[bytes, set[int]] | None:
    """The secret that ``fits``, and at which points the shares are wrong; None if no shares give one.

    Tried are ``threshold`` shares in a row, from every share on: with one share more, one may be wrong, and so on.
    """
    points, values = list(shares), {x: int.from_bytes(share) for x, share in shares.items()}
    for start in range(len(points) if len(points) >= threshold else 0):
        chosen = {x: values[x] for x in (points[start:] + points[:start])[:threshold]}
        secret = _at(0, chosen)
        if secret < 2**256 and fits(secret.to_bytes(32)):
            return secret.to_bytes(32), {x for x in points if x not in chosen and _at(x, chosen) != values[x]}
    return None


def _at(point: int, values: Mapping[int, int]) -> int:
    total = 0
    for x, value in values.items():
        others = [other for other in values if other != x]
        above, below = (math.prod(start - other for other in others) for start in (point, x))
        total += value * above * pow(below, -1, PRIME)
    return total % PRIME

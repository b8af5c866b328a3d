"""Shamir's secret sharing ("How to Share a Secret", CACM 1979), with commitments to the shares.

Symbols: p = 2^256 + 297, the least prime above all secrets; f a random polynomial mod p of degree t
− 1, f(0) the secret; f(x) the share at the point x.

Any t shares give the secret, fewer tell nothing of it. Their owner commits itself to the shares
that it deals by their digests, which say nothing either, as a share has 256 random bits. Who is
dealt a share that does not fit its digest does not keep it, so that one which comes back and does
not fit is a lie of who gave it. Do t that fit not give the secret, their owner lies. So it takes no
majority, and no decoding, to tell who does.
"""

import math
import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import sha256

PRIME = 2**256 + 297
SHARE = 33  # bytes of a share
DIGEST = 32  # bytes of the digest of one


def split(secret: bytes, threshold: int, points: Iterable[int]) -> dict[int, bytes]:
    """Return shares of a secret of 32 bytes by their ``points``, which are 1 or more.

    Any ``threshold`` of the shares give the secret back. The polynomial is drawn at random: two
    calls with one secret return different shares.
    """
    # its coefficients, of which the first is f(0)
    polynomial = [int.from_bytes(secret)]
    for _ in range(threshold - 1):
        polynomial.append(secrets.randbelow(PRIME))
    return {x: _value(polynomial, x).to_bytes(SHARE) for x in points}


def digest_of(share: bytes) -> bytes:
    return sha256(share).digest()


def secret_of(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret of 32 bytes that these ``shares`` give, by their points.

    There are ``threshold`` of them or more, of which that many are used. b"" where they give a
    number of more than 32 bytes: then somebody has lied.
    """
    points = tuple(sorted(shares)[:threshold])
    total = 0
    for x, weight in zip(points, _weights_at_0(points), strict=True):
        total += weight * int.from_bytes(shares[x])
    secret = total % PRIME
    return secret.to_bytes(32) if secret < 2**256 else b""


@lru_cache(maxsize=1024)
def _weights_at_0(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return w_x with f(0) = Σ w_x f(x), by Lagrange's formula: Π −other / (x − other), mod p."""
    weights = []
    for x in points:
        others = [other for other in points if other != x]
        numerator = math.prod(-other for other in others)
        denominator = math.prod(x - other for other in others)
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return tuple(weights)


def _value(polynomial: list[int], x: int) -> int:
    """Return the polynomial at x, mod p."""
    value = 0
    for coefficient in reversed(polynomial):  # Horner
        value = (value * x + coefficient) % PRIME
    return value

"""Masks that cancel in a sum (Bonawitz et al., "Practical Secure Aggregation", CCS 2017).

Symbols: x_u client u's vector, y_u what it sends; s_uv the key that u and v agree on, b_u one that is u's own; PRG a
stream of numbers mod 2^64; r_u all that u received from the server: the model's digest, and whose keys and shares.
Masks of clients that received different things do not cancel. Else a server could send all but u a model that no
training changes, and read u's vector in the sum (Pasquini, Francati and Ateniese, "Eluding Secure Aggregation in
Federated Learning via Model Inconsistency", 2022), or show u more keys, so that its numbers have another scale.

Masking     y_u = x_u + PRG(b_u) + Σ_{v: u<v} PRG(s_uv, r_u) − Σ_{v: v<u} PRG(s_uv, r_u)     mod 2^64
Unmasking   Σ x_u = Σ y_u − Σ PRG(b_u) over the clients that sent y_u, and for each that is lost its masks with them

A client's secret is three private keys of X25519, anew in every round: for shares under way to a peer (AES-GCM), for
the s_uv, and b_u, whose public key serves only to prove that the shares of it are right. PRG is AES in counter mode;
Flower's folds its key to 32 bits, all of which can be tried. Lost keys come back by Shamir's secret sharing ("How to
Share a Secret", CACM 1979): a secret is f(0) mod p of a random polynomial f of degree t − 1, and client x has the share
f(x): any t shares give the secret, fewer tell nothing of it. p = 2^256 + 297 is the least prime above all secrets.
"""

import math
import secrets
from collections.abc import Iterable, Mapping
from functools import reduce

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

PRIME = 2**256 + 297
SHARE = 33  # bytes of a share
FEWEST_SUMMED = 3  # clients whose sum hides one of them from the others
KEY, NONCE = 32, 12
SEALED = NONCE + 2 * SHARE + 16  # bytes of a key, of a nonce, and of two shares under way, with AES-GCM's tag
PUBLIC, SIGNATURE = 3 * KEY, 64  # bytes of a site's public keys, and of the signature of them, which follows
SIGNED = PUBLIC + SIGNATURE
SEALING, PAIR, OWN = range(3)  # which of the three keys


def new_secret() -> bytes:
    return secrets.token_bytes(3 * KEY)


def public_of(secret: bytes) -> bytes:
    """The public keys of as many private ones as are given."""
    privates = (X25519PrivateKey.from_private_bytes(part(secret, i)) for i in range(len(secret) // KEY))
    return b"".join(private.public_key().public_bytes_raw() for private in privates)


def introducing(algo: str, number: int, keys: bytes) -> str:
    """Return what a site signs of its public keys, the first bytes of ``keys``, for a sum of a run or its baseline."""
    return f"keys {keys[:PUBLIC].hex()} for sum {number} of {algo}"


def are_keys(public: bytes) -> bool:
    """Return whether one can agree on a secret with the owner of three public keys."""
    try:
        return all(_agreed(part(new_secret(), which), part(public, which)) for which in (SEALING, PAIR, OWN))
    except ValueError:
        return False


def part(keys: bytes, which: int) -> bytes:
    return keys[which * KEY : (which + 1) * KEY]


def seal(secret: bytes, public: bytes, way: str, text: bytes) -> bytes:
    """``text`` for the owner of the keys ``public``; ``way``: from whom to whom, which the receiver must know."""
    nonce = secrets.token_bytes(NONCE)
    return nonce + AESGCM(_agreed(part(secret, SEALING), part(public, SEALING))).encrypt(nonce, text, way.encode())


def opened(secret: bytes, public: bytes, way: str, sealed: bytes) -> bytes:
    """The inverse of `seal`; cryptography's InvalidTag if anything does not belong together."""
    key = _agreed(part(secret, SEALING), part(public, SEALING))
    return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], way.encode())


def received(payload: str, keys: Iterable[str], shared: Iterable[str]) -> str:
    """r_u, of the digest of the ``payload``, and the names of those whose keys and whose shares u was shown."""
    return f"{payload} {sorted(keys)} {sorted(shared)}"


def masked(vector: np.ndarray, secret: bytes, site: str, keys: Mapping[str, bytes], received: str) -> np.ndarray:
    """y_u [L] of ``vector`` [L] uint64; ``keys``: the public keys of all whose masks shall cancel, its own too."""
    total: np.ndarray = vector + own_mask(part(secret, OWN), len(vector))
    for peer in keys.keys() - {site}:
        total += pair_mask(part(secret, PAIR), site, peer, keys[peer], len(vector), received)
    return total


def own_mask(secret: bytes, length: int) -> np.ndarray:
    """PRG(b_u) [L] uint64."""
    return _stream(_derived(secret), length)


def pair_mask(secret: bytes, site: str, peer: str, public: bytes, length: int, received: str) -> np.ndarray:
    """± PRG(s_uv, r_u) [L] uint64 as ``site`` adds it; what its ``peer`` adds is the negative of it."""
    stream = _stream(_derived(_agreed(secret, part(public, PAIR)) + received.encode()), length)
    return stream if site < peer else 0 - stream


def _agreed(secret: bytes, public: bytes) -> bytes:
    """ValueError for a public key that would make the result known to everybody."""
    return _derived(X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public)))


def _derived(secret: bytes) -> bytes:
    return HKDF(SHA256(), KEY, salt=None, info=b"protofl").derive(secret)


def _stream(key: bytes, length: int) -> np.ndarray:
    """PRG [L] uint64; a key is used once, so the counter may start at 0."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, "<u8").astype(np.uint64)


# -- shares of a secret
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


def recovered(shares: Mapping[int, bytes], threshold: int, public: bytes) -> tuple[bytes, set[int]] | None:
    """The secret of the ``public`` key, and at which points the shares are wrong; None if no shares give it.

    Tried are ``threshold`` shares in a row, from every share on: with one share more, one may be wrong, and so on.
    """
    points, values = list(shares), {x: int.from_bytes(share) for x, share in shares.items()}
    for start in range(len(points) if len(points) >= threshold else 0):
        chosen = {x: values[x] for x in (points[start:] + points[:start])[:threshold]}
        secret = _at(0, chosen)
        if secret < 2**256 and public_of(secret.to_bytes(32)) == public:
            return secret.to_bytes(32), {x for x in points if x not in chosen and _at(x, chosen) != values[x]}
    return None


def _at(point: int, values: Mapping[int, int]) -> int:
    total = 0
    for x, value in values.items():
        others = [other for other in values if other != x]
        above, below = (math.prod(start - other for other in others) for start in (point, x))
        total += value * above * pow(below, -1, PRIME)
    return total % PRIME

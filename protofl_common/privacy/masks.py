"""Masks that cancel in a sum (Bonawitz et al., "Practical Secure Aggregation", CCS 2017).

Symbols: x_u client u's vector, y_u what it sends; s_uv the key that u and v agree on, b_u one that
is u's own; PRG a stream of numbers mod 2^64; r_u all that u received from the server: the whole
message, and whose keys and shares. Masks of clients that received different things do not cancel.
Else a server could send all but u a model that no training changes, or tell them that another of
their own models counts, and read u's vector in the sum (Pasquini, Francati and Ateniese, "Eluding
Secure Aggregation in Federated Learning via Model Inconsistency", 2022), or show u more keys, so
that its numbers have another scale.

Masking     y_u = x_u + PRG(b_u) + Σ_{v: u<v} PRG(s_uv, r_u) − Σ_{v: v<u} PRG(s_uv, r_u)
Unmasking   Σ x_u = Σ y_u − Σ PRG(b_u) over the clients that sent y_u, and for each that is lost
            its masks with them
All of it is mod 2^64.

A client's secret is three private keys of X25519, anew in every sum: for shares under way to a peer
(AES-GCM), for the s_uv, and b_u, whose public key serves only to prove that the shares of it are
right. No key is used as it was agreed on: all are derived for one sum, one use and the names of
both ends (`SumName`), so that a client that copies another's public key has other masks with its
peers. PRG is AES in counter mode; Flower's folds its key to 32 bits, all of which can be tried.
Lost keys come back by secret sharing (`shares.py`).
"""

import hashlib
import json
import math
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protofl_common.privacy.shares import SHARE

FEWEST_SUMMED = 3  # clients whose sum hides one of them from the others
SEALING, PAIR, OWN = range(3)  # which of a client's three keys
KEY = 32  # bytes of a key
PUBLIC = 3 * KEY  # bytes of a site's public keys
SIGNATURE = 64  # bytes of the signature of them, which follows
SIGNED = PUBLIC + SIGNATURE
NONCE = 12  # bytes, of AES-GCM
SEALED = NONCE + 2 * SHARE + 16  # bytes of two shares under way, with AES-GCM's tag
FIELD = 2**255 - 19  # X25519's field; a public key is a number below


@dataclass(frozen=True)
class SumName:
    """Which sum keys are for; no two sums of any runs have the same name."""

    study: str  # its id, which stands for all settings; a run without a study has one, too
    run_id: int
    algo: str  # the run's, or its baseline's
    number: int  # as in `sums.sum_after`

    def key(self, agreed: bytes, use: str, *names: str) -> bytes:
        """Derive the key for one use, between these sites, of what they agree on (HKDF)."""
        about = ["protofl", self.study, self.run_id, self.algo, self.number, use, *names]
        return HKDF(SHA256(), KEY, salt=None, info=json.dumps(about).encode()).derive(agreed)


# -- keys
def new_secret() -> bytes:
    """Three private keys."""
    return b"".join(_clamped(secrets.token_bytes(KEY)) for _ in (SEALING, PAIR, OWN))


def _clamped(private: bytes) -> bytes:
    """Set the five bits of a private key that X25519 ignores as it would use them (RFC 7748, 5)."""
    return bytes([private[0] & 248, *private[1:-1], private[-1] & 127 | 64])


def public_of(secret: bytes) -> bytes:
    """Return the public keys of as many private ones as are given."""
    public = b""
    for which in range(len(secret) // KEY):
        private = X25519PrivateKey.from_private_bytes(key_of(secret, which))
        public += private.public_key().public_bytes_raw()
    return public


def is_secret_of(public: bytes, secret: bytes) -> bool:
    """Return whether this is the private key of a ``public`` key, in its only valid spelling.

    Else a wrong share could give a secret with other bits where X25519 ignores them, whose masks
    would be others.
    """
    return secret == _clamped(secret) and public_of(secret) == public


def introducing(algo: str, number: int, keys: bytes) -> str:
    """Return the text that a site signs for its public keys of a sum; ``keys`` begin with them."""
    return f"keys {keys[:PUBLIC].hex()} for sum {number} of {algo}"


def are_keys(keys: bytes) -> bool:
    """Return whether one can agree on a secret with the owner of three public keys.

    X25519 ignores a key's highest bit and takes it mod p. Of several spellings of one key only the
    shortest is valid, so that keys which differ are different ones.
    """
    publics = _three(keys)
    if any(int.from_bytes(public, "little") >= FIELD for public in publics):
        return False
    try:
        for public in publics:
            _agreed(new_secret()[:KEY], public)
    except ValueError:
        return False
    return True


def sharing_a_key(keys: Mapping[str, bytes]) -> set[str]:
    """Return the sites one of whose three public keys occurs twice, at two sites or one."""
    times: Counter[bytes] = Counter()
    for its_keys in keys.values():
        times.update(_three(its_keys))
    sharing = set()
    for site, its_keys in keys.items():
        if any(times[public] > 1 for public in _three(its_keys)):
            sharing.add(site)
    return sharing


def key_of(keys: bytes, which: int) -> bytes:
    return keys[which * KEY : (which + 1) * KEY]


def _three(keys: bytes) -> list[bytes]:
    return [key_of(keys, which) for which in (SEALING, PAIR, OWN)]


def _agreed(secret: bytes, public: bytes) -> bytes:
    """Return what the owners of both keys know, and nobody else.

    ValueError for a public key that would make it known to everybody.
    """
    own = X25519PrivateKey.from_private_bytes(secret)
    return own.exchange(X25519PublicKey.from_public_bytes(public))


# -- shares under way
def seal(
    name: SumName, secret: bytes, public: bytes, sender: str, receiver: str, text: bytes
) -> bytes:
    """Encrypt ``text``; the ``secret`` is the sender's, the ``public`` keys the receiver's."""
    nonce = secrets.token_bytes(NONCE)
    cipher = _sealing(name, secret, public, sender, receiver)
    return nonce + cipher.encrypt(nonce, text, None)


def opened(
    name: SumName, secret: bytes, public: bytes, sender: str, receiver: str, sealed: bytes
) -> bytes:
    """Decrypt what `seal` returns; the ``secret`` is the receiver's, the ``public`` the sender's.

    Cryptography's InvalidTag if anything does not belong together.
    """
    cipher = _sealing(name, secret, public, sender, receiver)
    return cipher.decrypt(sealed[:NONCE], sealed[NONCE:], None)


def _sealing(name: SumName, secret: bytes, public: bytes, sender: str, receiver: str) -> AESGCM:
    agreed = _agreed(key_of(secret, SEALING), key_of(public, SEALING))
    return AESGCM(name.key(agreed, "share", sender, receiver))


# -- masks
def received(message: str, keys: Iterable[str], shared: Iterable[str]) -> str:
    """Return r_u of the digest of a ``message`` and the sites whose keys and shares u was shown."""
    text = json.dumps([message, sorted(keys), sorted(shared)])
    return hashlib.sha256(text.encode()).hexdigest()


def masked(
    name: SumName,
    vector: np.ndarray,
    secret: bytes,
    site: str,
    keys: Mapping[str, bytes],
    received: str,
) -> np.ndarray:
    """Return y_u [L] of ``vector`` [L] uint64.

    ``keys``: the public keys of all whose masks shall cancel, its own too.
    """
    total: np.ndarray = vector + own_mask(name, key_of(secret, OWN), site, len(vector))
    pair_secret = key_of(secret, PAIR)
    for peer in keys.keys() - {site}:
        total += pair_mask(name, pair_secret, site, peer, keys[peer], len(vector), received)
    return total


def own_mask(name: SumName, secret: bytes, site: str, length: int) -> np.ndarray:
    """Return PRG(b_u) [L] uint64."""
    return _stream(name.key(secret, "own mask", site), length)


def pair_mask(
    name: SumName, secret: bytes, site: str, peer: str, public: bytes, length: int, received: str
) -> np.ndarray:
    """Return ± PRG(s_uv, r_u) [L] uint64 as ``site`` adds it; its ``peer`` adds the negative."""
    agreed = _agreed(secret, key_of(public, PAIR))
    stream = _stream(name.key(agreed, "pair mask", *sorted((site, peer)), received), length)
    return stream if site < peer else 0 - stream


def _stream(key: bytes, length: int) -> np.ndarray:
    """Return PRG [L] uint64; a key is used once, so the counter may start at 0."""
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16)))
    stream = cipher.encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, "<u8").astype(np.uint64)


# -- how many share, and where
def needed(clients: int, fraction: float) -> int:
    """Return t, the threshold of so many clients."""
    return max(FEWEST_SUMMED, math.ceil(fraction * clients))


def most_liars(clients: int, threshold: int) -> int:
    """Return how many of n clients may lie, or help a lying server, without harm: c < 2t − n."""
    return max(1, 2 * threshold - clients - 1)


def points_of(sites: Collection[str]) -> dict[str, int]:
    """Map each site to the point of its share; all sites compute the same."""
    return {site: point for point, site in enumerate(sorted(sites), start=1)}

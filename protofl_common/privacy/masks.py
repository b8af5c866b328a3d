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
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protofl_common.privacy.shares import DIGEST, SHARE, digest_of

FEWEST_SUMMED = 3  # clients whose sum hides one of them from the others
SEALING, PAIR, OWN = range(3)  # which of a client's three keys
KEY = 32  # bytes of a key
PUBLIC = 3 * KEY  # bytes of a site's public keys
SIGNATURE = 64  # bytes of the signature of them, which follows
SIGNED = PUBLIC + SIGNATURE
NONCE = 12  # bytes, of AES-GCM
COMMITMENT = 2 * DIGEST  # bytes of the digests of a share of the PAIR and of the OWN key
SEALED = NONCE + 2 * SHARE + 16 + COMMITMENT  # bytes of both under way, with AES-GCM's tag
FIELD = 2**255 - 19  # X25519's field; a public key is a number below


@dataclass(frozen=True)
class SumName:
    """Which sum keys are for; no two sums of any runs have the same name."""

    study: str  # its id, which stands for all settings; a run without a study has one, too
    run_id: int
    algo: str  # the run's, or its baseline's
    number: int  # as in `sums.sum_after`

    def key(self, agreed: bytes, use: str, *names: str) -> bytes:
        """Derive a key from the secret that two sites have ``agreed`` on, by HKDF.

        It is another for every sum, every ``use`` and all other ``names``: those of the sites that
        use it, and whatever else both must know to get the same key.
        """
        about = ["protofl", self.study, self.run_id, self.algo, self.number, use, *names]
        return HKDF(SHA256(), KEY, salt=None, info=json.dumps(about).encode()).derive(agreed)


# -- keys
def new_secret() -> bytes:
    """Draw three private keys of X25519, and return them one after another."""
    return b"".join(_clamped(secrets.token_bytes(KEY)) for _ in (SEALING, PAIR, OWN))


def _clamped(private: bytes) -> bytes:
    """Return a private key with the five bits that X25519 does not read as RFC 7748 sets them."""
    return bytes([private[0] & 248, *private[1:-1], private[-1] & 127 | 64])


def public_of(secret: bytes) -> bytes:
    """Return the public keys of one or more private ones, in the same order."""
    public = b""
    for which in range(len(secret) // KEY):
        private = X25519PrivateKey.from_private_bytes(key_of(secret, which))
        public += private.public_key().public_bytes_raw()
    return public


def is_secret_of(public: bytes, secret: bytes) -> bool:
    """Return whether ``secret`` is the private key of ``public``, and all its bits are valid.

    X25519 does not read five of the bits, so that 32 private keys have the same public one; masks
    depend on all bits. Only one of these keys is valid, else a wrong share could change the masks
    and yet give a private key that fits.
    """
    return secret == _clamped(secret) and public_of(secret) == public


def text_to_sign(algo: str, number: int, keys: bytes) -> str:
    """Return the text whose signature shows that a site's public keys for a sum are its own.

    ``algo`` and ``number`` are those of the sum's `SumName`. Of ``keys`` only the first `PUBLIC`
    bytes count, as the signature may follow them.
    """
    return f"keys {keys[:PUBLIC].hex()} for sum {number} of {algo}"


def are_valid_keys(keys: bytes) -> bool:
    """Return whether these are three public keys with whose owner one can agree on secrets.

    Each must be below p = `FIELD`. X25519 ignores a key's highest bit and takes it mod p, so that
    larger numbers are other spellings of the same keys, and `sites_sharing_a_key` would not see
    that. A key with which everybody would know the secret is not valid either.
    """
    publics = _three(keys)
    if any(int.from_bytes(public, "little") >= FIELD for public in publics):
        return False
    try:
        for public in publics:
            _agree(new_secret()[:KEY], public)  # it fails with every private key, or with none
    except ValueError:
        return False
    return True


def sites_sharing_a_key(keys: Mapping[str, bytes]) -> set[str]:
    """Return the sites one of whose three public keys is another site's too, or occurs twice."""
    occurrences: Counter[bytes] = Counter()
    for keys_of_site in keys.values():
        occurrences.update(_three(keys_of_site))
    sharing = set()
    for site, keys_of_site in keys.items():
        if any(occurrences[public] > 1 for public in _three(keys_of_site)):
            sharing.add(site)
    return sharing


def key_of(keys: bytes, which: int) -> bytes:
    """Return one of a site's three keys: `SEALING`, `PAIR` or `OWN`."""
    return keys[which * KEY : (which + 1) * KEY]


def _three(keys: bytes) -> list[bytes]:
    return [key_of(keys, which) for which in (SEALING, PAIR, OWN)]


def _agree(secret: bytes, public: bytes) -> bytes:
    """Return what a private key and a peer's public one agree on, by X25519.

    Only the owners of both know it. ValueError for a public key with which everybody would.
    """
    private = X25519PrivateKey.from_private_bytes(secret)
    return private.exchange(X25519PublicKey.from_public_bytes(public))


# -- shares under way
def seal(
    name: SumName, secret: bytes, public: bytes, sender: str, receiver: str, text: bytes
) -> bytes:
    """Encrypt ``text``, two shares, for a receiver, with all ``secret`` keys of the sender.

    The ``public`` keys are the receiver's. The server carries the result, and cannot read it, but
    for the shares' digests at its end.
    """
    nonce = secrets.token_bytes(NONCE)
    cipher = _cipher_between(name, secret, public, sender, receiver)
    return nonce + cipher.encrypt(nonce, text, None) + _commitment_to(text)


def unseal(
    name: SumName, secret: bytes, public: bytes, sender: str, receiver: str, sealed: bytes
) -> bytes:
    """Decrypt what `seal` returned; the ``secret`` is the receiver's, the ``public`` the sender's.

    ``sealed`` is a nonce, the ciphertext and the digests of the two shares in it. It raises
    cryptography's InvalidTag if sum, sender, receiver, keys, text or digests do not fit.
    """
    cipher = _cipher_between(name, secret, public, sender, receiver)
    text = cipher.decrypt(sealed[:NONCE], sealed[NONCE:-COMMITMENT], None)
    # the cipher does not cover the digests, by which the server will check the shares
    if _commitment_to(text) != sealed[-COMMITMENT:]:
        raise InvalidTag
    return text


def _commitment_to(text: bytes) -> bytes:
    return digest_of(text[:SHARE]) + digest_of(text[SHARE:])


def is_as_dealt(share: bytes, which: int, sealed: bytes) -> bool:
    """Return whether a share is the one that was ``sealed``, of the key `PAIR` or `OWN`."""
    of_pair, of_own = sealed[-COMMITMENT:-DIGEST], sealed[-DIGEST:]
    return digest_of(share) == (of_own if which == OWN else of_pair)


def _cipher_between(
    name: SumName, secret: bytes, public: bytes, sender: str, receiver: str
) -> AESGCM:
    agreed = _agree(key_of(secret, SEALING), key_of(public, SEALING))
    return AESGCM(name.key(agreed, "share", sender, receiver))


# -- masks
def digest_of_received(message: str, keys: Iterable[str], shared: Iterable[str]) -> str:
    """Return r_u: a digest of all that the server has sent to client u in this sum.

    ``message`` is the digest of the message that asks for u's vector; ``keys`` and ``shared`` are
    the sites whose keys and whose shares u was sent.
    """
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
    """Return the ``vector`` [L] uint64 of a ``site`` with all its masks, mod 2^64: y_u.

    ``secret`` has the site's three private keys. ``keys`` are the public keys of all sites whose
    masks shall cancel, of which it is one. ``received`` is r_u (`digest_of_received`).
    """
    total: np.ndarray = vector + own_mask(name, key_of(secret, OWN), site, len(vector))
    pair_secret = key_of(secret, PAIR)
    for peer in keys.keys() - {site}:
        total += pair_mask(name, pair_secret, site, peer, keys[peer], len(vector), received)
    return total


def own_mask(name: SumName, secret: bytes, site: str, length: int) -> np.ndarray:
    """Return the mask PRG(b_u) [L] uint64 of a site's own private key b_u = ``secret``."""
    return _stream(name.key(secret, "own mask", site), length)


def pair_mask(
    name: SumName, secret: bytes, site: str, peer: str, public: bytes, length: int, received: str
) -> np.ndarray:
    """Return ± PRG(s_uv, r_u) [L] uint64 as ``site`` adds it; its ``peer`` adds the negative.

    ``secret`` is the site's private key for pairs, ``public`` has the peer's three public keys.
    ``received`` is r_u: only the masks of sites that received the same cancel.
    """
    agreed = _agree(secret, key_of(public, PAIR))
    stream = _stream(name.key(agreed, "pair mask", *sorted((site, peer)), received), length)
    return stream if site < peer else 0 - stream


def _stream(key: bytes, length: int) -> np.ndarray:
    """Return ``length`` pseudo-random numbers uint64 that follow from a key, by AES."""
    counter = bytes(16)  # it may start at 0, as each key is used for one stream
    cipher = Cipher(algorithms.AES(key), modes.CTR(counter))
    stream = cipher.encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, "<u8").astype(np.uint64)


# -- how many share, and where
def threshold_of(clients: int, fraction: float) -> int:
    """Return t: how many of so many clients must stay to the end, lest the sum be lost.

    ``fraction`` is the setting ``secagg-threshold``.
    """
    return max(FEWEST_SUMMED, math.ceil(fraction * clients))


def most_liars(clients: int, threshold: int) -> int:
    """Return how many of n clients may lie, or help a server that lies, without harm.

    c of them may while n + c < 2t, with the threshold t. 1 is the least that is returned: no single
    client's word shall count against another's.
    """
    return max(1, 2 * threshold - clients - 1)


def points_of(sites: Collection[str]) -> dict[str, int]:
    """Map each site to the point of its share: 1, 2, …, in the order of the names.

    So all sites and the server compute the same.
    """
    return {site: point for point, site in enumerate(sorted(sites), start=1)}

"""Randomness by name: a seed for one purpose, derived from the run's seed."""

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a seed in [0, 2⁶³) for one purpose, the same on every machine.

    For example ``derive_seed(42, "train", "site-3", 7)``.
    """
    text = "\x1f".join([str(seed), *map(str, purpose)])  # a separator that no name has in it
    first_bytes = hashlib.sha256(text.encode()).digest()[:8]
    return int.from_bytes(first_bytes, "big") >> 1  # 63 bits: a signed 64-bit number holds them

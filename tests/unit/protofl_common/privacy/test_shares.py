"""Secret sharing: any t shares give the secret, fewer do not."""

import itertools

import pytest

from protofl_common.privacy import masks, shares
from protofl_common.privacy.shares import PRIME, secret_of

SECRET = bytes(range(32))


def test_the_polynomial_by_hand(monkeypatch):
    """f(x) = 7 + 5x + 5x²."""
    monkeypatch.setattr("secrets.randbelow", lambda below: 5)
    polynomial = shares.split((7).to_bytes(32), 3, (1, 2, 10))
    values = {x: int.from_bytes(share) for x, share in polynomial.items()}

    assert values == {1: 17, 2: 37, 10: 557}


def test_the_field_has_a_prime_number_of_elements():
    """Fermat: 3^(p − 1) = 1 mod p for every prime p above 3, and hardly ever for other numbers."""
    assert pow(3, PRIME - 1, PRIME) == 1


def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not():
    """The secret is split into five shares, of which three give it."""
    all_shares = shares.split(SECRET, 3, range(1, 6))

    assert secret_of(all_shares, 3) == SECRET
    for chosen in itertools.combinations(all_shares, 3):
        assert secret_of({x: all_shares[x] for x in chosen}, 3) == SECRET
    for chosen in itertools.combinations(all_shares, 2):
        assert secret_of({x: all_shares[x] for x in chosen}, 3) != SECRET


def test_shares_of_no_secret_give_none():
    """The shares give p − 1, which is more than the 32 bytes of a secret can hold."""
    largest = (PRIME - 1).to_bytes(shares.SHARE)
    assert secret_of(dict.fromkeys((1, 2, 3), largest), 3) == b""


@pytest.mark.parametrize(
    ("clients", "threshold", "most_liars"), [(3, 3, 2), (4, 3, 1), (10, 7, 3), (100, 67, 33)]
)
def test_the_threshold_of_a_number_of_clients(clients, threshold, most_liars):
    """0.67 of the clients, rounded up, and at least 3; n + c < 2t bounds the liars c among n."""
    assert masks.threshold_of(clients, 0.67) == threshold
    assert masks.most_liars(clients, threshold) == most_liars

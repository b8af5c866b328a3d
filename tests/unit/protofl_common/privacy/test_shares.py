"""Secret sharing: any t shares give the secret, fewer do not, and wrong ones are found."""

import itertools
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofl_common.privacy import masks, shares
from protofl_common.privacy.shares import PRIME, Recovered, Recovery, Unrecoverable

SECRET = bytes(range(32))


def is_right(secret: bytes) -> bool:
    return secret == SECRET


def dealt(clients: int, threshold: int, liars: Collection[int] = ()) -> dict[int, bytes]:
    """Shares at 1 to ``clients``; each liar's is another number."""
    honest = shares.split(SECRET, threshold, range(1, clients + 1))
    return honest | {liar: bytes(24) + liar.to_bytes(9) for liar in liars}


def recovered(given: dict[int, bytes], threshold: int) -> Recovered:
    return Recovery(threshold).secret_of(given, is_right)


def fewest_liars(given: dict[int, bytes], threshold: int) -> int:
    with pytest.raises(Unrecoverable) as failure:
        recovered(given, threshold)
    return failure.value.fewest_liars


def test_the_polynomial_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """f(x) = 7 + 5x + 5x²."""
    monkeypatch.setattr("secrets.randbelow", lambda below: 5)
    polynomial = shares.split((7).to_bytes(32), 3, (1, 2, 10))
    values = {x: int.from_bytes(share) for x, share in polynomial.items()}
    assert values == {1: 17, 2: 37, 10: 557}


def test_the_field_has_a_prime_number_of_elements() -> None:
    """Fermat's test: otherwise it is none."""
    assert pow(3, PRIME - 1, PRIME) == 1


def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not() -> None:
    all_shares = dealt(5, 3)
    assert recovered(all_shares, 3) == Recovered(SECRET)
    for chosen in itertools.combinations(all_shares, 3):
        assert recovered({x: all_shares[x] for x in chosen}, 3) == Recovered(SECRET)

    two = {x: all_shares[x] for x in (1, 2)}
    assert fewest_liars(two, 3) == 0
    assert fewest_liars(two, 2) == 1  # they fit; one that lies, or the owner, is enough


@pytest.mark.parametrize(
    ("clients", "threshold", "most_liars"), [(3, 3, 2), (4, 3, 1), (10, 7, 3), (100, 67, 33)]
)
def test_the_threshold_of_a_number_of_clients(
    clients: int, threshold: int, most_liars: int
) -> None:
    assert masks.threshold_of(clients, 0.67) == threshold
    assert masks.most_liars(clients, threshold) == most_liars


@pytest.mark.parametrize("liar", range(1, 5))
def test_a_wrong_share_is_named_where_one_is_to_spare(liar: int) -> None:
    given_shares = dealt(4, 3, [liar])
    assert recovered(given_shares, 3) == Recovered(SECRET, frozenset({liar}))

    honest = 1 if liar != 1 else 2
    del given_shares[honest]
    assert fewest_liars(given_shares, 3) == 1


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_as_many_wrong_shares_as_half_of_those_to_spare_are_named(data: st.DataObject) -> None:
    """Whoever lies, and however many shares came."""
    clients = data.draw(st.integers(3, 24))
    threshold = data.draw(st.integers(2, clients))
    most_liars = (clients - threshold) // 2
    liars = data.draw(st.sets(st.integers(1, clients), max_size=most_liars))

    given_shares = dealt(clients, threshold, liars)

    assert recovered(given_shares, threshold) == Recovered(SECRET, frozenset(liars))


def test_opposite_liars_leave_no_clean_row_and_are_named() -> None:
    """Of twenty on a circle, two: no fourteen in a row are honest."""
    assert recovered(dealt(20, 14, [1, 11]), 14) == Recovered(SECRET, frozenset({1, 11}))


def test_where_all_choices_are_tried_as_many_may_lie_as_are_to_spare() -> None:
    """Of ten, three; only two are certain to be named rightly, so three are not named."""
    two_lie = dealt(10, 7, [1, 6])
    assert recovered(two_lie, 7) == Recovered(SECRET, frozenset({1, 6}))
    three_lie = dealt(10, 7, [1, 6, 8])
    assert recovered(three_lie, 7) == Recovered(SECRET)
    four_lie = dealt(10, 7, [1, 6, 8, 9])
    assert fewest_liars(four_lie, 7) == 4


def test_where_all_choices_would_take_days_the_number_of_liars_is_a_lower_bound() -> None:
    seven_lie = dealt(30, 20, range(1, 8))
    assert fewest_liars(seven_lie, 20) == 6  # more than 5


def test_liars_who_know_the_points_do_not_make_honest_shares_look_wrong() -> None:
    """What they add is 0 at 0 and at one honest point, so that three of five give the secret."""
    given_shares = dealt(5, 3)
    for liar in (1, 2):
        false = int.from_bytes(given_shares[liar]) + liar * (liar - 3)
        given_shares[liar] = (false % PRIME).to_bytes(shares.SHARE)

    result = recovered(given_shares, 3)

    assert result.secret == SECRET
    assert not result.wrong & {3, 4, 5}


def test_shares_of_another_secret_take_more_liars_than_are_to_spare() -> None:
    other = shares.split(bytes(32), 3, range(1, 6))
    assert fewest_liars(other, 3) == 3


def test_who_lied_about_one_secret_is_left_out_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding, which is slow, takes place once."""
    decodings = []
    decode = shares._Code.decoded

    def noted(self: Any, values: Any) -> Any:
        decodings.append(values)
        return decode(self, values)

    monkeypatch.setattr(shares._Code, "decoded", noted)
    recovery = Recovery(14)
    for _ in range(5):
        result = recovery.secret_of(dealt(20, 14, [3, 9]), is_right)
        assert result == Recovered(SECRET, frozenset({3, 9}))
    assert len(decodings) == 1

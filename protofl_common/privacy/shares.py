"""Shamir's secret sharing ("How to Share a Secret", CACM 1979), and how wrong shares are found.

Symbols: p = 2^256 + 297, the least prime above all secrets; f a random polynomial mod p of degree t
− 1, f(0) the secret; f(x) the share at the point x; k how many shares have come back, n how many
were dealt.

Any t shares give the secret, fewer tell nothing of it. The shares are a word of a Reed-Solomon
code, so some may be wrong and the secret still be found: up to (k − t) // 2 always (Gao, "A New
Algorithm for Decoding Reed-Solomon Codes", 2003), and up to k − t where there are few enough
choices of t shares to try them all. Whoever recovers a secret can check it (by its public key), so
what is found is right, however many shares were wrong.

**Which shares are wrong** is certain only as long as at most (k − t + 1) // 2 clients lie together.
c liars who know which points are used can add the values of a polynomial that is 0 at 0 to their
shares. The secret stays right, but k − c − t + 2 honest shares or more look wrong: such a
polynomial is 0 at t − 2 other points at most. Where more than (k − t + 1) // 2 shares do not fit,
the secret is used and nobody is named. More liars than that can still have honest ones named.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

PRIME = 2**256 + 297
SHARE = 33  # bytes of a share
MOST_CHOICES = 1000  # of t shares that are tried one by one

Polynomial = list[int]  # its coefficients mod p, that of x^0 first; the last one is not 0


@dataclass(frozen=True)
class Recovered:
    secret: bytes
    wrong: frozenset[int] = frozenset()  # At which points the shares are certainly wrong


class Unrecoverable(Exception):
    """No shares give the secret: its owner dealt wrong ones, or at least ``fewest_liars`` lie."""

    def __init__(self, fewest_liars: int) -> None:
        super().__init__(fewest_liars)
        self.fewest_liars = fewest_liars


def split(secret: bytes, threshold: int, points: Iterable[int]) -> dict[int, bytes]:
    """Return shares of a secret of 32 bytes by their ``points``, which are 1 or more.

    As many as the ``threshold`` give it back. The polynomial is random: no two calls are alike.
    """
    polynomial = [int.from_bytes(secret)]
    for _ in range(threshold - 1):
        polynomial.append(secrets.randbelow(PRIME))
    return {x: _value(polynomial, x).to_bytes(SHARE) for x in points}


class Recovery:
    """Recovers secrets that were dealt to the same points with the same threshold.

    What depends on the points alone is computed once, and shares from points at which an earlier
    share was wrong are trusted last.
    """

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self._codes: dict[tuple[int, ...], _Code] = {}
        self._liars: set[int] = set()  # Points at which a share of an earlier secret was wrong

    def secret_of(
        self, shares: Mapping[int, bytes], is_right: Callable[[bytes], bool]
    ) -> Recovered:
        """Recover a secret from its ``shares``, of which some may be wrong.

        ``is_right`` tells the secret from others, by its public key. Four ways are tried, from the
        fastest on: all shares fit; those fit that come from where no share was wrong before; a
        decoder; and every choice of as many shares as are needed, if these are few. Unrecoverable
        where all fail.
        """
        values = {point: int.from_bytes(share) for point, share in sorted(shares.items())}
        if len(values) < self.threshold:
            raise Unrecoverable(0)
        code = self._code(values)
        if code.fits(values):
            secret = _checked(code.at(0, values), is_right)
            if secret:
                return Recovered(secret)
            # So many clients can choose another polynomial through the shares of all others
            raise Unrecoverable(code.spare + 1)

        trusted = values.keys() - self._liars
        if self.threshold <= len(trusted) < len(values):
            of_trusted = self._code(trusted)
            secret = _checked(of_trusted.at(0, values), is_right)
            if secret and of_trusted.fits(values):
                distrusted = values.keys() - trusted
                wrong = {x for x in distrusted if of_trusted.at(x, values) != values[x] % PRIME}
                return self._naming_liars(secret, wrong, values)

        polynomial = code.decoded(values)
        if polynomial:
            secret = _checked(polynomial[0], is_right)
            if secret:
                return self._naming_liars(secret, _misfits(polynomial, values), values)

        if math.comb(len(values), self.threshold) > MOST_CHOICES:
            raise Unrecoverable(code.spare // 2 + 1)
        return self._try_all_choices(values, is_right)

    def _try_all_choices(
        self, values: Mapping[int, int], is_right: Callable[[bytes], bool]
    ) -> Recovered:
        """Try every choice of t shares, until it is certain which others are wrong.

        If it never is, the secret is returned without naming any. Unrecoverable if no choice gives
        the right secret.
        """
        recovered = None
        for points in combinations(values, self.threshold):
            code = _Code(points, self.threshold)
            secret = _checked(code.at(0, values), is_right)
            if not secret:
                continue
            wrong = _misfits(code.interpolated(values), values)
            recovered = self._naming_liars(secret, wrong, values)
            if recovered.wrong:
                return recovered
        if recovered is None:
            # Among fewer liars, t shares would be honest
            raise Unrecoverable(len(values) - self.threshold + 1)
        return recovered

    def _naming_liars(self, secret: bytes, wrong: set[int], values: Mapping[int, int]) -> Recovered:
        """Return the secret and, if so few that they are certain, the points of ``wrong`` shares.

        Shares from certain ones are trusted last from now on. The module says why
        (k − t + 1) // 2 is the limit.
        """
        if len(wrong) > (len(values) - self.threshold + 1) // 2:
            return Recovered(secret)
        self._liars |= wrong
        return Recovered(secret, frozenset(wrong))

    def _code(self, points: Iterable[int]) -> "_Code":
        chosen = tuple(sorted(points))
        if chosen not in self._codes:
            self._codes[chosen] = _Code(chosen, self.threshold)
        return self._codes[chosen]


class _Code:
    """Computes with polynomials through values at fixed ``points``, k of them.

    What depends on the points alone is computed once. Methods take the values by their points.
    """

    def __init__(self, points: Sequence[int], threshold: int) -> None:
        self.points = points  # k of them
        self.threshold = threshold  # t
        self.spare = len(points) - threshold  # shares beyond the t that are needed
        # w_x = 1 / Π (x − other point), mod p. For a polynomial g of degree k − 1 or less,
        # Σ w_x · g(x) over the points is its coefficient of x^(k − 1)
        self._weights = []
        for x in points:
            product = math.prod(x - other for other in points if other != x)
            self._weights.append(pow(product, -1, PRIME))
        self._weights_at: dict[int, list[int]] = {}  # place -> Lagrange's weights of `at`
        # For `fits`. f has a degree of t − 1, so f times any polynomial of a degree below k − t has
        # a degree below k − 1: its coefficient of x^(k − 1), the sum above, is 0. ``test`` is such
        # a polynomial, drawn at random after the shares have come: wrong shares, too, give a sum of
        # 0 only with a probability of 1 / p
        test = [secrets.randbelow(PRIME) for _ in range(self.spare)]
        self._weights_of_test = []
        for x, weight in zip(points, self._weights, strict=True):
            self._weights_of_test.append(weight * _value(test, x) % PRIME)

    def at(self, place: int, values: Mapping[int, int]) -> int:
        """Return f(place), if the values are all right, by Lagrange's formula."""
        if place not in self._weights_at:
            weights = []
            for x, weight in zip(self.points, self._weights, strict=True):
                product = math.prod(place - other for other in self.points if other != x)
                weights.append(weight * product % PRIME)
            self._weights_at[place] = weights
        return self._total(self._weights_at[place], values)

    def fits(self, values: Mapping[int, int]) -> bool:
        """Return whether one polynomial of a degree below t goes through all values.

        Through t values one always does.
        """
        return self._total(self._weights_of_test, values) == 0

    def _total(self, weights: Sequence[int], values: Mapping[int, int]) -> int:
        total = 0
        for x, weight in zip(self.points, weights, strict=True):
            total += weight * values[x]
        return total % PRIME

    def interpolated(self, values: Mapping[int, int]) -> Polynomial:
        """Return the polynomial of a degree below k through all values (Lagrange)."""
        total = [0] * len(self.points)
        zeros = self._zeros()
        for x, weight in zip(self.points, self._weights, strict=True):
            factor = weight * values[x] % PRIME
            for power, coefficient in enumerate(_divided(zeros, [-x % PRIME, 1])[0]):
                total[power] += factor * coefficient
        return _stripped(total)

    def decoded(self, values: Mapping[int, int]) -> Polynomial | None:
        """Return f, if at most (k − t) // 2 values are wrong; else None, or another polynomial.

        Symbols of Gao: g_0 is 0 at all points, g_1 goes through the values. Where f · v − g_1 is a
        multiple of g_0, v is 0 at the points of the wrong values. The steps of Euclid's algorithm
        keep that.
        """
        before = self._zeros()
        remainder = self.interpolated(values)
        cofactor_before: Polynomial = []
        cofactor: Polynomial = [1]
        while 2 * (len(remainder) - 1) >= len(self.points) + self.threshold:
            quotient, rest = _divided(before, remainder)
            before, remainder = remainder, rest
            cofactor_before, cofactor = cofactor, _less(cofactor_before, quotient, cofactor)
        polynomial, rest = _divided(remainder, cofactor)
        return polynomial if not rest and len(polynomial) <= self.threshold else None

    def _zeros(self) -> Polynomial:
        """Return Π (x − point) over all points, the polynomial that is 0 at each."""
        product = [1]
        for point in self.points:
            shifted = [0, *product]
            for power, coefficient in enumerate(product):
                shifted[power] -= point * coefficient
            product = [coefficient % PRIME for coefficient in shifted]
        return product


# -- polynomials mod p
def _misfits(polynomial: Sequence[int], values: Mapping[int, int]) -> set[int]:
    """Return the points at which the values are not the polynomial's."""
    return {x for x, value in values.items() if _value(polynomial, x) != value % PRIME}


def _value(polynomial: Sequence[int], x: int) -> int:
    """Return the polynomial at x, mod p."""
    value = 0
    for coefficient in reversed(polynomial):  # Horner
        value = (value * x + coefficient) % PRIME
    return value


def _stripped(coefficients: Iterable[int]) -> Polynomial:
    """Return the coefficients mod p, without zeros at the end: a polynomial of its true degree."""
    polynomial = [coefficient % PRIME for coefficient in coefficients]
    while polynomial and not polynomial[-1]:
        polynomial.pop()
    return polynomial


def _divided(polynomial: Polynomial, divisor: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Return quotient and remainder of a long division, mod p."""
    rest = list(polynomial)
    degree = len(divisor) - 1
    inverse = pow(divisor[-1], -1, PRIME)
    quotient = [0] * max(0, len(rest) - degree)
    for shift in reversed(range(len(quotient))):
        factor = rest[shift + degree] * inverse % PRIME
        quotient[shift] = factor
        for power, coefficient in enumerate(divisor, start=shift):
            rest[power] = (rest[power] - factor * coefficient) % PRIME
    return quotient, _stripped(rest)


def _less(polynomial: Polynomial, one: Polynomial, other: Polynomial) -> Polynomial:
    """Return ``polynomial`` less the product of the two others."""
    result = list(polynomial)
    length = len(one) + len(other) - 1
    result += [0] * (length - len(result))
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            result[i + j] -= a * b
    return _stripped(result)


def _checked(secret: int, is_right: Callable[[bytes], bool]) -> bytes:
    """Return the 32 bytes of a number; b"" where these are not the right secret."""
    if secret >= 2**256:  # p is larger than all secrets
        return b""
    text = secret.to_bytes(32)
    return text if is_right(text) else b""

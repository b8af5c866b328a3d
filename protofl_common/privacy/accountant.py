"""The accountant: Rényi differential privacy of the sampled Gaussian mechanism, composed.

Symbols: q the rate at which a sample takes part (Poisson sampling: each by itself); σ the noise multiplier, the noise's
standard deviation over the most that one sample can change; α an order; δ.

    RDP (q = 1)     ε_α = α / (2 σ²)
    RDP (q < 1)     ε_α = 1/(α−1) · log Σ_k C(α, k) (1−q)^(α−k) q^k exp((k² − k) / (2 σ²)), whole α
                    (Mironov, Talwar and Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", 2019)
    Composition     ε_α add up
    (ε, δ)          ε = min over α of ε_α + log(1 − 1/α) − (log δ + log α) / (α−1)
                    (Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", 2020)

Two data sets are neighbours if they differ in one sample of one client, of its training, test or validation part, which
in one of them counts nothing; how many samples each part has is public. Only whole orders are tried, which makes ε a
little too large, never too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.options import SettingsError

ORDERS = (*range(2, 65), 72, 80, 96, 128, 192, 256, 384, 512)


class Mechanism(NamedTuple):
    """Gaussian noise on a sum over samples, ``times`` times."""

    rate: float
    """q."""
    noise: float
    """σ."""
    times: int


def epsilon(mechanisms: Iterable[Mechanism], delta: float) -> float:
    """ε of all together at δ; 0 for none."""
    total = sum((one.times * _renyi(one.rate, one.noise) for one in mechanisms if one.times), np.zeros(len(ORDERS)))
    if not total.any():
        return 0.0
    orders = np.array(ORDERS, dtype=float)
    return max(0.0, float((total + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)).min()))


def least_noise(spent: Callable[[float], Iterable[Mechanism]], delta: float, most: float, what: str) -> float:
    """The least σ, to a thousandth, with which at most ε = ``most`` is ``spent``; SettingsError on ``what`` if none."""
    low, high = 0.0, 1.0
    while epsilon(spent(high), delta) > most:
        low, high = high, 2 * high
        if high > 1e6:
            raise SettingsError(f"{what}: no noise is large enough")
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon(spent(middle), delta) <= most else (middle, high)
    return high


@cache
def _renyi(rate: float, noise: float) -> NDArray[Any]:
    """ε_α of one use, for each of `ORDERS`."""
    orders = np.array(ORDERS, dtype=float)
    if rate >= 1:
        return orders / (2 * noise**2)
    return np.array([_of_order(order, rate, noise) for order in ORDERS])


def _of_order(order: int, rate: float, noise: float) -> float:
    k = np.arange(order + 1)
    log_binomials = _LOG_FACTORIALS[order] - _LOG_FACTORIALS[k] - _LOG_FACTORIALS[order - k]
    terms = log_binomials + (order - k) * math.log1p(-rate) + k * math.log(rate) + (k * k - k) / (2 * noise**2)
    return float(np.logaddexp.reduce(terms)) / (order - 1)


_LOG_FACTORIALS = np.array([math.lgamma(n + 1) for n in range(ORDERS[-1] + 1)])

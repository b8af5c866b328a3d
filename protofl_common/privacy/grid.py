"""Whole numbers of a fixed step, with whole noise: the form in which private sums leave.

Noise that is drawn as a floating-point number is recognisable: not every such number can be drawn,
so the lowest bits of a noisy value show whether anything was added to the noise (Mironov, "On
Significance of the Least Significant Bits for Differential Privacy", CCS 2012). Here whatever a
sample adds is first rounded to whole steps, the noise is a whole number of steps too, and a value
is their sum times the step. The step depends on settings alone, so every multiple of it can be
drawn, whatever the data are.

    row of a sample, of length 1 at most   r_i = round(K · x_i),  ‖r_i‖ ≤ K
    noise of deviation σ                   z from N_ℤ(0, K² σ²),  the discrete Gaussian
    what leaves                            (Σ_i r_i + z) / K

N_ℤ(0, s²) draws a whole k with a chance in proportion to exp(−k² / (2 s²))
(Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", 2020). For whole
orders and whole shifts its Rényi divergences are those of the normal distribution, sampled or not,
so `plan.py` counts both alike. With Q = N_ℤ(0, s²) and P the same around a whole r:

    E_Q[(P / Q)^α] = exp((α² − α) ‖r‖² / (2 s²)) for whole α, as Σ_x exp(−‖x − α r‖² / (2 s²)) is
    the same for every whole r; and x → r − x exchanges P and Q, as the proof for samples needs
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STEPS = 2**18
"""K: rounding shortens what a sample may add by √E / (2 K): by 0.2 % for a million numbers."""

LARGE = 2.0**11  # a deviation in steps, from which on `whole_noise` rounds normal numbers
LEAST_PART = 4.0
"""The least deviation, in steps, of noise that several clients share.

A sum of discrete Gaussians of so large a deviation each is one of the summed variance but for
10 · exp(−4² π²), or 10^-67 (Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian
Mechanism", 2021, Theorem 1).
"""


def longest_before_rounding(numbers: int, steps: float) -> float:
    """Return how long a row of so many numbers may be, lest rounding make it longer than 1.

    A step is 1 / ``steps``. Rounding changes each number by half a step at most, and so the length
    by √``numbers`` / 2 steps.
    """
    return 1 - math.sqrt(numbers) / (2 * steps)


def to_steps(rows_NE: Tensor, steps: float) -> Tensor:
    """Return rows [N, E] float64 as whole numbers of steps, each step being 1 / ``steps``.

    Rows are first shortened to a little less than 1 where they are longer, so that rounding makes
    none longer than ``steps``. A row with NaN or infinity becomes zeros (`cut`).
    """
    longest = longest_before_rounding(rows_NE.shape[1], steps)
    return (cut(rows_NE, longest) * steps).round()


def whole_noise(deviation: float, shape: tuple[int, ...], draw: np.random.Generator) -> Tensor:
    """Draw whole numbers, as float64, from the discrete Gaussian N_ℤ(0, s²), s = ``deviation``.

    From s = `LARGE` on they are rounded normal numbers: the chance of k differs by a relative
    (k² / s² − 1) / (24 s²) from the discrete Gaussian's, less than a millionth up to k = 10 s.
    NumPy draws normal numbers with 52 random bits, so some 2^20 of them fall on each whole one up
    to s = 2^30.
    """
    if deviation >= LARGE:
        drawn = np.rint(deviation * draw.standard_normal(shape))
    else:
        values, chances = _discrete_gaussian(deviation)
        drawn = draw.choice(values, shape, p=chances)
    return torch.from_numpy(np.asarray(drawn))  # of shape () NumPy draws a float


@lru_cache(maxsize=16)
def _discrete_gaussian(deviation: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the whole numbers within 12 deviations, and the chance of each.

    Numbers further away have chances below exp(−72), and are left out.
    """
    largest = math.ceil(12 * deviation) + 1
    values = np.arange(-largest, largest + 1, dtype=np.float64)
    variance = max(deviation**2, 1e-300)  # not 0: without noise, 0 alone has a chance
    chances = np.exp(-(values**2) / (2 * variance))
    return values, chances / chances.sum()


def cut(rows_ND: Tensor, longest: float = 1.0) -> Tensor:
    """Return rows [N, D], those that are longer than ``longest`` shortened to that length.

    A row with NaN or infinity becomes zeros.
    """
    lengths_N1: Tensor = torch.linalg.vector_norm(rows_ND, dim=1, keepdim=True)
    shortened_ND = rows_ND / (lengths_N1 / longest).clamp(min=1)
    return torch.where(lengths_N1.isfinite(), shortened_ND, 0.0)

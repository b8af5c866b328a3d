"""Whole numbers of a fixed step, with whole noise: the form in which private sums leave.

Noise that is drawn as a floating-point number is recognisable: not every such number can be drawn,
so the lowest bits of a noisy value show whether anything was added to the noise (Mironov, "On
Significance of the Least Significant Bits for Differential Privacy", CCS 2012). Here whatever a
sample adds is first rounded to whole steps, the noise is a whole number of steps too, and a value
is their sum times the step. The step depends on settings alone, so every multiple of it can be
drawn, whatever the data are.

    row of a sample, of length 1 at most   r_i = round(K · x_i),  ‖r_i‖ ≤ K
    noise of deviation σ                   z = round(K · σ · g),  g standard normal
    what leaves                            (Σ_i r_i + z) / K

Since the r_i are whole, r + round(K σ g) = round(r + K σ g): the rounded result of the Gaussian
mechanism, whose accountant (`plan.py`) therefore holds as it is. NumPy draws g with 52 random bits.
At K·σ up to 2^30 some 2^20 of its values fall on a single step, so no step is left out, and the
chance of each is right to about one part in a million.
"""

import math

import numpy as np
import torch
from torch import Tensor

STEPS = 2**18
"""K: rounding shortens what a sample may add by √E / (2 K): by 0.2 % for a million numbers."""


def longest_before_rounding(numbers: int, steps: int) -> float:
    """The length, in units of 1, up to which a row of so many numbers is 1 long once rounded.

    Rounding changes each number by half a step at most, and so the length by half of √``numbers``.
    """
    return 1 - math.sqrt(numbers) / (2 * steps)


def to_steps(rows_NE: Tensor, steps: int) -> Tensor:
    """Rows [N, E] float64, cut to length 1, as whole numbers of 1 / ``steps``.

    None is longer than ``steps`` afterwards. A row with NaN or infinity becomes zeros.
    """
    longest = longest_before_rounding(rows_NE.shape[1], steps)
    return (cut(rows_NE, longest) * steps).round()


def whole_noise(deviation: float, shape: tuple[int, ...], draw: np.random.Generator) -> Tensor:
    """Whole numbers float64 of the rounded normal distribution of this deviation, in steps."""
    drawn = np.rint(deviation * draw.standard_normal(shape))
    return torch.from_numpy(np.asarray(drawn))  # of shape () NumPy draws a float


def cut(rows_ND: Tensor, longest: float = 1.0) -> Tensor:
    """Shorten longer rows to this length; a row with NaN or infinity becomes zeros."""
    lengths_N1: Tensor = torch.linalg.vector_norm(rows_ND, dim=1, keepdim=True)
    shortened_ND = rows_ND / (lengths_N1 / longest).clamp(min=1)
    return torch.where(lengths_N1.isfinite(), shortened_ND, 0.0)

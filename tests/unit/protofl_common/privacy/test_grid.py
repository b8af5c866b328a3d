"""Private sums leave as whole numbers of a fixed step, and rounding breaks no sensitivity."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from protofl_common.privacy.grid import STEPS, to_steps, whole_noise


@pytest.mark.parametrize("steps", [2**10, STEPS])
@pytest.mark.parametrize("width", [1, 5, 384])
def test_no_row_is_longer_than_its_steps_however_it_is_rounded(steps, width):
    """The worst row has every number half a step above a whole one; a huge one is cut, too."""
    torch.manual_seed(0)
    long_rows = 3 * nn.functional.normalize(torch.randn(200, width))
    whole_steps = torch.full((1, width), steps / math.sqrt(width)).floor()
    half_steps = (whole_steps + 0.5) / steps
    huge = torch.full((1, width), 1e30)

    whole = to_steps(torch.cat([long_rows, half_steps, huge]).double(), steps)

    assert torch.equal(whole, whole.round())

    lengths = whole.norm(dim=1)

    assert float(lengths.max()) <= steps
    # the long rows are cut to a length of all steps, of which rounding may take one a number
    of_long_rows = lengths[:-2]
    assert float(of_long_rows.min()) > steps - math.sqrt(width) - 1


def test_a_row_that_is_no_number_becomes_zeros():
    rows = torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [0.25, 0.0]]).double()
    assert to_steps(rows, 8).tolist() == [[0, 0], [0, 0], [2, 0]]


@pytest.mark.parametrize("deviation", [0.5, 3.0, 2.0**22])
def test_whole_noise_has_the_deviation_that_is_asked_for(deviation):
    """The discrete normal's own deviation differs from its parameter where that is small."""
    wanted = deviation
    if deviation < 9:
        whole = np.arange(-99, 100)
        weights = np.exp(-((whole / deviation) ** 2) / 2)
        wanted = math.sqrt((whole**2 @ weights) / weights.sum())

    drawn = whole_noise(deviation, (200_000,), np.random.default_rng(0))

    assert torch.equal(drawn, drawn.round())
    assert float(drawn.std()) == pytest.approx(wanted, rel=0.02)
    assert abs(float(drawn.mean())) < 4 * deviation / math.sqrt(len(drawn))


@pytest.mark.parametrize("low_bits", [1, 2, 3])
def test_every_pattern_of_the_lowest_bits_is_as_likely_as_any_other(low_bits):
    """A χ² test at five standard deviations decides it; χ² has twice its freedom as variance."""
    patterns = 2**low_bits

    drawn = whole_noise(2.0**22, (400_000,), np.random.default_rng(1)).numpy().astype(np.int64)

    counts = np.bincount(drawn % patterns, minlength=patterns)
    expected = len(drawn) / patterns
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = patterns - 1

    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)

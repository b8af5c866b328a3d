"""Updates as factors: what none has, and the sizes where factors are fewer numbers."""

import math

import pytest
import torch

from protofl_common.maths.low_rank import (
    apply_change,
    change_of,
    compress,
    expand,
    factors,
    largest_rank,
)


def test_a_matrix_whose_energy_takes_all_its_values_goes_as_it_is():
    """0.9 of the energy of six equal singular values takes all six: no fewer numbers than whole.

    A loop that looked for the rank and never found it would leave zeros instead.
    """
    weight = torch.eye(6)
    assert factors(weight, energy=0.9) is None
    assert torch.equal(compress({"w": weight}, 0.9)["w"], weight)


def test_no_change_is_two_thin_zeros():
    left, right = factors(torch.zeros(8, 8), energy=0.95)
    assert left.shape == (8, 1)
    assert right.shape == (1, 8)
    assert torch.equal(left @ right, torch.zeros(8, 8))


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 4), (32, 1, 5, 5), (1, 50), (50, 1)])
def test_factors_are_always_fewer_numbers(shape):
    """``shape`` is taken for a matrix with ``shape[0]`` rows."""
    numbers = math.prod(shape)
    numbers_of_a_rank = shape[0] + numbers // shape[0]  # a column and a row
    rank = largest_rank(shape)

    assert rank * numbers_of_a_rank < numbers <= (rank + 1) * numbers_of_a_rank


@pytest.mark.parametrize("shape", [(5,), ()])
def test_a_vector_or_a_number_has_no_factors(shape):
    assert largest_rank(shape) == 0


def test_a_compressed_change_comes_back_and_buffers_are_sent_as_they_are():
    """The change of the matrix w is 0.5 everywhere, and so has rank 1."""
    torch.manual_seed(0)
    before = {
        "w": torch.randn(6, 7),
        "b": torch.randn(6),
        "seen": torch.tensor(3),
        "running_var": torch.ones(2),
    }
    after = {
        "w": before["w"] + 0.5,
        "b": before["b"] + 1,
        "seen": torch.tensor(8),
        "running_var": torch.zeros(2),
    }
    sent = compress(change_of(after, before, {"w", "b"}), 0.99)

    assert set(sent) == {"w:left", "w:right", "b", "seen", "running_var"}
    assert sent["w:left"].shape == (6, 1)
    torch.testing.assert_close(apply_change(before, expand(sent, before), {"w", "b"}), after)

"""What the lowest bits of a private gradient tell a server that has chosen the weights: nothing.

A server sends zero weights under which a sample above a threshold has a tiny gradient in many
weights. If noise is drawn as float32 numbers, the smallest numbers of the reply tell whether they
are noise alone (Mironov, "On Significance of the Least Significant Bits for Differential Privacy",
CCS 2012).
"""

import math

import numpy as np
import torch

from protofl_common.privacy.grid import STEPS
from tests.support.models import dp_step, linear

WIDTH = 100_000
NOISE = 20.0
CLIP = 1.0
EXPECTED = 8  # samples in a batch, of as many


def private_gradient(inputs):
    """Return the private gradient ḡ [WIDTH] of a step from zero weights.

    With lr = 1 and without momentum it is what is sent, but for the sign.
    """
    model = linear(WIDTH)
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    step = dp_step(model, EXPECTED, EXPECTED, noise=NOISE, dp_clip=CLIP)

    step(inputs, labels, torch.arange(len(inputs)))

    return -model.body.weight.detach().numpy().ravel()


def sample(above_threshold):
    """Return the attacked sample: a gradient in every weight, of length 1, or in none."""
    return torch.full((1, WIDTH), 1 / math.sqrt(WIDTH) if above_threshold else 0.0)


def test_every_number_of_a_private_gradient_is_a_whole_number_of_steps():
    step = CLIP / STEPS / EXPECTED
    gradient = private_gradient(torch.randn(EXPECTED, WIDTH))
    small = gradient[np.abs(gradient) < 2**20 * step].astype(np.float64)  # exact in float32

    assert len(small) > WIDTH / 20
    np.testing.assert_allclose(small / step, np.rint(small / step), rtol=0, atol=0.1)


def test_the_lowest_bits_are_as_likely_with_a_sample_as_without_it():
    """The three lowest bits of the numbers sent have the same frequencies, up to chance."""
    step = CLIP / STEPS / EXPECTED
    counts = []
    for above_threshold in (False, True):
        whole = np.rint(private_gradient(sample(above_threshold)).astype(np.float64) / step)
        whole = whole[np.abs(whole) < 2**23].astype(np.int64)  # exact in float32
        counts.append(np.bincount(whole % 8, minlength=8) / len(whole))
    # the deviation of the difference of two frequencies of 1/8
    spread = math.sqrt(2 * 1 / 8 * 7 / 8 / WIDTH)

    assert np.abs(counts[0] - counts[1]).max() < 5.5 * spread

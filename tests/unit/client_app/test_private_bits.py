"""What the lowest bits of a private gradient tell a server that has chosen the weights.

A server sends zero weights under which a sample above a threshold has a tiny gradient in many
weights. Then it looks at the smallest numbers of the reply. If noise is drawn as float32 numbers,
it asks "can this be noise alone?" and knows at once (Mironov, "On Significance of the Least
Significant Bits for Differential Privacy", CCS 2012). Such noise is the planted failure here.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_app.protections.private_step import PrivateStep
from protofl_common.privacy.grid import STEPS
from tests.support.models import dp_step, linear

WIDTH = 100_000
SMALLEST = 40
NOISE = 20.0
CLIP = 1.0
EXPECTED = 8  # samples in a batch, of as many
Floats = np.ndarray[Any, np.dtype[np.float32]]


def private_gradient(inputs: Tensor) -> Floats:
    """Return the private gradient ḡ [WIDTH] of a step from zero weights.

    With lr = 1 and without momentum it is what is sent, but for the sign.
    """
    model = linear(WIDTH)
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    step = dp_step(model, EXPECTED, EXPECTED, noise=NOISE, dp_clip=CLIP)

    step(inputs, labels, torch.arange(len(inputs)))

    return -model.body.weight.detach().numpy().ravel()


def sample(above_threshold: bool) -> Tensor:
    """Return the attacked sample: a gradient in every weight, of length 1, or in none."""
    return torch.full((1, WIDTH), 1 / math.sqrt(WIDTH) if above_threshold else 0.0)


def float32_noise(
    self: PrivateStep, weights: Mapping[str, Any], sums: Mapping[str, Tensor]
) -> None:
    """Draw noise as float32 numbers, and add it: the planted failure."""
    for name, weight in weights.items():
        drawn = self.draw.standard_normal(tuple(weight.shape), dtype=np.float32)
        exact = (sums[name] / STEPS * CLIP).float()
        weight.grad = (exact + NOISE * CLIP * torch.from_numpy(drawn)) / EXPECTED
    self.descend()


def widths_of_layers() -> Floats:
    """Return 2^-23 · x_i of the 256 layers of NumPy's ziggurat, which draws normal numbers.

    A float32 number that it draws is a whole multiple of one of them.
    """
    x = 3.6541528853610088  # where the tail begins
    area = 0.00492867323399  # of each layer
    widths = [area / math.exp(-x * x / 2)]
    while len(widths) < 256:
        widths.append(x)
        height = area / x + math.exp(-x * x / 2)
        x = math.sqrt(-2 * math.log(height)) if height < 1 else 0.0
    return np.array(widths, np.float32) / np.float32(2**23)


def share_that_can_be_float32_noise(gradient: Floats) -> float:
    """Return the part of the `SMALLEST` numbers that float32 noise alone could have made.

    A number is tried as a multiple of each layer's width, one more or less for rounding, and
    computed forwards as `float32_noise` does: it must come out to the bit.
    """
    smallest = gradient[np.abs(gradient).argsort()[:SMALLEST]]
    drawn = np.abs(smallest)[:, None] * EXPECTED / (NOISE * CLIP)
    widths = widths_of_layers()
    nearest = np.rint(drawn / widths)
    is_possible = np.zeros(SMALLEST, bool)
    for beside in (-1, 0, 1):
        candidate = (nearest + beside).astype(np.float32) * widths
        sent = np.float32(NOISE * CLIP) * candidate / np.float32(EXPECTED)
        is_possible |= (sent == np.abs(smallest)[:, None]).any(1)
    return float(is_possible.mean())


def answers_of_the_attack() -> list[bool]:
    """Return for a sample below the threshold, and for one above: does it look like noise alone?

    It does if float32 noise could have made more than 0.8 of the smallest numbers.
    """
    answers = []
    for above_threshold in (False, True):
        gradient = private_gradient(sample(above_threshold))
        answers.append(share_that_can_be_float32_noise(gradient) > 0.8)
    return answers


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


def test_no_answer_is_read_from_the_lowest_bits():
    assert answers_of_the_attack() == [False, False]


def test_the_attack_reads_the_answer_from_noise_of_float32(monkeypatch):
    monkeypatch.setattr(PrivateStep, "_release", float32_noise)
    assert answers_of_the_attack() == [True, False]

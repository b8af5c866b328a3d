"""FedPCL's contrast and SupCon: by hand, against float64 loops written from the equations, and gradient-checked."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from protofl_common.maths.losses import prototype_contrast, supervised_contrast

TAU = 0.3
Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def arrays() -> Arrays:
    torch.manual_seed(1)
    z = normalize(torch.randn(6, 4, dtype=torch.float64), dim=1)
    sets = normalize(torch.randn(3, 5, 4, dtype=torch.float64), dim=2)
    held = torch.ones(3, 5, dtype=torch.bool)
    held[0, 4], held[1, 2] = False, False
    return z, torch.tensor([0, 1, 2, 3, 4, 0]), sets, held


@pytest.mark.parametrize("with_own", [False, True])
def test_against_equations_8_and_9(with_own: bool, arrays: Arrays) -> None:
    z, y, sets, held = (array.numpy() for array in arrays)
    losses = []
    for sample, label in zip(z, y, strict=True):
        of_sets = []
        for table, has in zip(sets, held, strict=True):
            if has[label]:
                against = [c for c in range(5) if has[c] and (with_own or c != label)]
                below = sum(math.exp(sample @ table[c] / TAU) for c in against)
                of_sets.append(-math.log(math.exp(sample @ table[label] / TAU) / below))
        losses.append(np.mean(of_sets))
    assert prototype_contrast(*arrays, TAU, with_own).item() == pytest.approx(np.mean(losses), rel=1e-10)


def test_by_hand() -> None:
    # own prototype along z, the only other one across it: −log(e^(1/τ) / e^0) = −1/τ; with itself: log(1 + e^(−1/τ))
    arguments = (torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]),
        torch.ones(1, 2, dtype=torch.bool), 0.5)  # fmt: skip
    assert prototype_contrast(*arguments, with_own=False).item() == pytest.approx(-2.0)
    assert prototype_contrast(*arguments, with_own=True).item() == pytest.approx(math.log(1 + math.exp(-2)))


@pytest.mark.parametrize("with_own", [False, True])
def test_gradients(with_own: bool, arrays: Arrays) -> None:
    z, y, sets, held = arrays
    assert torch.autograd.gradcheck(
        lambda features: prototype_contrast(features, y, sets, held, TAU, with_own), (z.requires_grad_(),)
    )


@pytest.mark.parametrize("with_own", [False, True])
def test_without_anything_to_contrast_with_nothing_is_learnt(with_own: bool) -> None:
    z = torch.randn(4, 3, requires_grad=True)
    labels, sets = torch.tensor([0, 1, 0, 1]), torch.zeros(1, 2, 3)
    for held in (torch.tensor([[False, False]]), torch.tensor([[True, False]])):
        loss = prototype_contrast(z, labels, sets, held, TAU, with_own)
        (gradient,) = torch.autograd.grad(loss, z)
        assert loss.item() == 0
        assert gradient.abs().sum() == 0


def test_supcon_against_its_equation(arrays: Arrays) -> None:
    z, y = arrays[0].numpy(), np.array([0, 1, 0, 1, 1, 2])
    losses = []
    for i in range(6):
        partners = [p for p in range(6) if p != i and y[p] == y[i]]
        if partners:
            below = sum(math.exp(z[i] @ z[a] / TAU) for a in range(6) if a != i)
            losses.append(-np.mean([math.log(math.exp(z[i] @ z[p] / TAU) / below) for p in partners]))
    assert len(losses) == 5
    found = supervised_contrast(arrays[0], torch.from_numpy(y), TAU)
    assert found.item() == pytest.approx(np.mean(losses), rel=1e-10)


def test_supcon_gradients_and_batches_without_partners(arrays: Arrays) -> None:
    z = arrays[0].requires_grad_()
    labels = torch.tensor([0, 1, 0, 1, 1, 2])
    assert torch.autograd.gradcheck(lambda features: supervised_contrast(features, labels, TAU), (z,))
    alone = supervised_contrast(z, torch.arange(6), TAU)
    (gradient,) = torch.autograd.grad(alone, z)
    assert alone.item() == 0
    assert gradient.abs().sum() == 0

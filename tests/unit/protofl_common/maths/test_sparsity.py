"""FedPLVM's loss terms: by hand, and gradient-checked; its script has them sample by sample from the equations."""

import math

import numpy as np
import pytest
import torch

from protofl_common.maths.losses import centre_correction, sparse_contrast, sparse_correction, sparse_similarity

ALPHA, TAU, FLOOR = 0.25, 0.07, 1e-6


@pytest.fixture
def arrays() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    z, g = torch.rand(7, 5, dtype=torch.float64) + 0.05, torch.rand(6, 5, dtype=torch.float64) + 0.05
    return z, torch.tensor([0, 0, 1, 2, 2, 3, 1]), g, torch.tensor([0, 0, 1, 2, 2, 2])  # nobody has class 3


def test_by_hand() -> None:
    # z = (1, 0); g_1 = (3, 0) of its class: cos 1, s 1. g_2 = (1, 1) of another: cos 1/√2, s = 2^(−1/8)
    similarity = sparse_similarity(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0]]), 0.25, FLOOR)
    assert similarity.flatten().tolist() == pytest.approx([1.0, 2 ** (-1 / 8)])
    own = torch.tensor([[True, False]])
    expected = math.log(1 + math.exp((2 ** (-1 / 8) - 1) / 0.5))
    assert sparse_contrast(similarity, own, 0.5).item() == pytest.approx(expected)
    assert sparse_correction(similarity, own).item() == pytest.approx(0.0, abs=1e-6)
    assert sparse_correction(similarity, ~own).item() == pytest.approx(1 - 2 ** (-1 / 8))


def test_corrections_that_do_not_grow_with_the_prototypes(arrays: tuple[torch.Tensor, ...]) -> None:
    z, y, g, labels = arrays
    similarity, own = sparse_similarity(z, g, ALPHA, FLOOR), y.unsqueeze(1) == labels
    means, centres = [], []
    for sample, label in zip(z.numpy(), y.numpy(), strict=True):
        of_class = [p for p, one in zip(g.numpy(), labels, strict=True) if one == label]
        if not of_class:
            means.append(0.0)
            centres.append(0.0)
            continue
        cosines = [sample @ p / np.linalg.norm(sample) / np.linalg.norm(p) for p in (*of_class, sum(of_class))]
        means.append(1 - float(np.mean([cosine**ALPHA for cosine in cosines[:-1]])))
        centres.append(2 * (cosines[-1] - 1) ** 2)
    assert sparse_correction(similarity, own, mean=True).item() == pytest.approx(np.mean(means), rel=1e-10)
    assert centre_correction(z, g, own).item() == pytest.approx(np.mean(centres), rel=1e-10)
    twice, both = torch.cat([g, g]), torch.cat([own, own], dim=1)
    similar = torch.cat([similarity, similarity], dim=1)
    assert sparse_correction(similar, both, mean=True).item() == pytest.approx(np.mean(means), rel=1e-10)
    assert centre_correction(z, twice, both).item() == pytest.approx(np.mean(centres), rel=1e-10)
    assert sparse_correction(similar, both).item() == pytest.approx(2 * sparse_correction(similarity, own).item())


def test_gradients(arrays: tuple[torch.Tensor, ...]) -> None:
    z, y, g, labels = arrays
    own = y.unsqueeze(1) == labels

    def both(features: torch.Tensor) -> torch.Tensor:
        similarity = sparse_similarity(features, g, ALPHA, FLOOR)
        return sparse_contrast(similarity, own, TAU) + sparse_correction(similarity, own)

    assert torch.autograd.gradcheck(both, (z.requires_grad_(),))
    assert torch.autograd.gradcheck(lambda features: centre_correction(features, g, own), (z,))


def test_orthogonal_and_zero_features_have_finite_gradients() -> None:
    z = torch.tensor([[1.0, 0.0], [0.0, 0.0]], requires_grad=True)
    similarity = sparse_similarity(z, torch.tensor([[0.0, 1.0], [1.0, 0.0]]), ALPHA, FLOOR)
    own = torch.tensor([[True, False], [True, False]])
    (sparse_contrast(similarity, own, TAU) + sparse_correction(similarity, own)).backward()
    assert torch.isfinite(z.grad).all()


def test_a_class_without_prototype_teaches_nothing() -> None:
    z = torch.rand(3, 4, requires_grad=True)
    similarity = sparse_similarity(z, torch.rand(2, 4), ALPHA, FLOOR)
    loss = sparse_contrast(similarity, torch.zeros(3, 2, dtype=torch.bool), TAU)
    loss.backward()
    assert loss.item() == 0
    assert z.grad.abs().sum() == 0

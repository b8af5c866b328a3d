"""FD's regulariser and FedKD's terms on hand-worked arrays; their scripts train with them sample by sample."""

import math

import pytest
import torch

from protofl_common.maths.losses import adaptive, class_distillation, divergence

TARGETS = torch.tensor([[0.5, 0.25, 0.25], [9.0, 9.0, 9.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
KNOWN = torch.tensor([True, False, True])


def test_by_hand() -> None:
    """F = (1/2, 1/4, 1/4), (1/3, 1/3, 1/3) and again; class 1 has no teacher, and counts in B only."""
    logits = torch.tensor([[math.log(2), 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    found = class_distillation(logits, torch.tensor([0, 1, 2]), TARGETS, KNOWN)
    own = 0.5 * math.log(2) + 0.25 * math.log(4) + 0.25 * math.log(4)
    assert found.item() == pytest.approx((own + math.log(3)) / 3, rel=1e-12)


def test_a_batch_without_a_teacher_has_no_gradient() -> None:
    logits = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    class_distillation(logits, torch.tensor([1, 1]), TARGETS, KNOWN).backward()
    assert not logits.grad.any()


def logits(*rows: list[float]) -> torch.Tensor:
    """Whose class probabilities are these, up to a constant that changes nothing."""
    return (torch.tensor(rows, dtype=torch.float64).log() + 3).requires_grad_()


def test_divergence_by_hand() -> None:
    """Of (1/2, 1/2) from (1/4, 3/4), and of equal ones."""
    own, target = logits([0.25, 0.75], [0.2, 0.8]), logits([0.5, 0.5], [0.2, 0.8])
    found = divergence(own, target)
    assert found.item() == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)
    (gradient,) = torch.autograd.grad(found, own)  # (p − q) / B
    torch.testing.assert_close(gradient, torch.tensor([[-0.125, 0.125], [0, 0]], dtype=torch.float64))
    assert torch.autograd.grad(divergence(own, target.detach()), own)[0].equal(gradient)


def test_adaptive_by_hand() -> None:
    distance, own, other = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (6.0, 0.5, 1.5))
    found = adaptive(distance, own, other)
    assert found.item() == 3.0
    assert torch.autograd.grad(found, (distance, own, other), allow_unused=True) == (0.5, -1.5, None)


def test_two_models_without_a_mistake_have_no_infinite_term() -> None:
    none = torch.tensor(0.0)
    assert adaptive(none, none, none).item() == 0.0

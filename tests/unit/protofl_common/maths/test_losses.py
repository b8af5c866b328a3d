"""FedProto's regulariser on hand-worked arrays; its script trains with it sample by sample."""

import pytest
import torch

from protofl_common.maths.losses import prototype_alignment

FEATURES = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])
LABELS = torch.tensor([0, 0, 2, 3])
PROTOTYPES = torch.tensor([[1.5, 0.0], [9.0, 9.0], [1.0, 4.0], [0.0, 0.0]])
HELD = torch.tensor([True, True, True, False])
# class means: 0 -> (1.5, 2), 2 -> (1, 1); class 3 has no prototype, class 1 no samples


@pytest.mark.parametrize(
    ("distance", "expected"), [("l2", 2.0 + 3.0), ("squared-l2", 4.0 + 9.0), ("l1", 2.0 + 3.0), ("mse", 2.0 + 4.5)]
)
def test_by_class_by_hand(distance: str, expected: float) -> None:
    found = prototype_alignment(FEATURES, LABELS, PROTOTYPES, HELD, distance, "class")
    assert found.item() == pytest.approx(expected)


def test_by_class_mean_by_hand() -> None:
    """FedTGP's E_c: over the batch's classes 0 and 2 that have a prototype, not over class 3, which has none."""
    found = prototype_alignment(FEATURES, LABELS, PROTOTYPES, HELD, "l2", "class-mean")
    assert found.item() == pytest.approx((2.0 + 3.0) / 2)


def test_by_sample_by_hand() -> None:
    # squared distances to the class's prototype: (1.5² + 4²), 1.5², 3²; the sample of class 3 counts in B = 4 only
    found = prototype_alignment(FEATURES, LABELS, PROTOTYPES, HELD, "squared-l2", "sample")
    assert found.item() == pytest.approx((18.25 + 2.25 + 9.0) / 4)


def test_gradient_is_finite_on_the_prototype_itself() -> None:
    features = PROTOTYPES[[0, 2]].clone().requires_grad_()
    prototype_alignment(features, torch.tensor([0, 2]), PROTOTYPES, HELD, "l2", "class").backward()
    assert features.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_no_prototypes_no_loss() -> None:
    none = torch.zeros(4, dtype=torch.bool)
    for granularity in ("class", "class-mean", "sample"):
        assert prototype_alignment(FEATURES, LABELS, PROTOTYPES, none, "l2", granularity).item() == 0.0


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="cosine"):
        prototype_alignment(FEATURES, LABELS, PROTOTYPES, HELD, "cosine", "class")
    with pytest.raises(ValueError, match="epoch"):
        prototype_alignment(FEATURES, LABELS, PROTOTYPES, HELD, "l2", "epoch")

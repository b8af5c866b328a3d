"""FedORGP's losses and FedSA's margin on hand-worked arrays in float64."""

import pytest
import torch

from protofl_common.maths.losses import angular_alignment, nearest_distances, orthogonality

SAMPLES = torch.tensor([[3.0, 4.0], [-2.0, 0.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1])
TARGETS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [6.0, 8.0]], dtype=torch.float64)
# cosines: 0.6, 0.8, 1 of the first, −1, 0, −0.6 of the second


def test_orthogonality_by_hand() -> None:
    own = ((1 - 0.6) + (1 - 0.0)) / 2
    others = ((0.8 + 1.0) / 2 + (1.0 + 0.6) / 2) / 2
    for gamma in (0.0, 0.5, 10.0):
        assert orthogonality(SAMPLES, LABELS, TARGETS, gamma).item() == pytest.approx(own + gamma * others)


def test_one_class_has_no_others() -> None:
    assert orthogonality(SAMPLES[:1], LABELS[:1], TARGETS[:1], 10.0).item() == pytest.approx(0.4)


def test_alignment_by_hand_leaves_out_classes_without_a_prototype() -> None:
    held = torch.tensor([True, True, False])
    assert angular_alignment(SAMPLES, torch.tensor([0, 2]), TARGETS, held).item() == pytest.approx((1 - 0.6) / 2)
    assert angular_alignment(SAMPLES, LABELS, TARGETS, held).item() == pytest.approx((0.4 + 1.0) / 2)


def test_margin_by_hand() -> None:
    corners = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 6.0]], dtype=torch.float64)  # 5, 2 and 2 to the nearest
    assert nearest_distances(corners).tolist() == pytest.approx([5.0, 2.0, 2.0])
    assert nearest_distances(corners[:1]).tolist() == [0.0]

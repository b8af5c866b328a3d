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
    ("granularity", "distance", "expected"),
    [
        ("class", "l2", 2.0 + 3.0),
        ("class", "squared-l2", 4.0 + 9.0),
        ("class", "l1", 2.0 + 3.0),
        ("class", "mse", 2.0 + 4.5),
        ("class-mean", "l2", (2.0 + 3.0) / 2),  # FedTGP's E_c: over the batch's classes with a prototype, 0 and 2
        ("sample", "squared-l2", ((1.5**2 + 4**2) + 1.5**2 + 3**2) / 4),  # that of class 3 counts in B = 4 only
    ],
)
def test_by_hand(granularity: str, distance: str, expected: float) -> None:
    found = prototype_alignment(FEATURES, LABELS, PROTOTYPES, HELD, distance, granularity)
    assert found.item() == pytest.approx(expected)


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

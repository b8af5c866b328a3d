"""FedProto's regulariser on hand-worked arrays, against float64 NumPy, and gradient-checked."""

import numpy as np
import pytest
import torch

from protofl_common.maths.losses.alignment import prototype_alignment

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


def reference(z: np.ndarray, y: np.ndarray, table: np.ndarray, held: np.ndarray, d: str, granularity: str) -> float:
    measure = {
        "l2": lambda v: np.sqrt((v**2).sum()),
        "squared-l2": lambda v: (v**2).sum(),
        "l1": lambda v: np.abs(v).sum(),
        "mse": lambda v: (v**2).mean(),
    }[d]
    if granularity != "sample":
        classes = [j for j in set(y.tolist()) if held[j]]
        total = sum(measure(z[y == j].mean(0) - table[j]) for j in classes)
        return float(total / len(classes) if granularity == "class-mean" else total)
    return float(sum(measure(z[i] - table[y[i]]) for i in range(len(y)) if held[y[i]]) / len(y))


@pytest.mark.parametrize("granularity", ["class", "class-mean", "sample"])
@pytest.mark.parametrize("distance", ["l2", "squared-l2", "l1", "mse"])
def test_against_a_float64_loop_and_gradients(distance: str, granularity: str) -> None:
    rng = np.random.default_rng(3)
    z, y = rng.normal(size=(12, 5)), rng.integers(0, 6, 12)
    table, held = rng.normal(size=(6, 5)), np.array([True, True, False, True, True, False])
    args = (torch.from_numpy(y), torch.from_numpy(table), torch.from_numpy(held), distance, granularity)
    features = torch.from_numpy(z).requires_grad_()
    found = prototype_alignment(features, *args)
    assert found.item() == pytest.approx(reference(z, y, table, held, distance, granularity), rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: prototype_alignment(x, *args), features)


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

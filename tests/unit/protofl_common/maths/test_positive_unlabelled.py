"""FedPU's risk on hand-worked batches, against a float64 loop, over epochs, at the extremes, and gradient-checked."""

from math import log

import numpy as np
import pytest
import torch

from protofl_common.maths.losses import not_of_class, positive_unlabelled_risk

# three classes, of which class 2 is labelled by nobody; probabilities (1/2, 1/4, 1/4), (1/4, 1/2, 1/4), (1/4, 1/4, 1/2)
LOGITS = torch.tensor(
    [[2.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.0, 2.0]], dtype=torch.float64
).log()
HALF, QUARTER = -log(1 / 2 + 1e-6), -log(3 / 4 + 1e-6)
"""−log(1 − p + ε) for p of 1/2 and of 1/4."""


def test_not_of_class_by_hand() -> None:
    expected = [[HALF, QUARTER, QUARTER], [QUARTER, HALF, QUARTER], [QUARTER, QUARTER, HALF]]
    np.testing.assert_allclose(not_of_class(LOGITS).numpy(), expected)


def reference(
    logits: np.ndarray, labels: np.ndarray, counts: np.ndarray, unlabelled: int, floor: float
) -> float:
    """The formula, sample by sample; probabilities from exponentials."""
    held = [c for c in range(len(counts)) if counts[c]]
    scale, total = (unlabelled + counts.sum()) / len(labels), 0.0
    for c in held:
        risk = 0.0
        for row, label in zip(logits, labels, strict=True):
            p = np.exp(row)[c] / np.exp(row).sum()
            if label == -1:
                risk += scale * -np.log(1 - p + 1e-6) / unlabelled
            elif label == c:
                risk -= counts[c] / counts.sum() * scale * -np.log(1 - p + 1e-6) / counts[c]
        total += max(floor, risk)
    return total / len(held)


def some_client(
    seed: int, size: int = 60, classes: int = 6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Logits [N, C], labels [N] (a third labelled, classes 0, 1 and 3 only), labelled samples per class, unlabelled."""
    rng = np.random.default_rng(seed)
    labels = np.where(rng.random(size) < 1 / 3, rng.choice([0, 1, 3], size), -1)
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    tensors = (
        torch.from_numpy(array) for array in (rng.normal(0, 2, (size, classes)), labels, counts)
    )
    return *tensors, int((labels == -1).sum())  # type: ignore[return-value]


@pytest.mark.parametrize("non_negative", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_against_a_float64_loop_and_gradients(seed: int, non_negative: bool) -> None:
    logits, labels, counts, unlabelled = some_client(seed)
    batch, floor = slice(0, 10), 0.0 if non_negative else -np.inf
    expected = reference(
        logits[batch].numpy(), labels[batch].numpy(), counts.numpy(), unlabelled, floor
    )
    inputs = logits[batch].clone().requires_grad_()
    found = positive_unlabelled_risk(inputs, labels[batch], counts, unlabelled, non_negative)
    assert found.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda x: positive_unlabelled_risk(x, labels[batch], counts, unlabelled, non_negative),
        inputs,
    )


@pytest.mark.parametrize("size", [1, 7, 10, 60])
def test_the_mean_over_an_epochs_batches_is_the_risk_of_all_samples(size: int) -> None:
    """Also when some batches have no labelled sample, or no unlabelled one, and the last one is smaller."""
    logits, labels, counts, unlabelled = some_client(9)
    whole = positive_unlabelled_risk(logits, labels, counts, unlabelled, non_negative=False)
    batches = list(zip(logits.split(size), labels.split(size), strict=True))
    terms = [
        len(y) * positive_unlabelled_risk(x, y, counts, unlabelled, non_negative=False).item()
        for x, y in batches
    ]
    assert sum(terms) / len(labels) == pytest.approx(whole.item(), rel=1e-12)


@pytest.mark.slow
def test_labels_hidden_at_random_give_the_risk_of_knowing_them_all() -> None:
    """The mean over many hidings is (1/|K|) Σ_c E[ −log(1 − p_c), where the class is another ]: what the name says."""
    rng = np.random.default_rng(1)
    truth, logits = np.arange(40) % 4, torch.from_numpy(rng.normal(size=(40, 4)))
    against = not_of_class(logits).numpy()
    others = np.mean([np.where(truth == c, 0, against[:, c]).mean() for c in range(4)])
    found = []
    for _ in range(4000):
        labels = np.full(40, -1)
        for c in range(4):
            labels[rng.choice(np.flatnonzero(truth == c), 3, replace=False)] = c
        counts = torch.full((4,), 3)
        risk = positive_unlabelled_risk(
            logits, torch.from_numpy(labels), counts, 28, non_negative=False
        )
        found.append(risk.item())
    assert np.mean(found) == pytest.approx(others, abs=4 * np.std(found) / np.sqrt(len(found)))


@pytest.mark.parametrize("non_negative", [False, True])
def test_batches_without_labelled_or_without_unlabelled_samples(non_negative: bool) -> None:
    counts = torch.tensor([2, 2, 0])
    none = positive_unlabelled_risk(LOGITS, torch.tensor([-1, -1, -1]), counts, 8, non_negative)
    assert none.item() == pytest.approx((2 * QUARTER + HALF) / (8 * 3 / 12))
    logits = LOGITS.clone().requires_grad_()
    only = positive_unlabelled_risk(logits, torch.tensor([0, 1, 0]), counts, 8, non_negative)
    only.backward()
    assert torch.isfinite(logits.grad).all()
    assert (only.item() == 0) if non_negative else (only.item() < 0)


def test_bounded_with_gradients_of_at_most_one_however_sure_the_model() -> None:
    """And none where it is sure: the risk's second term would fall without end."""
    logits = torch.tensor(
        [[500.0, 0.0], [-500.0, 0.0], [3e4, -3e4], [5.0, 0.0]], requires_grad=True
    )
    against = not_of_class(logits)
    assert against[:, 0].tolist() == pytest.approx(
        [-log(1e-6), 0.0, -log(1e-6), 5.006567], abs=2e-4
    )
    against[:, 0].sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[:3].abs().max() < 1e-6
    assert 0.9 < logits.grad[3, 0] < 1

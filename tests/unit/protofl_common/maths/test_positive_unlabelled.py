"""FedPU's risk: by hand, against a float64 loop, over epochs, at the extremes, gradient-checked."""

from math import log

import numpy as np
import pytest
import torch

from protofl_common.maths.losses import loss_of_absence, positive_unlabelled_risk

# Three classes, of which class 2 is labelled by nobody;
# probabilities (1/2, 1/4, 1/4), (1/4, 1/2, 1/4), (1/4, 1/4, 1/2).
LOGITS = torch.tensor([[2.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.0, 2.0]]).double().log()
# −log(1 − p + ε) for p of 1/2 and of 1/4
HALF = -log(1 / 2 + 1e-6)
QUARTER = -log(3 / 4 + 1e-6)


def reference(logits, labels, counts, unlabelled, floor):
    """Return FedPU's risk of a batch, sample by sample; probabilities are from exponentials.

    ``counts`` has a client's labelled samples of each class, ``unlabelled`` the number of its
    others (label -1). No class's risk counts as less than ``floor``.
    """
    held = [c for c in range(len(counts)) if counts[c]]
    scale = (unlabelled + counts.sum()) / len(labels)  # the batch stands for all samples
    total = 0.0
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


def some_client(seed):
    """Return logits [60, 6], labels [60], labelled samples of each class, unlabelled samples.

    A third is labelled, of classes 0, 1 and 3 only; the label of the others is -1.
    """
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(np.where(rng.random(60) < 1 / 3, rng.choice([0, 1, 3], 60), -1))
    counts = torch.bincount(labels[labels >= 0], minlength=6)
    logits = torch.from_numpy(rng.normal(0, 2, (60, 6)))
    return logits, labels, counts, int((labels == -1).sum())


@pytest.mark.parametrize("non_negative", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_against_a_float64_loop_and_gradients(seed, non_negative):
    """The risk of a batch of ten is the loop's, and its gradients pass PyTorch's check."""
    logits, labels, counts, unlabelled = some_client(seed)
    logits = logits[:10].clone().requires_grad_()
    labels = labels[:10]

    def risk(logits):
        return positive_unlabelled_risk(logits, labels, counts, unlabelled, non_negative)

    floor = 0.0 if non_negative else -np.inf
    arrays = (logits.detach().numpy(), labels.numpy(), counts.numpy())

    assert risk(logits).item() == pytest.approx(reference(*arrays, unlabelled, floor), rel=1e-12)
    assert torch.autograd.gradcheck(risk, logits)


@pytest.mark.parametrize("size", [1, 7, 10, 60])
def test_the_mean_over_an_epochs_batches_is_the_risk_of_all_samples(size):
    """This also holds if some batches have no labelled sample, or no unlabelled one.

    And when the last batch is smaller: batches are weighted by their sizes.
    """
    logits, labels, counts, unlabelled = some_client(9)
    whole = positive_unlabelled_risk(logits, labels, counts, unlabelled, non_negative=False)

    total = 0.0
    for x, y in zip(logits.split(size), labels.split(size), strict=True):
        risk = positive_unlabelled_risk(x, y, counts, unlabelled, non_negative=False)
        total += len(y) * risk.item()

    assert total / len(labels) == pytest.approx(whole.item(), rel=1e-12)


@pytest.mark.slow
def test_labels_hidden_at_random_give_the_risk_of_knowing_them_all():
    """The mean over many hidings is (1/|K|) Σ_c E[ −log(1 − p_c), where the class is another ]."""
    rng = np.random.default_rng(1)
    truth = np.arange(40) % 4
    logits = torch.from_numpy(rng.normal(size=(40, 4)))
    against = loss_of_absence(logits).numpy()
    expected = np.mean([np.where(truth == c, 0, against[:, c]).mean() for c in range(4)])

    risks = []
    counts = torch.full((4,), 3)  # of ten samples a class three are labelled, 28 of 40 are not
    for _ in range(4000):
        labels = np.full(40, -1)
        for c in range(4):
            labels[rng.choice(np.flatnonzero(truth == c), 3, replace=False)] = c
        risk = positive_unlabelled_risk(logits, torch.from_numpy(labels), counts, 28, False)
        risks.append(risk.item())

    deviation_of_mean = np.std(risks) / np.sqrt(len(risks))
    assert np.mean(risks) == pytest.approx(expected, abs=4 * deviation_of_mean)


@pytest.mark.parametrize("non_negative", [False, True])
def test_batches_without_labelled_or_without_unlabelled_samples(non_negative):
    """Both kinds of batches have finite risks and gradients.

    The client has 4 labelled and 8 unlabelled samples.
    """
    of_client = {
        "labelled_C": torch.tensor([2, 2, 0]),
        "unlabelled": 8,
        "non_negative": non_negative,
    }
    without_labels = torch.tensor([-1, -1, -1])
    risk = positive_unlabelled_risk(LOGITS, without_labels, **of_client)

    # a batch of three of the client's 12 samples has so many unlabelled ones on average
    expected_unlabelled = 8 * 3 / 12
    assert risk.item() == pytest.approx((2 * QUARTER + HALF) / expected_unlabelled)

    logits = LOGITS.clone().requires_grad_()
    labelled = torch.tensor([0, 1, 0])
    risk = positive_unlabelled_risk(logits, labelled, **of_client)
    risk.backward()

    assert torch.isfinite(logits.grad).all()
    if non_negative:
        assert risk.item() == 0
    else:
        assert risk.item() < 0


def test_the_loss_is_bounded_with_gradients_of_at_most_one_however_sure_the_model():
    """There is no gradient where the model is sure: the risk's second term would fall without end.

    The last sample is not so sure: log(1 + e⁵) is 5.006715, which ε makes 5.006567.
    """
    logits = torch.tensor([[500.0, 0.0], [-500.0, 0.0], [3e4, -3e4], [5.0, 0.0]])
    logits.requires_grad_()

    not_first = loss_of_absence(logits)[:, 0]
    not_first.sum().backward()

    largest = -log(1e-6)
    assert not_first.tolist() == pytest.approx([largest, 0.0, largest, 5.006567], abs=2e-4)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[:3].abs().max() < 1e-6
    assert 0.9 < logits.grad[3, 0] < 1

"""Learning from class probabilities: another model's (FedKD), or a mean of them in the place of a label (FD).

Sources: Wu et al., Nature Communications 2022; Jeong et al., 2018. Symbols: B samples, C classes.
"""

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

SMALLEST = 1e-8  # task losses below it count as it: both may be 0 to the precision of float32


def divergence(logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
    """KL(q ‖ p), p, q the probabilities of logits and targets (detach them if fixed); averaged over samples."""
    targets_BC = log_softmax(targets_BC, dim=1)
    return kl_div(log_softmax(logits_BC, dim=1), targets_BC, reduction="batchmean", log_target=True)


def adaptive(distance: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """A distance between two models, divided by the sum of their task losses: who is wrong teaches and learns little.

    ``own``: the task loss of the model that learns, which also learns through it; the ``other`` is fixed.
    """
    return distance / torch.clamp(own + other.detach(), min=SMALLEST)


def class_distillation(logits_BC: Tensor, labels_B: Tensor, targets_CC: Tensor, known_C: Tensor) -> Tensor:
    """FD's distillation regulariser φ(F, F̂_y) = −Σ_c F̂_{y,c} log F_c of a batch, without its weight γ; a scalar.

    It is averaged over the batch; F = softmax(logits). ``labels_B`` int64 in [0, C). ``targets_CC`` has F̂_y in row y,
    the class probabilities that samples of class y shall have, and ``known_C`` says which classes have such a row;
    samples of the others contribute nothing.
    """
    entropy_B = -(targets_CC[labels_B] * log_softmax(logits_BC, dim=1)).sum(1)
    return (entropy_B * known_C[labels_B]).sum() / len(labels_B)

"""Calibration by a site's own samples outside training: probabilities, and the distance of a strange sample.

Symbols: n samples, P prototypes, C classes; d_ip distance of sample i from prototype p.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

TEMPERATURES = torch.logspace(-4, 4, 161)  # times the mean squared distance: the choices of T


def class_scores(distances_nP: Tensor, labels_P: Tensor, num_classes: int) -> Tensor:
    """−d² from the nearest prototype of each class [n, C], −∞ for classes without one (Snell et al., NeurIPS 2017)."""
    scores_nC = distances_nP.new_full((len(distances_nP), num_classes), -math.inf)
    labels_nP = labels_P.expand(len(distances_nP), -1)
    return scores_nC.scatter_reduce_(1, labels_nP, -distances_nP.square(), "amax")


def fit_temperature(scores_nC: Tensor, labels_n: Tensor) -> float:
    """T for which softmax(scores / T) fits the labels best (Guo et al., ICML 2017); 1 without known classes."""
    known_n = scores_nC.gather(1, labels_n[:, None])[:, 0].isfinite()
    scores_nC, labels_n = scores_nC[known_n], labels_n[known_n]
    scale = float(-scores_nC[scores_nC.isfinite()].mean()) if len(scores_nC) else 0.0
    if scale <= 0:
        return 1.0
    losses = torch.stack([cross_entropy(scores_nC / (scale * t), labels_n) for t in TEMPERATURES])
    return scale * float(TEMPERATURES[losses.argmin()])


def unknown_above(distances_n: Tensor, share: float) -> float:
    """The distance above which a sample counts as unknown; ``distances_n`` [n] ascending, of such samples.

    Of new samples like these, at most ``share`` are above it on average (split conformal prediction: the k-th smallest
    with k = ⌈(n + 1)(1 − share)⌉). ∞, so that none is, when n is too small for that.
    """
    k = math.ceil((len(distances_n) + 1) * (1 - share))
    return float(distances_n[k - 1]) if k <= len(distances_n) else math.inf

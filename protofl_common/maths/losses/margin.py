"""Losses over client prototypes, of FedTGP and FedORGP. Symbols: P client prototypes, K classes, D dims."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from protofl_common.maths.losses.alignment import one_hot


def margin_contrast(samples_PD: Tensor, labels_P: Tensor, targets_KD: Tensor, margin: float) -> Tensor:
    """FedTGP's contrastive loss with margin (Eq. 10), averaged over client prototypes; a scalar.

    −log [ e^{−(φ(p, t_y)+δ)} / ( e^{−(φ(p, t_y)+δ)} + Σ_{k≠y} e^{−φ(p, t_k)} ) ], φ the Euclidean distance.

    Client prototypes p with labels int64 in [0, K), a trainable prototype t_k per class, ``margin`` δ ≥ 0.
    """
    distances_PK = euclidean_distances(samples_PD, targets_KD)
    own_PK = one_hot(labels_P, len(targets_KD), distances_PK.dtype)
    return cross_entropy(-(distances_PK + margin * own_PK), labels_P)


def euclidean_distances(samples_PD: Tensor, targets_KD: Tensor) -> Tensor:
    """φ of every pair, [P, K], by matrix products: their gradient is many times faster than that of `torch.cdist`.

    Both are moved to the targets' mean first, which keeps the products small. Distances below 3·10⁻⁵ count as it and
    pass no gradient.
    """
    middle_D = targets_KD.detach().mean(dim=0)
    samples_PD, targets_KD = samples_PD - middle_D, targets_KD - middle_D
    squares_PK = samples_PD.square().sum(dim=1, keepdim=True) + targets_KD.square().sum(dim=1)
    return torch.addmm(squares_PK, samples_PD, targets_KD.T, alpha=-2).clamp_min(1e-9).sqrt()


def largest_distance(centres_KD: Tensor) -> float:
    """max_{k≠l} φ(q_k, q_l), FedTGP's adaptive margin before its threshold (Eq. 9); 0 for fewer than two centres."""
    return float(torch.cdist(centres_KD, centres_KD).max()) if len(centres_KD) > 1 else 0.0


def largest_nearest_distance(centres_KD: Tensor) -> float:
    """max_k min_{l≠k} φ(q_k, q_l): the margin of FedTGP's authors' code; 0 for fewer than two centres."""
    return float(_nearest(centres_KD).max()) if len(centres_KD) > 1 else 0.0


def mean_nearest_distance(centres_KD: Tensor) -> float:
    """mean_k min_{l≠k} φ(q_k, q_l): FedSA's margin; 0 for fewer than two centres."""
    return float(_nearest(centres_KD).mean()) if len(centres_KD) > 1 else 0.0


def _nearest(centres_KD: Tensor) -> Tensor:
    return torch.cdist(centres_KD, centres_KD).fill_diagonal_(float("inf")).min(dim=1).values


def orthogonality(samples_PD: Tensor, labels_P: Tensor, targets_KD: Tensor, gamma: float) -> Tensor:
    """(1 − cos(p, t_y)) + γ · mean over k ≠ y of |cos(p, t_k)|, averaged over client prototypes p; a scalar."""
    cosines_PK = normalize(samples_PD) @ normalize(targets_KD).T
    own_PK = one_hot(labels_P, len(targets_KD), cosines_PK.dtype)
    own_P = (cosines_PK * own_PK).sum(1)
    others_P = (cosines_PK.abs() * (1 - own_PK)).sum(1) / max(1, len(targets_KD) - 1)
    return (1 - own_P + gamma * others_P).mean()

"""Holding features near the prototype of their class (FedProto, FedTGP). Symbols: B samples, C classes, D dims."""

from __future__ import annotations

import torch
from torch import Tensor

from protofl_common.maths.losses.one_hot import one_hot


def prototype_alignment(
    features_BD: Tensor, labels_B: Tensor, prototypes_CD: Tensor, present_C: Tensor, distance: str, granularity: str
) -> Tensor:
    """FedProto's regulariser L_R = Σ_j d(C_i^(j), C̄^(j)) (Eq. 5 and 6), on one batch; a scalar.

    Parameters
    ----------
    features_BD, labels_B
        z = f(x) and the labels of the batch, labels int64 in [0, C).
    prototypes_CD, present_C
        Global prototypes C̄ and which classes have one; the others contribute nothing.
    distance
        d: ``l2`` ‖a−b‖₂ · ``squared-l2`` ‖a−b‖₂² · ``l1`` ‖a−b‖₁ · ``mse`` ‖a−b‖₂²/D.
    granularity
        ``class``: C_i^(j) is the mean of the batch's features of class j, summed over the classes j of the batch.
        ``class-mean``: the same, averaged over those of them that have a prototype (FedTGP's E_c, Eq. 11).
        ``sample``: d of every single sample to its class's prototype, divided by B (the authors' code, with ``mse``).
    """
    if granularity in ("class", "class-mean"):
        one_hot_BC = one_hot(labels_B, len(present_C), features_BD.dtype)
        counts_C = one_hot_BC.sum(0)
        means_CD = (one_hot_BC.T @ features_BD) / counts_C.clamp(min=1).unsqueeze(1)
        distances_C = _distance(means_CD - prototypes_CD, distance)
        counted_C = present_C & (counts_C > 0)
        total = (distances_C * counted_C).sum()
        return total if granularity == "class" else total / counted_C.sum().clamp(min=1)
    if granularity == "sample":
        distances_B = _distance(features_BD - prototypes_CD[labels_B], distance)
        return (distances_B * present_C[labels_B]).sum() / len(labels_B)
    raise ValueError(f"granularity is {granularity!r}, not class, class-mean or sample")


def _distance(difference_ND: Tensor, distance: str) -> Tensor:
    """d of each row, [N]. The gradient of ``l2`` at 0 is 0, not NaN."""
    if distance == "l2":
        norms_N: Tensor = torch.linalg.vector_norm(difference_ND, dim=1)
        return norms_N
    if distance == "squared-l2":
        return difference_ND.square().sum(1)
    if distance == "l1":
        return difference_ND.abs().sum(1)
    if distance == "mse":
        return difference_ND.square().mean(1)
    raise ValueError(f"distance is {distance!r}, not l2, squared-l2, l1 or mse")

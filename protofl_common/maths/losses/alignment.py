"""Holding features near the prototype of their class (FedProto, FedTGP, FedORGP). B samples, C classes, D dims."""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def one_hot(labels_B: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """[B, C]. PyTorch's own looks at single labels, which ``vmap`` cannot: DP-SGD would go sample by sample."""
    return torch.eye(classes, dtype=dtype, device=labels_B.device)[labels_B]


def prototype_alignment(
    features_BD: Tensor, labels_B: Tensor, prototypes_CD: Tensor, present_C: Tensor, distance: str, granularity: str
) -> Tensor:
    """FedProto's regulariser L_R = Σ_j d(C_i^(j), C̄^(j)) (Eq. 5 and 6), on one batch; a scalar.

    Features z = f(x) with labels int64 in [0, C); global prototypes C̄, of classes ``present_C`` only. ``distance`` d:
    ``l2`` ‖a−b‖₂ · ``squared-l2`` ‖a−b‖₂² · ``l1`` ‖a−b‖₁ · ``mse`` ‖a−b‖₂²/D. ``granularity``:

    ``class``       C_i^(j) is the mean of the batch's features of class j, summed over the classes j of the batch
    ``class-mean``  the same, averaged over those of them that have a prototype (FedTGP's E_c, Eq. 11)
    ``sample``      d of every single sample to its class's prototype, divided by B (the authors' code, with ``mse``)
    """
    if granularity == "sample":
        distances_B = _distance(features_BD - prototypes_CD[labels_B], distance)
        return (distances_B * present_C[labels_B]).sum() / len(labels_B)
    if granularity not in ("class", "class-mean"):
        raise ValueError(f"granularity is {granularity!r}, not class, class-mean or sample")
    one_hot_BC = one_hot(labels_B, len(present_C), features_BD.dtype)
    counts_C = one_hot_BC.sum(0)
    means_CD = (one_hot_BC.T @ features_BD) / counts_C.clamp(min=1).unsqueeze(1)
    counted_C = present_C & (counts_C > 0)
    total = (_distance(means_CD - prototypes_CD, distance) * counted_C).sum()
    return total if granularity == "class" else total / counted_C.sum().clamp(min=1)


def _distance(difference_ND: Tensor, distance: str) -> Tensor:
    """d of each row, [N]. The gradient of ``l2`` at 0 is 0, not NaN."""
    if distance == "l2":
        norms_N: Tensor = torch.linalg.vector_norm(difference_ND, dim=1)
        return norms_N
    if distance == "l1":
        return difference_ND.abs().sum(1)
    if distance not in ("mse", "squared-l2"):
        raise ValueError(f"distance is {distance!r}, not l2, squared-l2, l1 or mse")
    return difference_ND.square().mean(1) if distance == "mse" else difference_ND.square().sum(1)


def angular_alignment(features_BD: Tensor, labels_B: Tensor, prototypes_CD: Tensor, present_C: Tensor) -> Tensor:
    """1 − cos(z, p_y), averaged over the batch; classes that ``present_C`` leaves out count as 0; a scalar."""
    cosines_B = (normalize(features_BD) * normalize(prototypes_CD)[labels_B]).sum(1)
    return ((1 - cosines_B) * present_C[labels_B]).mean()

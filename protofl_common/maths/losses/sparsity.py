"""FedPLVM's α-sparsity prototype loss (Wang et al., NeurIPS 2024). Symbols: B samples, G prototypes, D dims."""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_similarity(features_BD: Tensor, prototypes_GD: Tensor, alpha: float, floor: float) -> Tensor:
    """s_α(z, g) = cos(z, g)^α (Eq. 7), [B, G].

    ``floor`` > 0: cosines below it count as ``floor`` and pass no gradient. Features after a ReLU have cosines in
    [0, 1], and the slope of x^α at 0 is infinite; the paper is silent about it.
    """
    z_BD = torch.nn.functional.normalize(features_BD, dim=1)
    g_GD = torch.nn.functional.normalize(prototypes_GD, dim=1)
    return (z_BD @ g_GD.T).clamp(min=floor).pow(alpha)


def sparse_contrast(similarity_BG: Tensor, own_BG: Tensor, temperature: float) -> Tensor:
    """L_contra = −log [ Σ_{g ∈ G^y} exp(s_α/τ) / Σ_{g ∈ G} exp(s_α/τ) ] (Eq. 6), averaged over the batch; a scalar.

    ``own_BG`` bool: which prototypes g are of the sample's class y. Samples whose class has none are left out.
    """
    scaled_BG = similarity_BG / temperature
    own_B = torch.logsumexp(scaled_BG.masked_fill(~own_BG, -torch.inf), dim=1)
    return _over_present(torch.logsumexp(scaled_BG, dim=1) - own_B, own_BG)


def sparse_correction(similarity_BG: Tensor, own_BG: Tensor, mean: bool = False) -> Tensor:
    """L_corr = | Σ_{g ∈ G^y} s_α − C_y |, C_y = number of prototypes of class y (Eq. 8), averaged; a scalar.

    With ``mean`` divided by C_y: by the letter, the term and its gradient grow with the number of prototypes.
    """
    short_B = ((similarity_BG - 1) * own_BG).sum(dim=1).abs()
    return _over_present(short_B / own_BG.sum(dim=1).clamp(min=1) if mean else short_B, own_BG)


def centre_correction(features_BD: Tensor, prototypes_GD: Tensor, own_BG: Tensor) -> Tensor:
    """2 (cos(z, mean of G^y) − 1)², averaged; a scalar. So the authors' code has it, without α (867b5f1)."""
    centres_BD = own_BG.to(prototypes_GD.dtype) @ prototypes_GD / own_BG.sum(dim=1, keepdim=True).clamp(min=1)
    cosine_B = torch.nn.functional.cosine_similarity(features_BD, centres_BD)
    return _over_present(2 * (cosine_B - 1).square(), own_BG)


def _over_present(loss_B: Tensor, own_BG: Tensor) -> Tensor:
    """The mean over the batch, counting 0 for samples whose class has no prototype."""
    present_B = own_BG.any(dim=1)
    return torch.where(present_B, loss_B, 0.0).sum() / len(loss_B)

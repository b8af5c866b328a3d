"""Contrast of samples with prototypes (FedPCL, FedPLVM), and within a batch (SupCon).

Symbols: B samples, C classes, M clients, G prototypes of all classes, D dims.
"""

import torch
from torch import Tensor

from protofl_common.maths.losses.alignment import one_hot


def prototype_contrast(
    features_BD: Tensor, labels_B: Tensor, sets_MCD: Tensor, present_MC: Tensor, temperature: float, with_own: bool
) -> Tensor:
    """−log [ exp(z·C^(y)/τ) / Σ_{y_a ∈ A(y)} exp(z·C^(y_a)/τ) ], averaged over samples and sets; a scalar.

    FedPCL (Tan et al., NeurIPS 2022); all of unit length. With one set, the global prototypes, it is L_g (Eq. 8); with
    the clients' padded sets it is L_p (Eq. 9). ``sets_MCD``, ``present_MC``: M tables of one prototype per class, and
    which of them exist; a set counts for a sample only if it has the sample's class and another one to contrast with.
    A(y) is the labels distinct from y, as the text defines it, or ``with_own`` all labels, the usual InfoNCE.
    """
    scaled_BMC = torch.einsum("bd,mcd->bmc", features_BD, sets_MCD) / temperature
    own_B1C = one_hot(labels_B, present_MC.shape[1], torch.bool).unsqueeze(1)
    present_BMC = present_MC.unsqueeze(0)
    against_BMC = present_BMC if with_own else present_BMC & ~own_B1C
    counted_BM = (present_BMC & own_B1C).any(2) & (present_BMC & ~own_B1C).any(2)
    # a finite stand-in for −∞: rows that do not count would else give NaN gradients
    against_BM = scaled_BMC.masked_fill(~against_BMC, -1e9).logsumexp(2)
    own_BM = (scaled_BMC * own_B1C).sum(2)
    loss_BM = torch.where(counted_BM, against_BM - own_BM, 0.0)
    per_sample_B = loss_BM.sum(1) / counted_BM.sum(1).clamp(min=1)
    return per_sample_B.mean()


def supervised_contrast(features_BD: Tensor, labels_B: Tensor, temperature: float) -> Tensor:
    """SupCon within a batch (Khosla et al., NeurIPS 2020, Eq. 2, one view), averaged over samples with a partner.

    −1/|P(i)| Σ_{p ∈ P(i)} log [ exp(z_i·z_p/τ) / Σ_{a ≠ i} exp(z_i·z_a/τ) ], P(i) the others of i's class; a scalar.
    """
    scaled_BB = features_BD @ features_BD.T / temperature
    self_BB = torch.eye(len(labels_B), dtype=torch.bool, device=labels_B.device)
    partners_BB = (labels_B.unsqueeze(0) == labels_B.unsqueeze(1)) & ~self_BB
    log_share_BB = scaled_BB - scaled_BB.masked_fill(self_BB, -1e9).logsumexp(1, keepdim=True)
    counted_B = partners_BB.any(1)
    per_sample_B = -(log_share_BB * partners_BB).sum(1) / partners_BB.sum(1).clamp(min=1)
    return torch.where(counted_B, per_sample_B, 0.0).sum() / counted_B.sum().clamp(min=1)


def sparse_similarity(features_BD: Tensor, prototypes_GD: Tensor, alpha: float, floor: float) -> Tensor:
    """FedPLVM's s_α(z, g) = cos(z, g)^α (Wang et al., NeurIPS 2024, Eq. 7), [B, G].

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
    return torch.where(own_BG.any(dim=1), loss_B, 0.0).sum() / len(loss_B)

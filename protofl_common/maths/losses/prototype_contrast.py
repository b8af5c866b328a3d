"""Contrast of samples with prototypes (FedPCL; Tan et al., NeurIPS 2022), and within a batch (SupCon).

Symbols: B samples, C classes, M clients, D dims. All features and prototypes are of unit length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protofl_common.maths.losses.one_hot import one_hot


def prototype_contrast(
    features_BD: Tensor, labels_B: Tensor, sets_MCD: Tensor, present_MC: Tensor, temperature: float, with_own: bool
) -> Tensor:
    """−log [ exp(z·C^(y)/τ) / Σ_{y_a ∈ A(y)} exp(z·C^(y_a)/τ) ], averaged over samples and sets; a scalar.

    With one set, the global prototypes, it is L_g (Eq. 8); with the clients' padded sets it is L_p (Eq. 9).

    Parameters
    ----------
    sets_MCD, present_MC
        M tables of one prototype per class, and which of them exist. A set counts for a sample only if it holds the
        sample's class and another one to contrast with.
    with_own
        A(y): False: the labels distinct from y, as the text defines it. True: all labels, the usual InfoNCE.
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

"""FedORGP's loss and the clients' alignment by angle. Symbols: B samples, P client prototypes, C, K classes, D dims."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from protofl_common.maths.losses.one_hot import one_hot


def orthogonality(samples_PD: Tensor, labels_P: Tensor, targets_KD: Tensor, gamma: float) -> Tensor:
    """(1 − cos(p, t_y)) + γ · mean over k ≠ y of |cos(p, t_k)|, averaged over client prototypes p; a scalar.

    ``labels_P`` int64 in [0, K): which target is a prototype's own.
    """
    cosines_PK = normalize(samples_PD) @ normalize(targets_KD).T
    own_PK = one_hot(labels_P, len(targets_KD), cosines_PK.dtype)
    own_P = (cosines_PK * own_PK).sum(1)
    others_P = (cosines_PK.abs() * (1 - own_PK)).sum(1) / max(1, len(targets_KD) - 1)
    return (1 - own_P + gamma * others_P).mean()


def angular_alignment(features_BD: Tensor, labels_B: Tensor, prototypes_CD: Tensor, present_C: Tensor) -> Tensor:
    """1 − cos(z, p_y), averaged over the batch; classes that ``present_C`` leaves out count as 0; a scalar."""
    cosines_B = (normalize(features_BD) * normalize(prototypes_CD)[labels_B]).sum(1)
    return ((1 - cosines_B) * present_C[labels_B]).mean()

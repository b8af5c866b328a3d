"""Labels as rows of zeros and a one."""

from __future__ import annotations

import torch
from torch import Tensor


def one_hot(labels_B: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """[B, C]. PyTorch's own looks at single labels, which ``vmap`` cannot: DP-SGD would go sample by sample."""
    return torch.eye(classes, dtype=dtype, device=labels_B.device)[labels_B]

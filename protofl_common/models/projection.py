"""FedPCL's projection network (Tan et al., NeurIPS 2022, Appendix A): what trains behind frozen backbones."""

from __future__ import annotations

import math

from torch import nn


def build_projection(input_shape: tuple[int, ...], feature_dim: int) -> nn.Module:
    """r(x) [B, F] -> z [B, D]: one fully connected layer, ReLU, BatchNorm; inputs are flattened to vectors."""
    linear = nn.Linear(math.prod(input_shape), feature_dim)
    return nn.Sequential(nn.Flatten(), linear, nn.ReLU(), nn.BatchNorm1d(feature_dim))

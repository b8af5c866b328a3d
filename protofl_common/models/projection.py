"""FedPCL's projection network (Tan et al., NeurIPS 2022, Appendix A): what trains behind frozen backbones."""

from __future__ import annotations

from torch import nn


def build_projection(in_channels: int, image_size: int, feature_dim: int) -> nn.Module:
    """r(x) [B, F] -> z [B, D]: one fully connected layer, ReLU, BatchNorm; images are flattened to vectors."""
    width = in_channels * image_size * image_size
    return nn.Sequential(nn.Flatten(), nn.Linear(width, feature_dim), nn.ReLU(), nn.BatchNorm1d(feature_dim))

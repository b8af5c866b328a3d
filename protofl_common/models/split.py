"""The one shape that every client model has: body and head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SplitModel(nn.Module):
    """A model that is cut at its features: ``body`` x [B, channels, H, W] -> z [B, D], ``head`` z -> logits [B, C]."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, H, W] -> logits [B, C]."""
        logits: Tensor = self.head(self.body(x))
        return logits


class LinearHead(nn.Linear):
    """Logits from features, z [B, D] -> [B, C], with dropout on z while training.

    The state of every head is ``weight`` [C, D] and ``bias`` [C], so heads of different architectures can be exchanged.
    """

    def __init__(self, feature_dim: int, num_classes: int, dropout: float = 0.0) -> None:
        super().__init__(feature_dim, num_classes)
        self.dropout = dropout

    def forward(self, input: Tensor) -> Tensor:
        """z [B, D] -> logits [B, C]."""
        return super().forward(F.dropout(input, self.dropout, self.training) if self.dropout else input)

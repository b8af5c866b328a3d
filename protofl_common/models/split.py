"""The one shape that every client model has: body and head."""

from __future__ import annotations

from torch import Tensor, nn


class SplitModel(nn.Module):
    """A model that is cut at its features: ``body`` x [B, …] -> z [B, D], ``head`` z -> logits [B, C]."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """x [B, …] -> logits [B, C]."""
        logits: Tensor = self.head(self.body(x))
        return logits

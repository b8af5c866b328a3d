"""The one shape that every client model has: body and head; and SCAFFOLD's control variates of a model."""

import torch
from torch import Tensor, nn


class SplitModel(nn.Module):
    """A model that is cut at its features: ``body`` x [B, …] -> z [B, D], ``head`` z -> logits [B, C]."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def control_variate(model: nn.Module) -> nn.ParameterList:
    """Return zeros in the shapes of the model's parameters that train, in their order and on their device."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    return nn.ParameterList([nn.Parameter(torch.zeros_like(each), requires_grad=False) for each in parameters])

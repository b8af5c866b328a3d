"""Control variates of a model (Karimireddy et al., "SCAFFOLD", ICML 2020)."""

from __future__ import annotations

import torch
from torch import nn


def control_variate(model: nn.Module) -> nn.ParameterList:
    """Return zeros in the shapes of the model's parameters that train, in their order and on their device."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return nn.ParameterList([nn.Parameter(torch.zeros_like(one), requires_grad=False) for one in parameters])

"""What a model costs to compute."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def forward_flops(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Floating-point operations for one sample of ``input_shape``, forward: 2 per multiply-add of layers with weights.

    A backward pass takes about twice as many (FedTGP, Appendix A, after Chiang et al. 2023).
    """
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, *input_shape))
    return int(counter.get_total_flops())

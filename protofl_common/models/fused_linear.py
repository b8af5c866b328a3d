"""Plain SGD of wide linear layers inside the backward pass, without ever storing their gradients.

With small batches a wide layer's step is a matter of memory traffic. But its gradient is a product
gᵀx of two thin matrices (g [B, out] the gradient of the outputs, x [B, in] the inputs), and a
matrix product can add to its target:

    no momentum:  W ← (1 − lr·λ) W − lr·gᵀx
    momentum μ:   M ← μ M + gᵀx + λ W,   W ← W − lr·M                        (λ: weight decay)

This is the step of ``torch.optim.SGD``, up to the rounding of the last bit. It is taken from blocks
of rows that fit into a core's own cache, just after the block has served for the gradient of the
inputs, gW.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MIN_WEIGHTS = 2**17  # smaller layers gain nothing
BLOCK_ROWS = 32  # rows at a time, of layers of at least `BLOCK_FROM` weights
BLOCK_FROM = 2**21
Group = dict[str, Any]  # of an optimizer's parameters: its settings, and the parameters


@contextmanager
def fused_linears(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[list[nn.Linear]]:
    """Let ``backward`` itself update the wide linear weights of ``model`` inside the ``with``.

    The optimizer's ``step`` updates all other parameters. Nothing else changes for the caller:
    learning rate, momentum and weight decay are those of the parameter group, and both state dicts
    keep their keys. Yields the layers concerned: none if the optimizer is not SGD (or a Nesterov,
    dampened, maximising one), none on a GPU. A saved state of the optimizer must be loaded before.

    Not for training that looks at the gradients (clipping, DP-SGD) or calls ``backward`` several
    times before a step. A layer used twice in one forward pass, or a loss that also depends on the
    weight itself, is a RuntimeError.
    """
    layers = []
    for layer, group in _fusible(model, optimizer):
        layer.weight.grad = None
        forward = partial(_forward, layer, optimizer.state, group)
        layer.forward = forward  # type: ignore[method-assign]
        layers.append(layer)
    hook = optimizer.register_step_pre_hook(partial(_refuse_gradients, layers))
    try:
        yield layers
    finally:
        hook.remove()
        for layer in layers:
            del layer.forward  # the attribute of the instance, behind which is the method


def _fusible(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[nn.Linear, Group]]:
    """Return a model's layers that `fused_linears` can update, each with its parameter group.

    They are linear layers of at least `MIN_WEIGHTS` trainable weights on a CPU, of plain SGD.
    Subclasses of either are left out: their ``forward`` or ``step`` may do something else.
    """
    if type(optimizer) is not torch.optim.SGD:
        return []
    layer_of = {layer.weight: layer for layer in model.modules() if type(layer) is nn.Linear}
    fusible = []
    for group in optimizer.param_groups:
        if group["nesterov"] or group["dampening"] or group["maximize"]:
            continue
        for weight in group["params"]:
            is_wide = weight in layer_of and weight.numel() >= MIN_WEIGHTS
            if is_wide and weight.requires_grad and weight.device.type == "cpu":
                fusible.append((layer_of[weight], group))
    return fusible


def _refuse_gradients(layers: list[nn.Linear], *_: Any) -> None:
    """Raise RuntimeError if one of the fused weights, which never get a gradient, has one."""
    if any(layer.weight.grad is not None for layer in layers):
        raise RuntimeError(
            "a fused linear weight has a gradient from elsewhere: train without fused_linears"
        )


def _forward(layer: nn.Linear, state: dict[Tensor, Any], group: Group, x: Tensor) -> Tensor:
    """Compute a linear layer's output; while training, its backward pass will update the weight.

    ``state`` is the optimizer's, and ``group`` the parameter group that the weight is in.
    """
    if not layer.training or not torch.is_grad_enabled():
        return F.linear(x, layer.weight, layer.bias)
    output: Tensor = _LinearWithSgd.apply(x, layer.weight, layer.bias, state, group)
    return output


class _LinearWithSgd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: dict[Tensor, Any],
        group: Group,
    ) -> Tensor:
        # as saved tensors: in `backward` autograd then notices if the weight has changed in between
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # the parameter itself, which is the key of its optimizer state
        ctx.state = state
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None, None]:
        """Update W in place, in blocks of rows, and return the gradients of x and of the bias.

        A block of W serves for the gradient of x, gW, before it is changed.
        """
        x, weight = ctx.saved_tensors
        rows = BLOCK_ROWS if weight.numel() >= BLOCK_FROM else len(weight)
        blocks = weight.split(rows)
        momentum_blocks: Sequence[Tensor | None] = [None] * len(blocks)
        if ctx.group["momentum"]:
            state = ctx.state[ctx.weight]
            if state.get("momentum_buffer") is None:  # before the first step; SGD's own name
                state["momentum_buffer"] = torch.zeros_like(weight)
            momentum_blocks = state["momentum_buffer"].split(rows)

        grad_x = torch.zeros_like(x)
        for grad_block, block, momentum_block in zip(
            grad.split(rows, 1), blocks, momentum_blocks, strict=True
        ):
            grad_x.addmm_(grad_block, block)
            _update(block, momentum_block, grad_block.T, x, ctx.group)
        _, _, bias_needs_grad, _, _ = ctx.needs_input_grad
        grad_bias = grad.sum(0) if bias_needs_grad else None
        # of x, weight (which is updated already), bias, state and group
        return grad_x, None, grad_bias, None, None


def _update(
    weight: Tensor, momentum: Tensor | None, grad_T: Tensor, x: Tensor, group: Group
) -> None:
    """Take one step of SGD with the gradient gᵀx: M ← μ M + gᵀx + λ W, W ← W − lr·M, in place.

    Without momentum, None, W ← (1 − lr·λ) W − lr·gᵀx.
    """
    lr = group["lr"]
    decay = group["weight_decay"]
    if momentum is None:
        weight.addmm_(grad_T, x, beta=1 - lr * decay, alpha=-lr)
        return
    momentum.addmm_(grad_T, x, beta=group["momentum"])
    if decay:
        momentum.add_(weight, alpha=decay)
    weight.add_(momentum, alpha=-lr)

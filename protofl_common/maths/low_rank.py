"""Updates of weights in few numbers: a matrix as two thin factors, by truncated singular value decomposition (FedKD).

Symbols: a weight [P, …] is the matrix A [P, Q], Q the product of its other sizes (of a convolution in·k·k); its
singular values σ_1 ≥ σ_2 ≥ …, of which the first K are kept. In place of ``name`` stand ``name:left`` [P, K] and
``name:right`` [K, Q], one of which has the singular values in it.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

LEFT, RIGHT = ":left", ":right"


def change(after: Mapping[str, Tensor], before: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, Tensor]:
    """Return the change of the ``trained`` parameters, after − before, and buffers as they are now."""
    return {name: value - before[name] if name in trained else value for name, value in after.items()}


def applied(before: Mapping[str, Tensor], update: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, Tensor]:
    return {name: value + update[name] if name in trained else update[name].clone() for name, value in before.items()}


def compressed(weights: Mapping[str, Tensor], energy: float) -> dict[str, Tensor]:
    """The weights, with the two `factors` of a matrix in its place wherever these are fewer numbers."""
    update: dict[str, Tensor] = {}
    for name, value in weights.items():
        pair = factors(value, energy) if value.is_floating_point() and largest_rank(value.shape) else None
        update |= {name: value} if pair is None else {name + LEFT: pair[0], name + RIGHT: pair[1]}
    return update


def expanded(update: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Restore what `compressed` gave, as tensors of the names and shapes of ``like``."""
    return {
        name: update[name] if name in update else (update[name + LEFT] @ update[name + RIGHT]).reshape(value.shape)
        for name, value in like.items()
    }


def factors(weight: Tensor, energy: float) -> tuple[Tensor, Tensor] | None:
    """A [P, K] and a [K, Q], K the smallest with Σ_{i≤K} σ_i² ≥ ``energy`` · Σ_i σ_i²; None: they are not smaller."""
    matrix = weight.flatten(1).double()
    tall = len(matrix) > matrix.shape[1]
    wide = matrix.T if tall else matrix
    squares, vectors = torch.linalg.eigh(wide @ wide.T)  # σ² from the smallest, and U: many times faster than an SVD
    energies = squares.flip(0).clamp(min=0).cumsum(0)
    rank = 1 + int((energies < energy * energies[-1]).sum())
    if rank > largest_rank(weight.shape):
        return None
    left = vectors[:, -rank:].contiguous()
    right = left.T @ wide
    return (right.T if tall else left).to(weight.dtype), (left.T if tall else right).to(weight.dtype)


def largest_rank(shape: Sequence[int]) -> int:
    """The largest K for which K (P + Q) numbers are fewer than PQ; 0: there is none."""
    numbers = math.prod(shape)
    return (numbers - 1) // (shape[0] + numbers // shape[0]) if len(shape) > 1 else 0

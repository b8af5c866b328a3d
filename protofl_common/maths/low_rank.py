"""Updates of weights in few numbers: a matrix as two thin factors, by truncated SVD (FedKD).

Symbols: a weight [P, …] is the matrix A [P, Q], Q the product of its other sizes (of a convolution
in·k·k); its singular values σ_1 ≥ σ_2 ≥ …, of which the first K are kept. In place of ``name``
stand ``name:left`` [P, K] and ``name:right`` [K, Q], one of which has the singular values in it.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

LEFT = ":left"
RIGHT = ":right"


def change_of(
    after: Mapping[str, Tensor], before: Mapping[str, Tensor], trained: Collection[str]
) -> dict[str, Tensor]:
    """Return the change of the ``trained`` parameters, after − before, and buffers as they are."""
    update = {}
    for name, value in after.items():
        update[name] = value - before[name] if name in trained else value
    return update


def apply_change(
    before: Mapping[str, Tensor], update: Mapping[str, Tensor], trained: Collection[str]
) -> dict[str, Tensor]:
    """Return the weights after an update: the inverse of `change_of`."""
    after = {}
    for name, value in before.items():
        after[name] = value + update[name] if name in trained else update[name].clone()
    return after


def compress(weights: Mapping[str, Tensor], energy: float) -> dict[str, Tensor]:
    """Return the weights, with two `factors` in the place of a matrix where these are smaller."""
    update: dict[str, Tensor] = {}
    for name, value in weights.items():
        pair = None
        if value.is_floating_point() and largest_rank(value.shape):
            pair = factors(value, energy)
        if pair is None:
            update[name] = value
        else:
            left, right = pair
            update[name + LEFT] = left
            update[name + RIGHT] = right
    return update


def expand(update: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Restore what `compress` gave, as tensors of the names and shapes of ``like``."""
    weights = {}
    for name, value in like.items():
        if name in update:
            weights[name] = update[name]
        else:
            product = update[name + LEFT] @ update[name + RIGHT]
            weights[name] = product.reshape(value.shape)
    return weights


def factors(weight: Tensor, energy: float) -> tuple[Tensor, Tensor] | None:
    """Return factors [P, K] and [K, Q] of A, or None where they are not smaller than A.

    K is the smallest with Σ_{i≤K} σ_i² ≥ ``energy`` · Σ_i σ_i².
    """
    A = weight.flatten(1).double()
    is_tall = len(A) > A.shape[1]
    wide = A.T if is_tall else A

    # σ² from the smallest, and U: many times faster than an SVD
    squares, vectors = torch.linalg.eigh(wide @ wide.T)
    energies = squares.flip(0).clamp(min=0).cumsum(0)
    rank = 1 + int((energies < energy * energies[-1]).sum())
    if rank > largest_rank(weight.shape):
        return None

    U = vectors[:, -rank:].contiguous()
    projected = U.T @ wide
    if is_tall:
        return projected.T.to(weight.dtype), U.T.to(weight.dtype)
    return U.to(weight.dtype), projected.to(weight.dtype)


def largest_rank(shape: Sequence[int]) -> int:
    """Return the largest K for which K (P + Q) numbers are fewer than PQ; 0 if there is none."""
    if len(shape) < 2:
        return 0
    P = shape[0]
    PQ = math.prod(shape)
    return (PQ - 1) // (P + PQ // P)

"""Updates of weights in few numbers: a matrix as two thin factors, by truncated SVD (FedKD).

Symbols: a weight [P, …] is the matrix A [P, Q], Q the product of its other sizes (of a convolution
in·k·k); its singular values σ_1 ≥ σ_2 ≥ …, of which the first K are kept. In place of ``name``
stand ``name:left`` [P, K] and ``name:right`` [K, Q], one of which has the singular values in it.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

State = Mapping[str, Tensor]  # of a model or a part of it: name of parameter or buffer -> value
LEFT = ":left"
RIGHT = ":right"


def change_of(after: State, before: State, trained: Collection[str]) -> dict[str, Tensor]:
    """Return after − before of the ``trained`` parameters, and all other tensors as ``after``."""
    return {
        name: value - before[name] if name in trained else value for name, value in after.items()
    }


def apply_change(before: State, update: State, trained: Collection[str]) -> dict[str, Tensor]:
    """Return the weights after an update: ``before`` plus what `change_of` gave."""
    return {
        name: value + update[name] if name in trained else update[name].clone()
        for name, value in before.items()
    }


def compress(weights: State, energy: float) -> dict[str, Tensor]:
    """Return the weights, with two `factors` in the place of a matrix where these are smaller.

    They are called ``name:left`` and ``name:right``. ``energy``, in (0, 1], is the part of the
    squares of a matrix's singular values that the factors keep.
    """
    update: dict[str, Tensor] = {}
    for name, value in weights.items():
        pair = factors(value, energy)
        if pair is None:
            update[name] = value
        else:
            update[name + LEFT], update[name + RIGHT] = pair
    return update


def expand(update: State, like: State) -> dict[str, Tensor]:
    """Return the weights that `compress` was given, with its factors multiplied.

    They have the names and shapes of ``like``; rounded, and less what the factors did not keep.
    """
    weights = {}
    for name, value in like.items():
        if name in update:
            weights[name] = update[name]
        else:
            product = update[name + LEFT] @ update[name + RIGHT]
            weights[name] = product.reshape(value.shape)
    return weights


def factors(weight: Tensor, energy: float) -> tuple[Tensor, Tensor] | None:
    """Return factors [P, K] and [K, Q] of a weight, or None where they are not smaller than it.

    None for whole numbers, too.
    The weight [P, …] is flattened to the matrix A [P, Q]. Of its singular values σ, the largest K
    are kept: K is the smallest number with Σ_{i≤K} σ_i² ≥ ``energy`` · Σ_i σ_i².
    """
    most = largest_rank(weight.shape)  # 0 of a vector, which cannot be flattened to a matrix
    if most == 0 or not weight.is_floating_point():
        return None
    A = weight.flatten(1).double()
    is_tall = len(A) > A.shape[1]
    wide = A.T if is_tall else A  # the matrix product below is then as small as can be

    # W Wᵀ of the wide matrix W has the eigenvalues σ², in ascending order, and the left singular
    # vectors of W as eigenvectors: many times faster than an SVD
    squares, vectors = torch.linalg.eigh(wide @ wide.T)
    energies = squares.flip(0).clamp(min=0).cumsum(0)
    # K is one more than the number of ranks that keep too little of the energy
    rank = 1 + int((energies < energy * energies[-1]).sum())
    if rank > most:
        return None

    U = vectors[:, -rank:].contiguous()  # those of the largest K
    projected = U.T @ wide  # the other factor, with the singular values in it: U Uᵀ W ≈ W
    if is_tall:
        return projected.T.to(weight.dtype), U.T.to(weight.dtype)
    return U.to(weight.dtype), projected.to(weight.dtype)


def largest_rank(shape: Sequence[int]) -> int:
    """Return the largest K with which factors [P, K] and [K, Q] are smaller than a weight [P, …].

    Q is the product of the weight's other sizes. 0 if there is none, as for a vector.
    """
    if len(shape) < 2:
        return 0
    P = shape[0]
    PQ = math.prod(shape)
    Q = PQ // P
    return (PQ - 1) // (P + Q)  # K (P + Q) < PQ

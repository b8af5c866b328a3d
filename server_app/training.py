"""Training on the vectors that clients have sent, for servers that do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from protofl_common.catalog import ServerTrainingHparams


def train(
    loss: Callable[[Tensor], Tensor],
    count: int,
    optimizer: torch.optim.Optimizer,
    hparams: ServerTrainingHparams,
    generator: torch.Generator,
    fewest: int = 1,
) -> float:
    """``server-epochs`` passes over ``count`` vectors in shuffled minibatches; the mean loss of the last pass.

    ``loss`` gets the rows of a minibatch, int64; one of less than ``fewest`` is left out.
    """
    for _ in range(hparams.server_epochs):
        total, seen = 0.0, 0
        for batch in torch.randperm(count, generator=generator).split(hparams.server_batch_size or count):
            if len(batch) < fewest:
                continue
            value = loss(batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            total, seen = total + value.item() * len(batch), seen + len(batch)
    return total / max(1, seen)

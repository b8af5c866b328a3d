"""What the clients of a round have sent, and training on it, for servers that do."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from protofl_common.catalog import ServerTrainingHparams
from protofl_common.prototypes import Prototypes
from server_app.validation.replies import Upload


def vectors_of(uploads: Iterable[Upload], name: str = "prototypes") -> dict[str, Prototypes]:
    """Site -> the vectors that it has sent under ``name``, if any."""
    return {upload.site: sent for upload in uploads if (sent := upload.payload.vectors(name)) is not None}


def together(uploads: Iterable[Upload]) -> tuple[Tensor, Tensor]:
    """All client prototypes of a round [P, D] and their labels [P]."""
    every = Prototypes.joined(vectors_of(uploads).values())
    return every.means, every.labels


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

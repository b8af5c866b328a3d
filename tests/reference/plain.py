"""A client of the independent scripts. It shares with the system only what is not the algorithm: the clients' data,
their initial weights and the seeds of the batch orders."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from protofl_common.datasets import open_client_data
from protofl_common.models.build import build_model
from protofl_common.seeding import derive_seed
from protofl_common.settings import Settings

BATCH, CLIENTS = 10, 3


class PlainClient:
    """Data, model and momentum SGD; the losses and prototypes are each script's own."""

    def __init__(self, settings: Settings, index: int, arch: str) -> None:
        data = open_client_data(settings.data, seed=settings.run.seed, partition=index, num_partitions=CLIENTS)
        mean, std = (np.array(values, np.float32).reshape(1, -1, 1, 1) for values in (data.mean, data.std))
        self.x, self.x_test = (
            torch.from_numpy((images.astype(np.float32) / 255 - mean) / std)
            for images in (data.train_inputs, data.test_inputs)
        )
        self.data = data
        self.y, self.y_test = data.train_labels.tolist(), data.test_labels.tolist()
        self.name, self.seed = f"site-{index}", settings.run.seed
        self.dim, self.arch = settings.model.feature_dim, arch
        self.lr, self.momentum = settings.training.lr, settings.training.momentum
        self.hparams = settings.hparams

    def model_of(self, owner: str) -> torch.nn.Module:
        return build_model(
            self.arch,
            input_shape=self.data.train_inputs.shape[1:],
            num_classes=10,
            feature_dim=self.dim,
            seed=derive_seed(self.seed, "model", owner),
        )

    def batches(self, number: int) -> Iterator[list[int]]:
        """Rows of the training data, in the order that round ``number`` sees them."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "train", self.name, number))
        order = torch.randperm(len(self.y), generator=generator).tolist()
        for start in range(0, len(order), BATCH):
            yield order[start : start + BATCH]

    def step(self, loss: torch.Tensor, model: torch.nn.Module, velocity: list[torch.Tensor]) -> None:
        """v ← μ v + ∇; θ ← θ − η v."""
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g, v in zip(model.parameters(), gradients, velocity, strict=True):
                v.mul_(self.momentum).add_(g)
                p.sub_(self.lr * v)


def cross_entropy(logits: torch.Tensor, labels: list[int]) -> torch.Tensor:
    """−log softmax at the label, averaged, row by row."""
    logp = torch.log_softmax(logits, dim=1)
    return -sum(logp[row, label] for row, label in enumerate(labels)) / len(labels)

"""Small models, data for them, and sections of the settings."""

import dataclasses

import torch
from torch import Tensor, nn

from client_app.data import Samples
from protofl_common.config.sections import PrivacySettings, TrainingSettings
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.models.build import build_model
from protofl_common.models.split import SplitModel


def settings(**changes: object) -> TrainingSettings:
    return dataclasses.replace(Settings.from_run_config(default_run_config()).training, **changes)  # type: ignore[arg-type]


def some_data(n: int = 23) -> Samples:
    generator = torch.Generator().manual_seed(0)
    return Samples(
        torch.randn(n, 1, 8, 8, generator=generator), torch.randint(0, 4, (n,), generator=generator)
    )


def some_model(arch: str = "cnn4") -> SplitModel:
    return build_model(arch, input_shape=(1, 8, 8), num_classes=4, feature_dim=6, seed=1)


def privacy(**changes: object) -> PrivacySettings:
    defaults = Settings.from_run_config(default_run_config()).privacy
    return dataclasses.replace(defaults, dp="sample", **changes)  # type: ignore[arg-type]


CLASSES, DIM = 10, 12


def build(
    arch: str, channels: int = 1, size: int = 28, dim: int = DIM, seed: int = 0
) -> SplitModel:
    return build_model(
        arch, input_shape=(channels, size, size), num_classes=CLASSES, feature_dim=dim, seed=seed
    )


def assert_it_learns(model: SplitModel, x: Tensor, lr: float, steps: int) -> None:
    """Steps of SGD lower the loss under one dropout mask, and move every parameter."""
    y = torch.arange(len(x)) % model.head.out_features
    optimizer = torch.optim.SGD(model.train().parameters(), lr=lr)
    before = [p.clone() for p in model.parameters()]

    def loss() -> Tensor:
        torch.manual_seed(0)
        return nn.functional.cross_entropy(model(x), y)

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(loss())
        losses[-1].backward()
        optimizer.step()
    with torch.no_grad():
        assert loss() < losses[0]
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

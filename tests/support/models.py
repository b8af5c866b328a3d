"""Small models, data for them, and sections of the settings."""

import dataclasses

import torch
from torch import Tensor, nn

from client_app.learning.data import Samples
from client_app.learning.training import Batch, Loss, LossTerms
from client_app.protections.private_step import PrivateStep
from protofl_common.config.sections import PrivacySettings, TrainingSettings
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.models.build import build_model
from protofl_common.models.split import SplitModel
from protofl_common.privacy.persons import Persons
from protofl_common.privacy.plan import plan_of


def settings(**changes: object) -> TrainingSettings:
    defaults = Settings.from_run_config(default_run_config()).training
    return dataclasses.replace(defaults, **changes)  # type: ignore[arg-type]


def some_data(n: int = 23) -> Samples:
    """Return n random images of 8×8 pixels with labels of four classes, always the same."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 4, (n,), generator=generator)
    return Samples(inputs, labels)


def some_model(arch: str = "cnn4") -> SplitModel:
    return build_model(arch, input_shape=(1, 8, 8), num_classes=4, feature_dim=6, seed=1)


def linear(width: int = 2) -> SplitModel:
    """Return the model z = w x with w = 0, from ``width`` numbers x to one."""
    body = nn.Linear(width, 1, bias=False)
    nn.init.zeros_(body.weight)
    return SplitModel(body, nn.Identity())


def downhill(batch: Batch) -> LossTerms:
    """A loss of a `linear` model, whose gradient by w is the sample's input."""
    return {"total-of-features": batch.features.sum() / len(batch.labels)}


def dp_step(
    model: SplitModel,
    samples: int,
    batch_size: int = 10,
    noise: float | None = None,
    loss: Loss = downhill,
    persons: Persons | None = None,
    **changes: object,
) -> PrivateStep:
    """Return a private step of plain SGD with lr = 1, for training on so many samples.

    With ``persons``, ``samples`` is their number. ``noise`` takes the place of the least that
    keeps ε; ``changes`` are settings of privacy.
    """
    plan = plan_of(privacy(**changes), samples, batch_size, epochs=1, tables=(0,), evaluate_every=0)
    if noise is not None:
        plan = dataclasses.replace(plan)  # a copy: equal arguments get one plan for all tests
        plan.__dict__["noise"] = noise  # is a cached property, which now is not computed
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return PrivateStep([model], optimizer, loss, plan=plan, persons=persons)


def cross_entropy(batch: Batch) -> LossTerms:
    return {"cross-entropy": nn.functional.cross_entropy(batch.logits, batch.labels)}


def privacy(**changes: object) -> PrivacySettings:
    defaults = Settings.from_run_config(default_run_config()).privacy
    return dataclasses.replace(defaults, **{"dp": "sample", **changes})  # type: ignore[arg-type]


CLASSES = 10
DIM = 12


def build(
    arch: str, channels: int = 1, size: int = 28, dim: int = DIM, seed: int = 0
) -> SplitModel:
    shape = (channels, size, size)
    return build_model(arch, input_shape=shape, num_classes=CLASSES, feature_dim=dim, seed=seed)


def assert_it_learns(model: SplitModel, x: Tensor, lr: float, steps: int) -> None:
    """So many steps of SGD on the inputs x lower the loss, and move every parameter.

    The labels are the classes in turn.
    """
    y = torch.arange(len(x)) % model.head.out_features
    optimizer = torch.optim.SGD(model.train().parameters(), lr=lr)
    before = [p.clone() for p in model.parameters()]

    def loss() -> Tensor:
        torch.manual_seed(0)  # one dropout mask for all steps, so that losses can be compared
        return nn.functional.cross_entropy(model(x), y)

    first_loss = loss().detach()
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    with torch.no_grad():
        assert loss() < first_loss
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)

"""Trainings of several clients at once, beside the same ones after another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from client_app.learning.data import Samples
from client_app.learning.together import Training, reads_only, train_stacked
from client_app.learning.training import (
    Batch,
    FusedStep,
    LossTerms,
    make_optimizer,
)
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.maths.losses import prototype_alignment
from protofl_common.models.split import HiddenHead, LinearHead, SplitModel

SIZES = (23, 8, 41, 17, 9, 40)
CLASSES = 4


class Half:
    """What a loss reads of its client's half."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.prototypes_CD = torch.randn(CLASSES, 6, generator=generator, dtype=torch.float64)
        self.present_C = torch.tensor([True, True, False, True])
        self.hparams = self.task = None

    @reads_only("prototypes_CD")
    def loss(self, batch: Batch) -> LossTerms:
        distance = prototype_alignment(
            batch.features, batch.labels, self.prototypes_CD, self.present_C, "l2", "class"
        )
        entropy = nn.functional.cross_entropy(batch.logits, batch.labels)
        return {"cross-entropy": entropy, "prototype": 0.3 * distance}


def network(kind: str) -> SplitModel:
    layers = [nn.Flatten(), nn.Linear(10, 6), nn.ReLU()]
    if kind == "projection":
        layers.append(nn.BatchNorm1d(6))
    head = HiddenHead(6, 5, CLASSES) if kind == "hidden" else LinearHead(6, CLASSES)
    return SplitModel(nn.Sequential(*layers), head).double()


def trainings(kind: str, **changes: Any) -> list[Training]:
    settings = Settings.from_run_config(default_run_config(), {}).training
    settings = replace(settings, local_epochs=3, batch_size=8, **changes)
    torch.manual_seed(0)
    found = []
    for client, size in enumerate(SIZES):
        inputs = torch.randn(size, 10, dtype=torch.float64)
        data = Samples(inputs, torch.randint(0, CLASSES, (size,)))
        model = network(kind)
        step = FusedStep((model,), make_optimizer((model,), settings), Half().loss)
        found.append(Training(step, data, settings, seed=client, checks=True))
    return found


def all_numbers(each: Training) -> dict[str, Tensor]:
    numbers = dict(each.step.model.state_dict())
    for index, state in each.step.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if value is not None:
                numbers[f"{index}/{name}"] = torch.as_tensor(value)
    return numbers


@pytest.mark.parametrize("kind", ["mlp", "hidden", "projection"])
@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.0, "drop_last": True},
        {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01},
        {"local_steps": 11},
    ],
    ids=str,
)
def test_weights_states_and_losses_are_those_of_one_after_another(
    kind: str, changes: dict[str, Any]
) -> None:
    alone = trainings(kind, **changes)
    stacked = trainings(kind, **changes)
    for _ in range(2):  # the second time, optimizers have a state
        expected = [each.alone() for each in alone]
        found = train_stacked(stacked)
        for one, other in zip(expected, found, strict=True):
            assert other == pytest.approx(one, abs=1e-9)
    for one, other in zip(alone, stacked, strict=True):
        wanted = all_numbers(one)
        numbers = all_numbers(other)
        assert wanted.keys() == numbers.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(numbers[name], value, rtol=0, atol=1e-9)

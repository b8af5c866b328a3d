"""Updating wide linear weights inside backward is torch.optim.SGD, to the rounding."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from protofl_common.models import fused_linear
from protofl_common.models.build import build_model
from protofl_common.models.fused_linear import fused_linears
from protofl_common.models.split import SplitModel

Settings = dict[str, float]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Let the layers of these little models be treated, except the head.

    The widest layer, 40 × 50, is updated in several blocks, the last one incomplete.
    """
    monkeypatch.setattr(fused_linear, "MIN_WEIGHTS", 64)
    monkeypatch.setattr(fused_linear, "BLOCK_ROWS", 7)
    monkeypatch.setattr(fused_linear, "BLOCK_FROM", 32 * 50)


def small_model(dtype=torch.float64):
    """Return the same network at every call; its first two layers differ in their bias."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(
            nn.Linear(50, 40),
            nn.ReLU(),
            nn.Linear(40, 30, bias=False),
            nn.ReLU(),
            nn.Linear(30, 6),
            nn.ReLU(),
        )
        return SplitModel(body, nn.Linear(6, 4)).to(dtype)


def prototype_loss(model, x, y, prototypes):
    """Return a loss that depends on features and logits, as FedProto's does."""
    z = model.body(x)
    return nn.functional.cross_entropy(model.head(z), y) + nn.functional.mse_loss(z, prototypes[y])


def train(model, settings, fused, rounds=2):
    """Take 50 steps in ``rounds`` rounds with one optimizer, which is returned."""
    generator = torch.Generator().manual_seed(1)
    dtype = model.head.weight.dtype
    data = torch.randn(50, 10, 50, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 4, (50, 10), generator=generator)
    prototypes = torch.randn(4, 6, generator=generator, dtype=torch.float64).to(dtype)

    optimizer = torch.optim.SGD(model.parameters(), **settings)
    for steps_of_round in torch.arange(50).chunk(rounds):
        with fused_linears(model, optimizer) if fused else nullcontext():
            for i in steps_of_round:
                optimizer.zero_grad()
                prototype_loss(model, data[i], labels[i], prototypes).backward()
                optimizer.step()
    return optimizer


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fifty_steps_are_sgds(dtype, tolerance, momentum, weight_decay):
    """Weights and momentum are those of `torch.optim.SGD`, up to rounding."""
    settings = {"lr": 0.05, "momentum": momentum, "weight_decay": weight_decay}
    ours = small_model(dtype)
    reference = small_model(dtype)
    start = deepcopy(ours.state_dict())

    our_optimizer = train(ours, settings, fused=True)
    optimizer = train(reference, settings, fused=False)

    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(ours.state_dict(), reference.state_dict())
    close(our_optimizer.state_dict(), optimizer.state_dict())

    assert unchanged(ours, start) == set()


def unchanged(model, start):
    """Return the names of the weights that are as they were at the ``start``."""
    return {key for key, value in model.state_dict().items() if torch.equal(value, start[key])}


def test_the_model_looks_the_same_inside_and_is_the_same_after_even_an_error():
    """Inside, a wide layer steps in backward and keeps no gradient of its weight."""
    model = small_model()
    first = model.body[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = list(model.state_dict())
    x = torch.ones(1, 50, dtype=torch.float64)

    with fused_linears(model, optimizer) as layers:
        assert layers == [first, model.body[2], model.body[4]]
        assert list(model.state_dict()) == keys
        before = first.weight.clone()
        optimizer.param_groups[0]["lr"] = 0.0  # which is read at every step
        model(x).sum().backward()
        assert torch.equal(first.weight, before)
        assert first.weight.grad is None
        assert first.bias.grad is not None

    model(x).sum().backward()
    assert first.weight.grad is not None

    with pytest.raises(KeyError), fused_linears(model, optimizer):
        raise KeyError
    # nothing of it is left in the layer and in the optimizer
    assert "forward" not in vars(first)
    assert not optimizer._optimizer_step_pre_hooks


def test_two_linear_layers_of_htcnn_3_are_wide_enough():
    """So are others of its size, in a run with the default settings."""
    model = build_model("htcnn-3", input_shape=(1, 28, 28), num_classes=3, feature_dim=512, seed=0)
    with fused_linears(model, torch.optim.SGD(model.parameters(), lr=0.01)) as layers:
        assert [tuple(layer.weight.shape) for layer in layers] == [(512, 4608), (512, 512)]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "eval"])
def test_evaluation_takes_the_ordinary_path(mode, monkeypatch):
    """Without gradients, or in evaluation mode, the layer's forward is PyTorch's own."""

    def other_path(*_):
        pytest.fail("not the ordinary path")

    monkeypatch.setattr(fused_linear._LinearWithSgd, "apply", other_path)
    model = small_model()
    x = torch.ones(2, 50, dtype=torch.float64)
    with fused_linears(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        if mode == "eval":
            model.eval()(x)
        else:
            with getattr(torch, mode)():
                model(x)


OPTIMIZERS = {
    "adam": lambda m: torch.optim.Adam(m.parameters()),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "dampened": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.1),
    "maximising": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, maximize=True),
    "other parameters": lambda m: torch.optim.SGD(m.head.parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_are_left_alone(name):
    model = small_model()
    with fused_linears(model, OPTIMIZERS[name](model)) as layers:
        assert layers == []


@pytest.mark.parametrize("parts", [("weight",), ("weight", "bias"), ("bias",)])
def test_frozen_parts_stay_while_the_rest_takes_its_steps(parts):
    """Frozen weights stay though the optimizer knows them, and has momentum and weight decay."""
    ours = small_model()
    reference = small_model()
    for model in (ours, reference):
        for part in parts:
            getattr(model.body[0], part).requires_grad_(False)
    start = deepcopy(ours.state_dict())

    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    train(ours, settings, fused=True)
    train(reference, settings, fused=False)

    torch.testing.assert_close(ours.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-12)
    assert unchanged(ours, start) == {f"body.0.{part}" for part in parts}


def test_a_layer_used_twice_is_refused():
    """Its weight has moved after the first of the two uses that backward comes to."""
    model = small_model()
    x = torch.ones(1, 50, dtype=torch.float64)
    with fused_linears(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        loss = (model(x) + model(2 * x)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_loss_on_the_weight_itself_is_refused():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fused_linears(model, optimizer):
        model.body[0].weight.sum().backward()
        with pytest.raises(RuntimeError, match="gradient from elsewhere"):
            optimizer.step()

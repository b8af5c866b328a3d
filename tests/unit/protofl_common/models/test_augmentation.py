"""FedFA's layers: where they are in which network, and at the edges.

Its script has their equations.
"""

import pytest
import torch

from protofl_common.models.augmentation import (
    Augmentation,
    fusion_coefficients,
    resampled,
    stages_of,
)
from protofl_common.models.build import build_model

STAGES = {
    "cnn4": ((1, 28, 28), {"3": 32, "6": 64}),
    "htcnn-3": ((1, 28, 28), {"3": 32}),
    "mnist-cnn": ((1, 28, 28), {"3": 10, "7": 20}),
    "resnet10": (
        (3, 32, 32),
        {"0.layer1.0": 64, "0.layer2.0": 128, "0.layer3.0": 256, "0.layer4.0": 512},
    ),
    "resnet6-imagenet-stem": ((1, 28, 28), {"0.layer1.0": 64, "0.layer4": 128}),
    "resnet10-imagenet-stem": (
        (1, 32, 32),
        {"0.layer1.0": 64, "0.layer2.0": 128, "0.layer3.0": 256},
    ),
    "mobilenet-v2": (
        (3, 32, 32),
        {"1.features.1": 16, "1.features.3": 24, "1.features.6": 32, "1.features.13": 96},
    ),
    "signal-cnn": ((12, 29), {"0.3": 128}),
    "text-cnn": ((20,), {"1.3": 128}),
    "signal-transformer": ((12, 29), {}),
    "text-gru": ((20,), {}),
    "mlp-2": ((30,), {}),
    "projection": ((30,), {}),
}
"""Architecture -> (shape of a sample, name of the layer that ends a stage -> channels)."""


def body_of(arch, shape):
    return build_model(arch, input_shape=shape, num_classes=4, feature_dim=16, seed=1).body


@pytest.mark.parametrize("arch", STAGES)
def test_stages_end_where_maps_get_smaller(arch):
    """The layers that end a stage are those of `STAGES`, with their channels."""
    shape, wanted = STAGES[arch]
    body = body_of(arch, shape)
    names = {module: name for name, module in body.named_modules()}

    found = stages_of(body, shape)

    assert {names[layer]: channels for layer, channels in found.items()} == wanted


@pytest.mark.parametrize("arch", ["mnist-cnn", "resnet6-imagenet-stem", "text-cnn"])
def test_it_acts_while_training_only_and_leaves_no_trace_in_the_network(arch):
    """A network that augments is compared with a plain one of the same weights.

    The two are equal in evaluation and differ while training. Of the augmentation's own numbers,
    training moves the averages and leaves the coefficients.
    """
    shape, _ = STAGES[arch]
    plain = body_of(arch, shape)
    body = body_of(arch, shape).train()
    samples = torch.randint(0, 9, (3, *shape)) if arch == "text-cnn" else torch.randn(3, *shape)

    augmentation = Augmentation(body, shape, 1.0)  # with a probability of 1: in every step
    assert body.training
    assert body.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(body.eval()(samples), plain.eval()(samples))

    before = {name: value.clone() for name, value in augmentation.state_dict().items()}
    features = body.train()(samples)
    assert not torch.allclose(features, plain.train()(samples))
    for name, value in augmentation.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("coefficients"), name

    features.sum().backward()
    for parameter in body.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_a_moment_of_one_sample_hardly_moves():
    """There is no other sample whose moments would say how far it may move."""
    moment = torch.tensor([[1.0, 5.0]], dtype=torch.float64)
    assert (resampled(moment, torch.ones(2)) - moment).abs().max() < 0.01


def test_one_client_or_huge_averages_leave_finite_coefficients():
    one_client = torch.tensor([[1.0, 0.0, 5.0]], dtype=torch.float64)
    equal = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(fusion_coefficients(one_client), equal)

    huge = torch.tensor([[3e38, 0.0], [-3e38, 1.0]])
    assert fusion_coefficients(huge).isfinite().all()

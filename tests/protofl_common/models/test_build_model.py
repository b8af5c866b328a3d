"""Every architecture in every size, against the published definitions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protofl_common.models import SplitModel, build_model
from protofl_common.models.cnn import CNN_PLANS
from protofl_common.models.groups import ARCHITECTURES

CLASSES, DIM = 10, 12

# Weights and biases, layer by layer, for 28×28×1 images, D = 512, C = 10.
CONV1, CONV2, HEAD = 32 * 25 + 32, 64 * 32 * 25 + 64, 512 * 10 + 10
FLAT1, FLAT2 = 32 * 12 * 12, 64 * 4 * 4
PARAMETERS = {
    "htcnn-1": CONV1 + FLAT1 * 512 + 512 + HEAD,
    "htcnn-2": CONV1 + CONV2 + FLAT2 * 512 + 512 + HEAD,
    "htcnn-3": CONV1 + FLAT1 * 512 + 512 + 512 * 512 + 512 + HEAD,
    "htcnn-4": CONV1 + CONV2 + FLAT2 * 512 + 512 + 512 * 512 + 512 + HEAD,
    "htcnn-5": CONV1 + FLAT1 * 1024 + 1024 + 1024 * 512 + 512 + HEAD,
    "htcnn-6": CONV1 + CONV2 + FLAT2 * 1024 + 1024 + 1024 * 512 + 512 + HEAD,
    "htcnn-7": CONV1 + FLAT1 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 512 + 512 + HEAD,
    "htcnn-8": CONV1 + CONV2 + FLAT2 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 512 + 512 + HEAD,
    "cnn4": CONV1 + CONV2 + FLAT2 * 512 + 512 + HEAD,
}


def build(arch: str, channels: int = 1, size: int = 28, dim: int = DIM, seed: int = 0) -> SplitModel:
    return build_model(arch, in_channels=channels, image_size=size, num_classes=CLASSES, feature_dim=dim, seed=seed)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("size", [8, 16, 28, 32, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_shapes(arch: str, size: int, channels: int) -> None:
    model = build(arch, channels, size).eval()
    with torch.no_grad():
        z = model.body(torch.zeros(2, channels, size, size))
        logits = model.head(z)
    assert z.shape == (2, DIM)
    assert logits.shape == (2, CLASSES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_forward_is_head_after_body(arch: str) -> None:
    model = build(arch, size=8).eval()
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(model(x), model.head(model.body(x)))


@pytest.mark.parametrize(("arch", "size"), [(a, 8) for a in ARCHITECTURES] + [(a, 28) for a in CNN_PLANS])
def test_training_lowers_the_loss_and_moves_every_parameter(arch: str, size: int) -> None:
    torch.manual_seed(0)
    model = build(arch, size=size)
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    x, y = torch.rand(20, 1, size, size), torch.arange(20) % CLASSES

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    noisy = "mnist" in arch  # dropout: losses cannot be compared
    untrained = float("inf") if noisy else loss().item()
    for _ in range(4):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < untrained
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("arch", PARAMETERS)
def test_parameter_counts_of_fedtgp(arch: str) -> None:
    assert count(build(arch, dim=512)) == PARAMETERS[arch]


@pytest.mark.parametrize(("arch", "channels"), [("mnist-cnn", 20), ("mnist-cnn-18", 18), ("mnist-cnn-22", 22)])
def test_parameter_counts_of_fedproto(arch: str, channels: int) -> None:
    expected = (10 * 25 + 10) + (10 * channels * 25 + channels) + (channels * 16 * 50 + 50) + (50 * 10 + 10)
    assert count(build(arch, dim=50)) == expected
    assert count(build("mnist-cnn", dim=50)) == 21_840


def test_mnist_cnn_is_the_published_function() -> None:
    """Written out as in the authors' forward pass, in evaluation mode."""
    model = build("mnist-cnn", dim=50).eval()
    conv1, conv2 = (m for m in model.body.modules() if isinstance(m, nn.Conv2d))
    (fc1,) = (m for m in model.body.modules() if isinstance(m, nn.Linear))
    x, f = torch.rand(4, 1, 28, 28), nn.functional
    z = f.relu(f.max_pool2d(conv2(f.relu(f.max_pool2d(conv1(x), 2))), 2)).view(4, 320)
    torch.testing.assert_close(model.body(x), f.relu(fc1(z)))


def test_mnist_cnn_drops_out_while_training_only() -> None:
    model = build("mnist-cnn")
    x, z = torch.rand(4, 1, 28, 28), torch.rand(4, DIM)
    assert not torch.equal(model.body(x), model.body(x))
    assert not torch.equal(model.head(z), model.head(z))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_relu_after_the_pool_changes_nothing() -> None:
    x = torch.randn(4, 3, 12, 12, requires_grad=True)
    weights = torch.randn(4, 3, 6, 6)
    f = nn.functional
    results = [f.relu(f.max_pool2d(x, 2)), f.max_pool2d(f.relu(x), 2)]
    gradients = [torch.autograd.grad((r * weights).sum(), x)[0] for r in results]
    assert torch.equal(*results)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dim", [512, 64, 600])
def test_resnet_reaches_any_width(dim: int) -> None:
    assert build("resnet10", size=16, dim=dim).eval().body(torch.rand(2, 1, 16, 16)).shape == (2, dim)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_heads_can_be_exchanged(arch: str) -> None:
    shapes = {name: tuple(value.shape) for name, value in build(arch).head.state_dict().items()}
    assert shapes == {"weight": (CLASSES, DIM), "bias": (CLASSES,)}


@pytest.mark.parametrize("arch", ["mnist-cnn", "htcnn-4", "resnet10"])
def test_weights_follow_from_the_seed_alone(arch: str) -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        return list(build(arch, seed=seed).state_dict().values())

    first = weights(1)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again, other = weights(1), weights(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arch": "vgg"}, "arch is 'vgg', not one of mnist-cnn"),
        ({"image_size": 7}, "image_size is 7"),
        ({"in_channels": 0}, "in_channels is 0"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"feature_dim": 0}, "feature_dim is 0"),
    ],
)
def test_impossible_models_are_refused(change: dict[str, object], words: str) -> None:
    arguments: dict[str, object] = {
        "arch": "cnn4",
        "in_channels": 1,
        "image_size": 28,
        "num_classes": 10,
        "feature_dim": 8,
        "seed": 0,
    }
    with pytest.raises(ValueError, match=words):
        build_model(**(arguments | change))  # type: ignore[arg-type]

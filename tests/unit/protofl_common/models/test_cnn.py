"""The small CNNs against the published definitions."""

import pytest
import torch
from torch import nn

from tests.support.models import DIM, build

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


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


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

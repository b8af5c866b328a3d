"""FedGen's generator: what it draws, and the numbers that FedTGP's Table 5 counts; its script has what it makes."""

import pytest
import torch

from protofl_common.experiment.catalog import CATALOG
from protofl_common.models.split import Generator, LinearHead


def test_labels_are_drawn_by_their_counts_and_noise_is_gaussian() -> None:
    seen: list[torch.Tensor] = []
    made = Generator(4, 3, noise_dim=2, seed=1).eval()
    made.hidden.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    features, labels = made.sample(torch.tensor([30, 0, 2**62, 2**61]), 6000, torch.Generator().manual_seed(3))
    assert features.shape == (6000, 3)
    shares = labels.bincount(minlength=4) / 6000
    torch.testing.assert_close(shares, torch.tensor([0.0, 0.0, 2 / 3, 1 / 3]), atol=0.03, rtol=0)
    noise, one_hot = seen[0].split([2, 4], dim=1)
    assert torch.equal(one_hot.argmax(1), labels)
    assert torch.equal(one_hot.sum(1), torch.ones(6000))
    assert noise.mean().item() == pytest.approx(0, abs=0.05)
    assert noise.std().item() == pytest.approx(1, abs=0.05)
    assert (noise < -1).any()  # not uniform between 0 and 1, as in public code


def test_the_same_seed_gives_the_same_generator_and_leaves_the_global_one_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (Generator(3, 4, 2, seed).hidden.weight for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_cifar100_costs_what_the_paper_says() -> None:
    """FedTGP, Table 5: 20 clients, Σ (2 |w| + |Θ|) = 8.69 M; it leaves out buffers and label counts, 0.3 %."""
    head = sum(parameter.numel() for parameter in LinearHead(512, 100).parameters())
    made = Generator(100, 512, 32, seed=0)
    theta = sum(parameter.numel() for parameter in made.parameters())
    assert theta == (32 + 100) * 512 + 512 + 2 * 512 + 512 * 512 + 512
    assert round(20 * (2 * head + theta) / 1e6, 2) == 8.69
    assert (sum(buffer.numel() for buffer in made.buffers()) + 2 * 100) == 2 * 512 + 1 + 2 * 100
    assert set(CATALOG["fedgen"].exchange.down) == {"weights", "generator", "label_counts"}
    assert set(CATALOG["fedgen"].exchange.up) == {"weights", "label_counts"}
